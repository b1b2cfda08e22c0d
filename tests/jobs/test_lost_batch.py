"""A job whose correction drops most of what it sampled says so, once in ten rollouts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs import settings_file, started
from warm_models import TASK, warm_model

from megatron_rc.report.log import read_metrics


def test_a_correction_that_drops_most_of_the_tokens_warns_with_the_numbers_of_the_rollout(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = {
        "model": {"hf_path": str(warm_model("dense", tmp_path_factory))},
        "task": TASK,
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 4, "dtype": "fp32"},
        "correction": {"reject": [{"statistic": "ratio", "level": "token", "lower": 1.5}]},
        "train": {"steps": 11, "save_interval": 0, "save_hf": False, "eval_interval": 100},
    }
    status, said = started(settings_file(tmp_path, settings), "--set", f"output={tmp_path / 'out'}").wait()
    assert status == 0, said
    metrics = read_metrics(tmp_path / "out/metrics.jsonl")
    assert all(record["old/masked_token"] > 0.5 for record in metrics[1:])
    warnings = dict(re.findall(r"WARNING, step (\d+): (the correction drops 100% of the tokens: .*)", said))
    assert warnings.keys() == {"1", "11"}
    first, length = metrics[1], metrics[1]["old/response_length"]
    assert f"k3 is {first['old/k3']:.3g} nats per token and the mean length {length:.0f} tokens" in warnings["1"]
