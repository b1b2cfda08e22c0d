"""The hook for verl inside verl itself, loaded by name as docs/hosts/verl.md says, with a DataProto of verl."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rc.analyze.readers import open_dump

CODE = """
import json, torch
from verl.trainer.ppo.v1 import trainer_base
from verl.protocol import DataProto
from megatron_rc.integrations import verl_dump
assert trainer_base.calculate_debug_metrics is verl_dump.dump_and_measure, "the trainer calls verl's own function"
batch = DataProto.from_dict({
    "old_log_probs": torch.tensor([[-1.0, -2.0, -3.0, 0.0], [-4.0, -5.0, 0.0, 0.0]]),
    "rollout_log_probs": torch.tensor([[-1.5, 0.0, -3.5, 0.0], [-4.5, -5.5, 0.0, 0.0]]),
    "response_mask": torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0]]),
    "responses": torch.arange(8).reshape(2, 4),
    "entropy": torch.full((2, 4), 0.5),
})
hooked = trainer_base.calculate_debug_metrics(batch)
own = verl_dump.measure(batch)
print(json.dumps([{name: float(value) for name, value in metrics.items()} for metrics in (hooked, own)]))
"""


MISSING = [name for name in ("verl", "transfer_queue") if importlib.util.find_spec(name) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"verl's trainer cannot be imported without {' and '.join(MISSING)}")
@pytest.mark.timeout(300)
def test_the_trainer_of_verl_calls_the_hook_and_gets_the_metrics_of_verl(tmp_path: Path):
    hook = {"VERL_USE_EXTERNAL_MODULES": "megatron_rc.integrations.verl_dump", "VERL_DUMP": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", CODE], env=os.environ | hook, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    hooked, own = json.loads(done.stdout.splitlines()[-1])
    assert hooked == own and "training/rollout_probs_diff_mean" in hooked
    dump = open_dump(tmp_path)
    (chunk,) = dump.chunks()
    assert dump.format == "verl dump of the hook" and not dump.corrupt.count
    assert chunk.log_pi.tolist() == [-1, -2, -3, -4, -5] and chunk.lengths.tolist() == [3, 2]
    assert chunk.log_mu[chunk.tokens["loss_mask"]].tolist() == [-1.5, -3.5, -4.5, -5.5]
    assert set(chunk.tokens["entropy"]) == {0.5} and chunk.tokens["token_id"].tolist() == [0, 1, 2, 4, 5]
