"""The hook for verl, as shipped and as printed in docs/hosts/verl.md, around a stand-in of verl's function."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rc.analyze.readers import open_dump

ROOT = Path(__file__).parents[2]
HOOKS = {
    "shipped": (ROOT / "megatron_rc/integrations/verl_dump.py").read_text(),
    "printed": re.findall(r"```python\n(.*?)```", (ROOT / "docs/hosts/verl.md").read_text(), re.DOTALL)[0],
}


def verl(monkeypatch: pytest.MonkeyPatch, answer: Callable[[Any], dict[str, float]]) -> ModuleType:
    """A stand-in with the one module that the hook changes."""
    metrics = ModuleType("verl.utils.debug.metrics")
    metrics.calculate_debug_metrics = answer  # type: ignore[attr-defined]
    for name in ("verl", "verl.utils", "verl.utils.debug"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, metrics.__name__, metrics)
    monkeypatch.setattr(sys.modules["verl.utils.debug"], "metrics", metrics, raising=False)
    return metrics


def batch(*, entropy: bool = True) -> dict[str, torch.Tensor]:
    """Two responses of 3 and 2 tokens, padded to 4, the first with a tool token in the middle."""
    made = {
        "old_log_probs": torch.tensor([[-1.0, -2.0, -3.0, 0.0], [-4.0, -5.0, 0.0, 0.0]]),
        "rollout_log_probs": torch.tensor([[-1.5, 0.0, -3.5, 0.0], [-4.5, -5.5, 0.0, 0.0]]),
        "response_mask": torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0]]),
        "responses": torch.arange(8).reshape(2, 4),
        "attention_mask": torch.ones(2, 4),
    }
    return made | ({"entropy": torch.full((2, 4), 0.5)} if entropy else {})


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_every_step_is_dumped_and_verl_gets_its_own_answer(hook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    metrics = verl(monkeypatch, lambda data: {"seen": float(data.batch["old_log_probs"].sum())})
    monkeypatch.setenv("VERL_DUMP", str(tmp_path))
    exec(compile(hook, "hook", "exec"), {"__name__": "hook"})
    for _ in range(2):
        assert metrics.calculate_debug_metrics(SimpleNamespace(batch=batch())) == {"seen": -15.0}
    dump = open_dump(tmp_path)
    first, second = dump.chunks()
    assert first.lengths.tolist() == [3, 2] and not dump.corrupt.count
    assert first.log_pi.tolist() == [-1, -2, -3, -4, -5]
    assert first.log_mu[first.tokens["loss_mask"]].tolist() == [-1.5, -3.5, -4.5, -5.5]
    assert first.tokens["token_id"].tolist() == [0, 1, 2, 4, 5] and set(first.tokens["entropy"]) == {0.5}
    assert first.sequences["step"].tolist() == [0, 0] and second.sequences["step"].tolist() == [1, 1]


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_a_trainer_without_entropy_is_dumped_without_it(hook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    metrics = verl(monkeypatch, lambda data: {})
    monkeypatch.setenv("VERL_DUMP", str(tmp_path))
    exec(compile(hook, "hook", "exec"), {"__name__": "hook"})
    metrics.calculate_debug_metrics(SimpleNamespace(batch=batch(entropy=False)))
    (chunk,) = open_dump(tmp_path).chunks()
    assert "entropy" not in chunk.tokens and np.isfinite(chunk.log_pi).all()


def test_the_printed_hook_has_at_most_ten_lines():
    assert len(HOOKS["printed"].strip().splitlines()) <= 10
