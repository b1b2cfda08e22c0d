"""The gradient of a rollout batch, and one step with the fused head against one that keeps logits."""

import math
from collections.abc import Sequence
from contextlib import closing
from typing import Any, NamedTuple

import pytest
import torch
from distributed import run_cases, run_ranks
from tiny_models import DENSE, KINDS
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rc.backend import set_debug_checks
from megatron_rc.batch import TokenBatch
from megatron_rc.correction.settings import RolloutCorrection, Weight
from megatron_rc.engine import Sample, SamplingParams
from megatron_rc.settings.loss import LossSettings
from megatron_rc.settings.model import ModelSettings, ParallelSettings
from megatron_rc.settings.train import TrainSettings
from megatron_rc.training import groups
from megatron_rc.training.policy import Policy
from megatron_rc.training.step.reinforce import StepSettings, reinforce_step

VOCABULARY, HIDDEN = 37, 32
LR = 0.5


class Case(NamedTuple):
    kind: str = "dense"
    tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    dtype: str = "fp32"
    old: str = "recompute"
    centering: str = "none"
    entropy: float = 0.1
    ranks: int = 1
    chunk: int | None = None
    logits_dtype: str | None = None


CASES = [Case(), Case(chunk=2), Case(old="current", chunk=2), Case(old="current", chunk=2, entropy=0.0)]
CASES += [Case(old="current", centering="top", **more) for more in ({"chunk": 2}, {"tensor": 2, "ranks": 2})]
CASES += [Case(dtype="fp16"), Case(dtype="fp16", chunk=3, logits_dtype="fp32")]
CASES += [Case(ranks=2), Case(tensor=2, ranks=2), Case(pipeline=2, ranks=2)]
# with sequence parallelism, whose ranks split the rows and those of padding
CASES += [Case("moe", tensor=2, expert=2, ranks=2, chunk=2)]


class HeadProducts(TorchDispatchMode):
    """Operations of the matrix products with a weight [columns, HIDDEN], or that make its gradient."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns, self.operations = columns, 0
        self.largest, self.dtypes = 0, set[str]()
        """Rows of the largest product that makes logits, and the dtypes of their factors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            (n, k), (_, m) = (factor.shape for factor in args[-2:])
            if {self.columns, HIDDEN} <= {n, k, m}:
                self.operations += 2 * n * k * m
                if m == self.columns and n != HIDDEN:
                    self.largest = max(self.largest, n)
                    self.dtypes.add(str(args[-1].dtype))
        return func(*args, **(kwargs or {}))


def batch_of() -> TokenBatch:
    """Two groups of three responses, some sampled at probabilities far from those of the model."""
    random = torch.Generator().manual_seed(5)
    samples = []
    for length in (3, 1, 7, 4, 9, 5):
        ids = torch.randint(2, VOCABULARY, (length,), generator=random).tolist()
        logprobs = (-3.6 + torch.randn(length, generator=random)).tolist()
        top = {
            "top_ids": torch.stack([torch.randperm(VOCABULARY, generator=random)[:4] for _ in ids]),
            "top_rollout_logprobs": (-3 + torch.randn(length, 4, generator=random)).clamp(max=-1.5),
        }
        samples.append(Sample([1, 2, 3], ids, logprobs, "stop", [(0, 0, length)], **top))
    rewards, groups = [1.0, 0.0, 0.0, 0.0, 1.0, 0.3], [0, 0, 0, 1, 1, 1]
    params = SamplingParams(temperature=0.8, top_logprobs=4)
    return TokenBatch.from_samples(samples, params, rewards=rewards, groups=groups)


def one_step(case: Case, head: str) -> dict[str, Any]:
    """One optimizer step with every term of the loss, whose weights are not those of the old pass."""
    parallel = ParallelSettings(tensor=case.tensor, expert=case.expert, pipeline=case.pipeline)
    place = groups.initialize(parallel, 1)
    chosen = {"head_chunk": case.chunk, "head_logits_dtype": case.logits_dtype} if head == "linear" else {}
    # more micro-batches than there are sequences, so one holds no token that counts
    options: Any = {"optimizer": "sgd", "clip_grad": 0.0, "micro_batches": 7, "debug_checks": True, **chosen}
    train = TrainSettings(dtype=case.dtype, head=head, **options)  # type: ignore[arg-type]
    with closing(Policy(ModelSettings(config=KINDS[case.kind]), parallel, train, place)) as policy:
        policy.keep_kl_policy()
        start = policy.host_copy()
        moves = iter([0.1, 0.2, 0.2])

        def move() -> None:
            """Called before the old pass here, before the update and, which changes nothing, before the step."""
            by, random = next(moves), torch.Generator().manual_seed(3)
            policy._overwrite([p * (1 + by * torch.randn((), generator=random)) for p in start])

        move()
        policy.start_phase(lr=0.1, min_lr=0.1, warmup_steps=0, total_steps=10, decay_style="constant")
        if case.dtype == "fp16":
            # at Megatron's own first scale the gradients of this model overflow
            for inner in policy.optimizer.chained_optimizers:
                inner.grad_scaler._scale.fill_(256.0)
        layer = getattr(policy.modules[-1], "output_layer", None)
        chosen = {"old": case.old, "centering": case.centering}
        correction = RolloutCorrection(Weight("token", "truncate", upper=2.0), **chosen)  # type: ignore[arg-type]
        loss = LossSettings(dual_clip=1.1, clip_lower=0.02, clip_upper=0.03, kl_coef=0.2, entropy_coef=case.entropy)
        settings = StepSettings(correction=correction, loss=loss, train=train, max_nonfinite_share=0.0)
        with HeadProducts(VOCABULARY if layer is None else layer.output_size_per_partition) as products:
            result = reinforce_step(policy, batch_of(), settings, check=move)
        return {
            "metrics": result.metrics, "gradient": policy.gradient(),
            "operations": products.operations if place.last_stage else None, "largest": products.largest,
            "dtypes": products.dtypes, "per row": 2 * HIDDEN * products.columns,
            "loss rows": int(result.share.batch.loss_mask.sum()),
        }  # fmt: skip


