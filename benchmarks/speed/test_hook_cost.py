"""What the hooks of each host write beside the loss of the same tokens; docs/results.md has what they took.

The loss is the least that a step of a host computes besides its model: the log-softmax over the vocabulary, PPO's
clipped loss, and the gradient of the logits.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hosts.slime.single import alone
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rc import RolloutCorrection
from megatron_rc.integrations import slime
from megatron_rc.integrations.megatron_lm.rollouts import RolloutRows, corrected_rows
from megatron_rc.integrations.nemo_rl import driver as nemo_rl
from megatron_rc.integrations.nemo_rl import session as nemo_session
from megatron_rc.integrations.slime import is_weights
from megatron_rc.integrations.slime.layout import Parallel
from megatron_rc.integrations.verl import driver as verl
from megatron_rc.integrations.verl import settings as verl_settings

TOKENS, VOCABULARY = 256, 32_768
CORRECTIONS = ("none", "token-tis", "geo-mask-token-tis")


class Work(TorchDispatchMode):
    """Counts operations that compute, and the elements that they write."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = function(*args, **(kwargs or {}))
        if not function.is_view:
            self.operations += 1
            written = answer if isinstance(answer, tuple | list) else [answer]
            self.elements += sum(each.numel() for each in written if isinstance(each, Tensor))
        return answer


class Rollout(NamedTuple):
    """Log-probs of S responses of equal length, each [S, T], and advantages [S]."""

    old: Tensor
    sampled: Tensor
    advantages: Tensor

    @classmethod
    def of(cls) -> Rollout:
        draw = torch.Generator().manual_seed(0)
        old = -torch.rand(1, TOKENS, generator=draw) * 3
        return cls(old, old + 0.03 * torch.randn(old.shape, generator=draw), torch.randn(len(old), generator=draw))


def slime_hook(rollout: Rollout, correction: RolloutCorrection) -> Callable[[], Any]:
    """tis, which sees the micro-batches of the update; here all tokens in one."""
    nobody: dict[str, Any] = dict.fromkeys(("tp_group", "cp_group", "dp_group", "dp_cp_group"))
    is_weights.parallel = lambda: Parallel(**nobody, cp_rank=0, cp_size=1, last_stage=True)
    args = Namespace(use_tis=True, megatron_rc={"correction": correction.to_dict()})
    lengths = [rollout.old.shape[1]] * len(rollout.old)
    given = {
        "train_log_probs": list(rollout.old),
        "rollout_log_probs": list(rollout.sampled),
        "loss_masks": [torch.ones(length, dtype=torch.int32) for length in lengths],
        "total_lengths": [length + 1 for length in lengths],
        "response_lengths": lengths,
    }
    pg_loss = rollout.old.flatten()
    return lambda: slime.tis(args, pg_loss=pg_loss, **given)


def slime_hook_and_means(rollout: Rollout, correction: RolloutCorrection) -> Callable[[], Any]:
    """tis, and what slime does with each of its metrics: the mean over the loss tokens of every response, summed."""
    hook = slime_hook(rollout, correction)
    lengths = [rollout.old.shape[1]] * len(rollout.old)
    masks = [torch.ones(length, dtype=torch.int32) for length in lengths]

    def means() -> list[Tensor]:
        *_, metrics = hook()
        split = [zip(values.split(lengths), masks, strict=True) for values in metrics.values()]
        return [torch.stack([(p * mask).sum() / mask.sum().clamp(min=1) for p, mask in pairs]).sum() for pairs in split]

    return means


def verl_hook(rollout: Rollout, correction: RolloutCorrection) -> Callable[[], Any]:
    """The correction of the trainer process, with its metrics."""
    state = verl_settings.prepare(correction, None)
    mask = torch.ones_like(rollout.old, dtype=torch.int64)

    def hook() -> Any:
        fields = {"old_log_probs": rollout.old, "rollout_log_probs": rollout.sampled, "response_mask": mask}
        return verl.correct_rollout(lambda *args: None, state, SimpleNamespace(batch=fields), {})

    return hook


def nemo_rl_hook(rollout: Rollout, correction: RolloutCorrection) -> Callable[[], Any]:
    """The correction of the driver around Policy.train, with its metrics."""
    state = nemo_session.prepare(correction, None)
    loss = SimpleNamespace(use_importance_sampling_correction=False)
    first = torch.zeros(len(rollout.old), 1)
    data = {
        "prev_logprobs": torch.cat([first, rollout.old], 1),
        "generation_logprobs": torch.cat([first, rollout.sampled], 1),
        "advantages": rollout.advantages[:, None].expand(-1, rollout.old.shape[1] + 1).contiguous(),
        "token_mask": torch.cat([first, torch.ones_like(rollout.old)], 1),
        "sample_mask": torch.ones(len(rollout.old)),
    }

    def train(data: Any, loss_fn: Any) -> Any:
        return {"all_mb_metrics": {}}

    return lambda: nemo_rl.corrected_train(train, state, None, data, loss)


def megatron_lm_hook(rollout: Rollout, correction: RolloutCorrection) -> Callable[[], Any]:
    """The correction of the rollout batch in prepare_data_for_update, with its metrics."""
    mask = torch.ones_like(rollout.old, dtype=torch.bool)
    rows = RolloutRows(rollout.old, rollout.sampled, mask, rollout.advantages, None)
    return lambda: corrected_rows(rollout.old, rows, correction)[0].metrics.values()


HOOKS = {
    "slime `tis`": slime_hook,
    "slime `tis` and slime's means": slime_hook_and_means,
    "verl trainer process": verl_hook,
    "NeMo-RL driver": nemo_rl_hook,
    "Megatron-LM rollout batch": megatron_lm_hook,
}


def own_loss(rollout: Rollout) -> None:
    """Log-probs from logits, PPO's clipped loss, and the gradient of the logits."""
    old, advantages = rollout.old.flatten(), rollout.advantages[:, None].expand_as(rollout.old).flatten()
    logits = torch.randn(TOKENS, VOCABULARY, requires_grad=True)
    logprobs = logits.log_softmax(-1).gather(1, torch.arange(TOKENS)[:, None])[:, 0]
    ratio = (logprobs - old).exp()
    (torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.28) * advantages).sum() / TOKENS).backward()


def counted(call: Callable[[], Any]) -> Work:
    with Work() as work:
        call()
    return work


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("host", HOOKS)
def test_a_hook_writes_at_most_one_percent_of_the_elements_of_the_loss(
    host: str, correction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone(monkeypatch)
    made = Rollout.of()
    hook = HOOKS[host](made, RolloutCorrection.preset(correction))
    loss = counted(lambda: own_loss(made))
    assert loss.elements > 3 * TOKENS * VOCABULARY
    found = counted(hook)
    assert 0 < found.elements <= loss.elements / 100 and found.operations < 600
