"""docs/metrics.md has every metric that a job writes, and no other."""

import dataclasses
import re
from typing import Any

import pytest
from jobs import ROOT, TASK, run_together, settings_file, train, warm_model

from megatron_rc.batch import TokenBatch
from megatron_rc.engine import Sample, SamplingParams
from megatron_rc.learning_rate.length_decay import LengthDecayLR
from megatron_rc.report.log import read_metrics
from megatron_rc.training.metric_names import JOB_METRICS
from megatron_rc.training.step.metrics import response_lengths, rollout_metrics
from megatron_rc.training.step.sampling import SampledBatch

JOB: dict[str, Any] = {
    "task": TASK,
    "warmup": {"steps": 2, "batch_size": 32},
    "rollout": {"prompts_per_step": 6, "samples_per_prompt": 4, "max_new_tokens": 6},
    "train": {"steps": 2, "lr": 1e-3, "save_interval": 0, "save_hf": False},
}
CASES = {
    "experts": [
        "moe={record: true, replay: R3}",
        "rollout.lag=1",
        "train.keep_sampling_weights=true",
        "warmup={steps: 2, batch_size: 32, target_accuracy: 1.0, check_interval: 1}",
        "correction={weight: {upper: measured}, reject: [{level: token, lower: 0.1}, {level: sequence, upper: 9.0}, "
        "{statistic: standardized, upper: 9.0}]}",
        "lr_rule={rule: length_decay, decay_period: 3}",
        "loss={kl_coef: 0.1, entropy_coef: 0.01, dual_clip: 3.0}",
    ],
    "clipped": [
        "rollout.top_logprobs=4",
        "correction={weight: {mode: clip, lower: 0.5, upper: 2.0}, old: current}",
        "lr_rule={rule: mismatch, action: halve}",
        "train.grad_cosine=true",
    ],
    "centred": ["correction=centered-tis", "rollout.top_logprobs=4"],
    "masked": ["correction={weight: {mode: mask, lower: 0.5, upper: 2.0}}", "train.asynchronous=1"],
    "two factors": ["correction={weight: {upper: 2.0, staleness_upper: 1.5}}"],
}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What small jobs write that together use every setting with a metric of its own."""
    folder = tmp_path_factory.mktemp("metric-names")
    config = settings_file(folder, JOB)
    warm = {name: warm_model("moe" if name == "experts" else "dense", tmp_path_factory) for name in CASES}
    commands = [train(config, folder / name, f"model.hf_path={warm[name]}", *chosen) for name, chosen in CASES.items()]
    ended = run_together(commands, folder)
    assert [status for status, _ in ended] == [0] * len(CASES), ended
    return [record for name in CASES for record in read_metrics(folder / name)]


def of_a_surge() -> set[str]:
    """Written once the response length has surged, which takes longer than a small job."""
    decay = LengthDecayLR(1.0)
    for step in range(200):
        decay.step(10.0 * 1.1 ** max(0, step - 50))
    return set(decay.metrics())


def of_servers() -> set[str]:
    """Written by jobs with SGLang servers."""
    good = Sample([1], [2], [0.0], "stop")
    return set(SampledBatch([good], [0.0], [0], [0], [dataclasses.replace(good, discarded="nan_logprob")]).metrics())


def of_turns() -> set[str]:
    """Written by jobs whose task has several turns."""
    sample = Sample([1], [2, 3, 4], [0.0] * 3, "stop", output_mask=[True, False, True])
    batch = TokenBatch.from_samples([sample], SamplingParams(), rewards=[0.0], groups=[0])
    return set(rollout_metrics(batch, response_lengths(batch), [True]))


def general_name(key: str) -> str:
    """The name of a metric as the page has it: without its pair, its unit, its lags or the name of a gate."""
    pair = re.fullmatch(r"(?:old|current|current_old)/(.+)", key)
    if pair is None:
        return re.sub(r"(?<=rollout/rejected_).+", "<reason>", key)
    name = re.sub(r"(?<=rejected_).+(?=_(?:token|seq)$)", "<gate>", pair[1])
    name = re.sub(r"(?<=_lag_)[0-9_]+(?:up)?$", "<lags>", name)
    share = r"^((?:staleness_)?truncated|(?:clipped|outside)_(?:low|high)|rejected_<gate>)_(?:token|seq)$"
    return re.sub(share, r"\1", name)


def test_the_page_has_every_metric_that_is_written_and_no_other(records: list[dict[str, Any]]) -> None:
    keys = {key for record in records for key in record} - {"phase", "step"}
    documented = set(re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE))
    assert {general_name(key) for key in keys | of_a_surge() | of_servers() | of_turns()} == documented


def test_the_sections_of_the_page_belong_to_the_phases(records: list[dict[str, Any]]) -> None:
    warmup = {key for record in records if record["phase"] == "warmup" for key in record} - {"phase", "step"}
    assert warmup == JOB_METRICS["Supervised warm-up"].keys()
    assert all(metric.meaning for section in JOB_METRICS.values() for metric in section.values())