def of_rank(rank: int, cases: Sequence[Case]) -> list[dict[str, Any]]:
    # the head then compares the gradient that it was promised with the one that comes
    set_debug_checks(True)
    return [{head: one_step(case, head) for head in ("logits", "linear")} for case in cases]


@pytest.fixture(scope="module")
def results() -> dict[Case, tuple[dict[str, Any], ...]]:
    return run_cases(of_rank, CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_fused_head_gives_the_metrics_and_gradients_of_logits(case: Case, results: Any) -> None:
    """To rounding, which the metrics of whole sequences multiply by their lengths."""
    tolerance, of_metrics = (1e-6, 1e-5) if case.dtype == "fp32" else (1e-3, 1e-3)
    if case.logits_dtype is not None:
        # the logits path rounds what this head does not
        tolerance, of_metrics = 5e-3, 5e-3
    for rank in results[case]:
        kept, fused = rank["logits"], rank["linear"]
        assert kept["gradient"].norm() > 0
        assert (fused["gradient"] - kept["gradient"]).norm() <= tolerance * kept["gradient"].norm()
        assert fused["metrics"].keys() == kept["metrics"].keys()
        for name, value in kept["metrics"].items():
            assert fused["metrics"][name] == pytest.approx(value, rel=of_metrics, abs=of_metrics, nan_ok=True), name


def test_centering_acts_and_says_what_it_removed(results: Any) -> None:
    plain, centred = (results[Case(old="current", centering=name, chunk=2)][0]["linear"] for name in ("none", "top"))
    assert (plain["gradient"] - centred["gradient"]).norm() > 0.01 * plain["gradient"].norm()
    metrics = centred["metrics"]
    assert 0 < metrics["centering/top_train_mass"] < metrics["centering/top_rollout_mass"] < 1
    assert metrics["centering/drift_removed"] == pytest.approx(plain["metrics"]["centering/residual_drift"], rel=1e-6)
    assert metrics["centering/drift_removed"] > 0.01 and metrics["centering/tail_ratio_clamped"] == 0


def test_every_term_of_the_loss_acts(results: Any) -> None:
    metrics = results[Case()][0]["linear"]["metrics"]
    for name in ("clip_high", "clip_low", "dual_clip", "kl_ref", "entropy", "current_old/k3", "old/truncated_token"):
        assert math.isfinite(metrics[name]) and metrics[name] > 0, name


def test_an_update_without_a_pass_before_it_says_the_entropy_itself(results: Any) -> None:
    said = [results[Case(old="current", chunk=2, entropy=each)][0]["linear"]["metrics"] for each in (0.0, 0.1)]
    assert said[0]["entropy"] == pytest.approx(said[1]["entropy"], rel=1e-6) and said[0]["entropy"] > 1


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_update_with_three_policies_makes_each_chunk_of_logits_once(case: Case, results: Any) -> None:
    """Rows with a loss: two passes without gradient, and an update of three products instead of four."""
    products = 1 + 3 + 1 if case.old == "recompute" else 1 + 4
    for rank in results[case]:
        fused = rank["linear"]
        if fused["operations"] is not None:
            assert fused["operations"] == products * fused["per row"] * fused["loss rows"]
            assert rank["logits"]["operations"] > products * fused["per row"] * fused["loss rows"]


@pytest.mark.parametrize("case", [case for case in CASES if case.chunk is not None], ids=str)
def test_no_more_rows_than_a_chunk_have_logits_at_a_time(case: Case, results: Any) -> None:
    for rank in results[case]:
        assert rank["linear"]["largest"] == case.chunk < rank["logits"]["largest"]
        assert rank["linear"]["dtypes"] == {"torch.float32"}


def measured(rank: int) -> dict[str, Any]:
    answers = torch.randint(0, 37, (8, 5), generator=torch.Generator().manual_seed(3)).tolist()
    samples = [Sample([1, 2, i // 4], answers[i], [-3.0] * 5, "stop", [(0, 0, 5)]) for i in range(8)]
    batch = TokenBatch.from_samples(samples, SamplingParams(), rewards=[0.0, 1.0] * 4, groups=[0] * 4 + [1] * 4)
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
