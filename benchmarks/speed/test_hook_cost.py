"""What the hooks of each host write beside the loss of the same tokens; docs/results.md has what they took.

The loss is the least that a step of a host computes besides its model: the log-softmax over the vocabulary, PPO's
clipped loss, and the gradient of the logits.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

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
from megatron_rc.integrations.verl import driver as verl
from megatron_rc.integrations.verl import settings as verl_settings

TOKENS, VOCABULARY = 256, 32_768
_DRAW = torch.Generator().manual_seed(0)
# one response: its log-probs [1, T] on both sides, and its advantage [1, 1]
OLD = -3 * torch.rand(1, TOKENS, generator=_DRAW)
SAMPLED = OLD + 0.03 * torch.randn(1, TOKENS, generator=_DRAW)
ADVANTAGES, MASK = torch.randn(1, 1, generator=_DRAW), torch.ones(1, TOKENS, dtype=torch.int32)
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


def slime_hook(correction: RolloutCorrection) -> Callable[[], Any]:
    """tis, which sees the micro-batches of the update; here all tokens in one."""
    args = Namespace(use_tis=True, megatron_rc={"correction": correction.to_dict()})
    given = {"train_log_probs": [OLD[0]], "rollout_log_probs": [SAMPLED[0]], "loss_masks": [MASK[0]]}
    lengths = {"total_lengths": [TOKENS + 1], "response_lengths": [TOKENS]}
    return lambda: slime.tis(args, pg_loss=OLD[0], **given, **lengths)


def slime_hook_and_means(correction: RolloutCorrection) -> Callable[[], Any]:
    """tis, and what slime does with each of its metrics: the mean over the loss tokens of every response, summed."""
    hook, mask = slime_hook(correction), MASK[0]

    def means() -> list[Tensor]:
        *_, metrics = hook()
        return [torch.stack([(v * mask).sum() / mask.sum().clamp(min=1)]).sum() for v in metrics.values()]

    return means


def verl_hook(correction: RolloutCorrection) -> Callable[[], Any]:
    """The correction of the trainer process, with its metrics."""
    state = verl_settings.prepare(correction, None)
    fields = {"old_log_probs": OLD, "rollout_log_probs": SAMPLED, "response_mask": MASK.long()}
    return lambda: verl.correct_rollout(lambda *args: None, state, SimpleNamespace(batch=dict(fields)), {})


def nemo_rl_hook(correction: RolloutCorrection) -> Callable[[], Any]:
    """The correction of the driver around Policy.train, with its metrics."""
    state = nemo_session.prepare(correction, None)
    loss = SimpleNamespace(use_importance_sampling_correction=False)
    rows = {"prev_logprobs": OLD, "generation_logprobs": SAMPLED, "token_mask": MASK.float()}
    data = {name: torch.nn.functional.pad(values, (1, 0)) for name, values in rows.items()}
    data |= {"advantages": ADVANTAGES.expand(1, TOKENS + 1).contiguous(), "sample_mask": torch.ones(1)}

    def train(data: Any, loss_fn: Any) -> Any:
        return {"all_mb_metrics": {}}

    return lambda: nemo_rl.corrected_train(train, state, None, data, loss)


def megatron_lm_hook(correction: RolloutCorrection) -> Callable[[], Any]:
    """The correction of the rollout batch in prepare_data_for_update, with its metrics."""
    rows = RolloutRows(OLD, SAMPLED, MASK.bool(), ADVANTAGES[0], None)
    return lambda: corrected_rows(OLD, rows, correction)[0].metrics.values()


HOOKS = {
    "slime `tis`": slime_hook,
    "slime `tis` and slime's means": slime_hook_and_means,
    "verl trainer process": verl_hook,
    "NeMo-RL driver": nemo_rl_hook,
    "Megatron-LM rollout batch": megatron_lm_hook,
}


def own_loss() -> None:
    """Log-probs from logits, PPO's clipped loss, and the gradient of the logits."""
    logits = torch.randn(TOKENS, VOCABULARY, requires_grad=True)
    logprobs = logits.log_softmax(-1).gather(1, torch.arange(TOKENS)[:, None])[:, 0]
    ratio, advantages = (logprobs - OLD[0]).exp(), ADVANTAGES[0].expand(TOKENS)
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
    hook = HOOKS[host](RolloutCorrection.preset(correction))
    loss = counted(own_loss)
    assert loss.elements > 3 * TOKENS * VOCABULARY
    found = counted(hook)
    assert 0 < found.elements <= loss.elements / 100 and found.operations < 600
