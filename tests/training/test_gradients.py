"""The gradient of a rollout batch: without an optimizer step, and from one step to the next."""

from typing import Any

import pytest
import torch
from distributed import run_ranks
from tiny_models import DENSE
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rc.batch import TokenBatch
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.engine import Sample, SamplingParams
from megatron_rc.settings.loss import LossSettings
from megatron_rc.settings.model import ModelSettings, ParallelSettings
from megatron_rc.settings.train import TrainSettings
from megatron_rc.training import groups
from megatron_rc.training.policy import Policy
from megatron_rc.training.step.reinforce import StepSettings, reinforce_step

LR = 0.5


def measured(rank: int) -> dict[str, Any]:
    answers = torch.randint(0, 37, (8, 5), generator=torch.Generator().manual_seed(3)).tolist()
    samples = [Sample([1, 2, i // 4], answers[i], [-3.0] * 5, "stop", [(0, 0, 5)]) for i in range(8)]
    batch = TokenBatch.from_samples(
        samples, SamplingParams(), rewards=[0.0, 1.0] * 4, groups=[i // 4 for i in range(8)]
    )
    place = groups.initialize(ParallelSettings(), 1)
    train = TrainSettings(optimizer="sgd", clip_grad=0.0, grad_cosine=True)
    policy = Policy(ModelSettings(config=DENSE), ParallelSettings(), train, place)
    policy.start_phase(lr=LR, min_lr=LR, warmup_steps=0, total_steps=10, decay_style="constant")

    def step(take_step: bool) -> dict[str, Any]:
        correction = RolloutCorrection.preset("token-tis")
        limits: dict[str, Any] = {"max_nonfinite_share": 0.0, "take_step": take_step}
        settings = StepSettings(correction=correction, loss=LossSettings(), train=train, **limits)
        return reinforce_step(policy, batch, settings).metrics

    def weights() -> torch.Tensor:
        return torch.cat([p.detach().flatten() for module in policy.modules for p in module.parameters()])

    out: dict[str, Any] = {"weights": [weights()], "gradients": [], "cosines": [], "untouched": []}
    for _ in range(3):
        step(take_step=False)
        out["gradients"].append(policy.gradient())
        out["untouched"].append(torch.equal(weights(), out["weights"][-1]) and policy.phase_updates)
        out["cosines"].append(step(take_step=True).get("grad_cosine"))
        out["weights"].append(weights())
    with policy.moved(out["gradients"][0]):
        out["moved"] = weights()
    out["put back"] = weights()
    step(take_step=False)
    out["padded"] = {"without": policy.gradient()}
    # 64 rows of the batch, and one that only fills up
    policy.rows_multiple = 5
    with _NewLogits(rows=64, columns=DENSE["vocab_size"]) as made:
        step(take_step=False)
    out["padded"] |= {"with": policy.gradient(), "made": made.by}
    return out


class _NewLogits(TorchDispatchMode):
    """Operations that take memory for a tensor as large as the logits."""

    def __init__(self, *, rows: int, columns: int) -> None:
        super().__init__()
        self.rows, self.columns, self.by = rows, columns, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer, name = func(*args, **(kwargs or {})), func._schema.name.removeprefix("aten::")
        allocates = name in ("slice_backward", "select_backward", "empty_like", "zeros", "new_zeros", "clone")
        if allocates and answer.shape[-1:] == (self.columns,) and answer.numel() >= self.rows * self.columns:
            self.by.append(name)
        return answer


@pytest.fixture(scope="module")
def run() -> dict[str, Any]:
    [out] = run_ranks(1, measured)
    return out


def test_the_gradient_is_what_a_step_of_sgd_subtracts(run: dict[str, Any]) -> None:
    for before, after, gradient in zip(run["weights"], run["weights"][1:], run["gradients"], strict=False):
        assert gradient.norm() > 1e-2
        torch.testing.assert_close((before - after) / LR, gradient, rtol=1e-3, atol=1e-6)


def test_a_gradient_without_a_step_changes_neither_weights_nor_the_count_of_updates(run: dict[str, Any]) -> None:
    assert run["untouched"] == [0, 1, 2]


def test_the_metric_is_the_cosine_with_the_gradient_of_the_step_before(run: dict[str, Any]) -> None:
    first, *others = run["cosines"]
    pairs = zip(run["gradients"], run["gradients"][1:], strict=False)
    truths = [float(torch.cosine_similarity(a.double(), b.double(), dim=0)) for a, b in pairs]
    assert first is None, "the first step has none before it"
    assert others == pytest.approx(truths, abs=1e-5) and all(abs(truth) < 0.999 for truth in truths)


def test_moved_weights_are_put_back_exactly(run: dict[str, Any]) -> None:
    torch.testing.assert_close(run["moved"], run["weights"][-1] + run["gradients"][0])
    assert torch.equal(run["put back"], run["weights"][-1])


def test_backward_takes_no_memory_for_a_gradient_of_the_logits_and_padding_changes_none(run: dict[str, Any]) -> None:
    padded = run["padded"]
    torch.testing.assert_close(padded["with"], padded["without"], rtol=1e-5, atol=1e-7)
    assert padded["made"] == []
