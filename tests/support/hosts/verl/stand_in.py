"""verl in this process, the stand-in or the real one, patched as the plugin patches it; batches as verl has them."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hosts.verl import cases, sources

from megatron_rc.integrations.installed import INSTALLED
from megatron_rc.integrations.verl.plugin import patch_verl

PPO, V1, V0 = "verl.trainer.ppo.", "verl.trainer.ppo.v1.trainer_base", "verl.trainer.ppo.ray_trainer"
ACTOR = {"strategy": "megatron", "policy_loss": {"loss_mode": "vanilla"}}
CONFIG: dict[str, Any] = {
    "actor_rollout_ref": {"actor": ACTOR, "rollout": {"calculate_log_probs": True}},
    "algorithm": {"rollout_correction": {"rollout_is": None, "rollout_rs": None, "bypass_mode": False}},
}


def _forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "verl"]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For a test file that imports it: the stand-in on sys.path, and nothing of verl loaded."""
    monkeypatch.syspath_prepend(sources.STUB)
    _forget()
    yield
    _forget()


@contextmanager
def patched(text: str) -> Iterator[Any]:
    """verl as the plugin patches it; answers with the session."""
    with patch_verl(text):
        yield INSTALLED["verl"].session


def module(name: str) -> Any:
    return importlib.import_module(name)


def corrected(text: str, batch: cases.Rollout) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    fields = {"old_log_probs": batch.old, "rollout_log_probs": batch.rollout, "response_mask": batch.mask}
    with patched(text):
        data, metrics = module(V1).PPOTrainer.correct(SimpleNamespace(batch=fields), {})
        return data.batch, metrics


def nested(rows: list[list[float]]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def loss_of(batch: cases.Rollout, old: torch.Tensor, weights: torch.Tensor | None, cut: int) -> tuple[float, Any]:
    """Loss and gradient by loss_mode=megatron_rc, over micro-batches."""
    function = module(f"{PPO}core_algos").get_policy_loss_fn("megatron_rc")
    current = batch.current.clone().requires_grad_()
    config = SimpleNamespace(global_batch_info={"batch_num_tokens": int(batch.mask.sum())})
    total = torch.zeros(())
    for rows in torch.arange(len(current)).chunk(cut):
        logprobs = {"old_log_prob": old[rows], "log_prob": current[rows]}
        parts = {"advantages": batch.advantages[rows], "response_mask": batch.mask[rows].bool()}
        parts["rollout_is_weights"] = None if weights is None else weights[rows]
        loss, _ = function(**logprobs, **parts, loss_agg_mode="token-mean", config=config)
        total = total + loss
    total.backward()
    return total.item(), current.grad
