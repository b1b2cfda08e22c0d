"""The hook for verl, as shipped and as printed in docs/hosts/verl.md: around a stand-in, and inside verl itself."""

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rc.analyze.readers import open_dump

ROOT = Path(__file__).parents[2]
HOOKS = {
    "shipped": (ROOT / "megatron_rc/integrations/verl/dump.py").read_text(),
    "printed": re.findall(r"```python\n(.*?)```", (ROOT / "docs/hosts/verl.md").read_text(), re.DOTALL)[0],
}


def hooked(hook: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in of the one module that the hook changes, after it; verl's own answer is the sum of log-probs."""
    metrics: Any = ModuleType("verl.utils.debug.metrics")
    metrics.calculate_debug_metrics = lambda data: {"seen": float(data.batch["old_log_probs"].sum())}
    for name in ("verl", "verl.utils", "verl.utils.debug"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, metrics.__name__, metrics)
    monkeypatch.setattr(sys.modules["verl.utils.debug"], "metrics", metrics, raising=False)
    monkeypatch.setenv("VERL_DUMP", str(folder))
    exec(compile(hook, "hook", "exec"), {"__name__": "hook"})
    return metrics


def batch():
    """Two responses of 3 and 2 tokens, padded to 4, the first with a tool token in the middle."""
    return {
        "old_log_probs": torch.tensor([[-1.0, -2.0, -3.0, 0.0], [-4.0, -5.0, 0.0, 0.0]]),
        "rollout_log_probs": torch.tensor([[-1.5, 0.0, -3.5, 0.0], [-4.5, -5.5, 0.0, 0.0]]),
        "response_mask": torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0]]),
        "responses": torch.arange(8).reshape(2, 4),
        "entropy": torch.full((2, 4), 0.5),
    }


def dumped(folder: Path) -> Any:
    """The chunks of the dump; the first one holds the batch."""
    dump = open_dump(folder)
    assert dump.format == "verl dump of the hook" and not dump.corrupt.count
    first, *more = dump.chunks()
    assert first.lengths.tolist() == [3, 2] and first.log_pi.tolist() == [-1, -2, -3, -4, -5]
    assert first.log_mu[first.tokens["loss_mask"]].tolist() == [-1.5, -3.5, -4.5, -5.5]
    assert first.tokens["token_id"].tolist() == [0, 1, 2, 4, 5]
    return first, *more


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_every_step_is_dumped_and_verl_gets_its_own_answer(hook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    metrics = hooked(hook, tmp_path, monkeypatch)
    sources = {"data_source": np.array(["math", "code"], dtype=object)}
    for given in (batch(), {name: values for name, values in batch().items() if name != "entropy"}):
        data = SimpleNamespace(batch=given, non_tensor_batch=sources if "entropy" in given else {})
        assert metrics.calculate_debug_metrics(data) == {"seen": -15.0}
    first, second = dumped(tmp_path)
    assert set(first.tokens["entropy"]) == {0.5}
    assert "entropy" not in second.tokens and np.isfinite(second.log_pi).all(), "a step without entropy"
    if hook == HOOKS["shipped"]:
        assert first.sequences["task"].tolist() == ["math", "code"] and "task" not in second.sequences
    assert first.sequences["step"].tolist() == [0, 0] and second.sequences["step"].tolist() == [1, 1]


def test_the_printed_hook_has_at_most_ten_lines():
    assert len(HOOKS["printed"].strip().splitlines()) <= 10


CODE = f"""
import json, torch
from verl.trainer.ppo.v1 import trainer_base
from verl.protocol import DataProto
from megatron_rc.integrations.verl import dump as verl_dump
assert trainer_base.calculate_debug_metrics is verl_dump.dump_and_measure, "the trainer calls verl's own function"
{inspect.getsource(batch)}
data = DataProto.from_dict(batch())
answers = trainer_base.calculate_debug_metrics(data), verl_dump.measure(data)
print(json.dumps([dict((name, float(value)) for name, value in metrics.items()) for metrics in answers]))
"""
MISSING = [name for name in ("verl", "transfer_queue") if importlib.util.find_spec(name) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"verl's trainer cannot be imported without {' and '.join(MISSING)}")
@pytest.mark.timeout(300)
def test_the_trainer_of_verl_calls_the_hook_and_gets_the_metrics_of_verl(tmp_path: Path):
    hook = {"VERL_USE_EXTERNAL_MODULES": "megatron_rc.integrations.verl.dump", "VERL_DUMP": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", CODE], env=os.environ | hook, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    hooked, own = json.loads(done.stdout.splitlines()[-1])
    assert hooked == own and "training/rollout_probs_diff_mean" in hooked
    (chunk,) = dumped(tmp_path)
    assert set(chunk.tokens["entropy"]) == {0.5}
