"""One process without process groups instead of Megatron's parallel state, and the hook loss in it."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from hosts.slime.host import Rollout, hooks, micro_batch
from torch import Tensor

from megatron_rc.integrations.parallel import Parallel
from megatron_rc.integrations.slime import tokens
from megatron_rc.integrations.slime.hooks import before_train_step


def alone(monkeypatch: pytest.MonkeyPatch, args: Any = None, **ranks: Any) -> None:
    """Every hook finds itself alone, unless ``ranks`` says where; Megatron's get_args returns ``args``."""
    nobody: dict[str, Any] = dict.fromkeys(("tp_group", "cp_group", "dp_group", "dp_cp_group", "pp_group"))
    place = Parallel(**{**nobody, "cp_rank": 0, "cp_size": 1, "last_stage": True, **ranks})
    for module in (tokens, before_train_step):
        monkeypatch.setattr(module, "parallel", lambda: place)
    for name in ("megatron", "megatron.training", "megatron.training.global_vars"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["megatron.training.global_vars"].get_args = lambda: args  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test file that imports it."""
    alone(monkeypatch)


def loss_of(whole: Rollout, args: Any, **given: Any) -> tuple[float, dict[str, float], Tensor]:
    """Loss, log and the gradient of the logits of the hook loss; ``given`` replaces parts of the micro-batch."""
    batch = {**micro_batch(whole), **given}
    leaf = batch["logits"].clone().requires_grad_()
    loss, log = hooks.loss(args, batch, leaf * 1, whole.sum_of_sample_mean())
    assert all(value.dim() == 0 and not value.requires_grad for value in log.values())
    return loss.item(), {name: value.item() for name, value in log.items()}, torch.autograd.grad(loss, leaf)[0]
