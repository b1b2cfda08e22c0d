"""The first micro-batch of slime and miles: the host's own function, here a stand-in, against ours."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hosts.slime.host import MILES, arguments, given_to_tis, hooks, inside, micro_batch, rollout
from hosts.slime.single import in_one_process as in_one_process
from hosts.slime.single import loss_of

from megatron_rc.integrations import first_batch
from megatron_rc.integrations.hosts import HOSTS
from megatron_rc.integrations.slime.signals import LENGTHS

WHOLE = rollout(21)
TOKEN_TIS = {"megatron_rc": {"correction": "token-tis"}}


@pytest.fixture(params=["slime", "miles"])
def own(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the function the host's own one; this process has compared nothing."""
    monkeypatch.setattr(first_batch, "COMPARED", set())
    inside(request.param, monkeypatch)

    def put(name: str, function: Any) -> None:
        (symbol,) = [each for each in HOSTS[request.param].symbols if each.name == name]
        module = ModuleType(symbol.module)
        setattr(module, name, function)
        monkeypatch.setitem(sys.modules, symbol.module, module)

    return put


def loss(args: Any, batch: Any, logits: Any, reduce: Any, wrong: float = 0.0) -> Any:
    """What slime computes under PPO's clip, without a correction."""
    assert args.megatron_rc == {"correction": {"old": "recompute"}}
    ratio = (WHOLE.current(logits) - torch.cat(batch["log_probs"])).exp() + wrong
    advantages = torch.cat(batch["advantages"])
    return reduce(torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.28) * advantages)), {}


def test_a_loss_that_the_host_computes_otherwise_is_refused_once_and_lengths_count_once(own: Any) -> None:
    args, calls = arguments(**TOKEN_TIS, **MILES), []
    LENGTHS.forget()
    own("policy_loss_function", lambda *given: calls.append(given) or loss(*given))
    expected = loss_of(WHOLE, args)
    assert len(calls) == 1 and loss_of(WHOLE, args)[0] == expected[0] and len(calls) == 1
    assert LENGTHS.take(0, torch.device("cpu")).length == sum(WHOLE.responses) / len(WHOLE.responses)
    first_batch.COMPARED.clear()
    own("policy_loss_function", lambda *given: loss(*given, wrong=0.01))
    with pytest.raises(ValueError, match=r"^policy_loss_function of this host is not what .*; nothing was updated$"):
        loss_of(WHOLE, args)


def weights(args: Any, *, pg_loss: Any, train_log_probs: Any, rollout_log_probs: Any, sign: int = 1, **_: Any) -> Any:
    log_ratio = torch.cat(train_log_probs) - torch.cat(rollout_log_probs)
    return pg_loss * (sign * log_ratio).exp().clamp(args.tis_clip_low, args.tis_clip), None, {}


def test_weights_that_the_host_computes_otherwise_are_refused(own: Any) -> None:
    batch = given_to_tis(micro_batch(WHOLE))
    args, losses = arguments(use_tis=True, **TOKEN_TIS), torch.ones(sum(WHOLE.responses))
    own("vanilla_tis_function", weights)
    assert hooks.tis(args, pg_loss=losses, **batch)[0].sum() > 0
    first_batch.COMPARED.clear()
    own("vanilla_tis_function", lambda args, **given: weights(args, **given, sign=-1))
    with pytest.raises(ValueError, match="vanilla_tis_function of this host is not what megatron_rc takes it for"):
        hooks.tis(args, pg_loss=losses, **batch)


def test_a_host_without_memory_for_both_trains_and_says_so(own: Any, caplog: pytest.LogCaptureFixture) -> None:
    own("policy_loss_function", Mock(side_effect=torch.OutOfMemoryError("no memory")))
    loss_of(WHOLE, arguments(**TOKEN_TIS, **MILES))
    assert "policy_loss_function was not compared with ours" in caplog.text
