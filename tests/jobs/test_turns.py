"""Jobs on the calculator: several turns per response, in the loop, its corrections, its dump and its checkpoints."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import DENSE, MOE, run_together, settings_file, timeless, train

from megatron_rc.analyze.diagnosis import diagnose_dump
from megatron_rc.analyze.statistics.residual import residual_drift
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.dump.schema import read_dump
from megatron_rc.report.log import read_metrics

TASK: dict[str, Any] = {
    "kind": "calculator",
    "options": {"fewest_terms": 2, "most_terms": 3, "digits": 1, "max_turns": 4, "max_turn_tokens": 8, "held_out": 2},
}
JOB: dict[str, Any] = {
    "task": TASK,
    "rollout": {"dtype": "fp32", "prompts_per_step": 6, "samples_per_prompt": 8, "max_new_tokens": 30},
    "train": {"steps": 3, "lr": 1e-3, "eval_interval": 100, "save_interval": 1, "save_hf": False},
}
MODELS = {kind: {**fields, "vocab_size": 44} for kind, fields in (("dense", DENSE), ("moe", MOE))}
WARM = {"warmup": {"steps": 12, "lr": 1e-2, "batch_size": 32}, "train": {"steps": 0}}
"""Enough for calls, not for right ones."""
CENTRED = ["correction=centered-tis", "rollout.amplify=0.3", "rollout.top_logprobs=8", "train.steps=14"]
SEGMENTS = ["rollout.dtype=bf16", "rollout.top_k=20", "correction={weight: {level: segment, upper: 1.0001}}"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("turns")
    warm = settings_file(folder / "warming", {"model": {"config": MODELS["dense"]}, "task": TASK, **WARM})
    config = settings_file(folder / "dense", {**JOB, "model": {"hf_path": str(folder / "warm" / "hf")}})
    experts = settings_file(folder / "moe", {**JOB, "model": {"config": MODELS["moe"]}})
    recorded, dump_of = "rollout.engine=recorded", f"rollout.recorded_path={folder}"
    first = [*CENTRED[2:3], "train.steps=1", "dump.tokens=true", recorded, f"{dump_of}/centred/dump"]
    commands = [
        train(warm, folder / "warm"),
        train(config, folder / "whole", "dump.tokens=true"),
        train(config, folder / "segments", *SEGMENTS),
        train(config, folder / "two steps", "train.steps=2"),
        train(config, folder / "two steps"),  # goes on from its checkpoint
        train(config, folder / "replayed", recorded, f"{dump_of}/whole/dump"),
        train(config, folder / "asynchronous", "train.asynchronous=1", "train.keep_sampling_weights=true"),
        train(config, folder / "centred", *CENTRED, "dump={tokens: true, keep: 14}"),
        train(config, folder / "linear", *CENTRED, "train.head=linear", recorded, f"{dump_of}/centred/dump"),
        train(config, folder / "recompute pi", "correction=none", *first),
        train(config, folder / "current pi", "correction={old: current}", *first),
        train(experts, folder / "routes", "moe={record: true, replay: R3}", "rollout.temperature=0.5", "train.steps=1"),
    ]
    for (status, said), command in zip(run_together(commands, folder), commands, strict=True):
        assert status == 0, f"{command}: {said}"
    return folder


def steps(runs: Path, name: str) -> list[dict[str, Any]]:
    return [r for r in read_metrics(runs / name / "metrics.jsonl") if r["phase"] == "rl" and r["step"] > 0]


@pytest.mark.parametrize("name", ["whole", "routes"])
def test_trainer_and_sampler_agree_on_every_turn(runs: Path, name: str) -> None:
    for record in steps(runs, name):
        assert record["old/k3"] < 1e-11 and record["old/log_ratio_abs_max"] < 1e-4
        assert record["turns/mean"] > 1.02
    assert sum(record["updates"] for record in steps(runs, "whole")[:2]) > 0, "later steps have other weights"


def test_turns_that_were_sampled_in_advance_differ_from_the_trainer_by_their_lag_alone(runs: Path) -> None:
    records = steps(runs, "asynchronous")
    assert len(records) == 3 and all(record["turns/mean"] > 1.02 for record in records)
    late = [record for record in records if record["asynchronous/max_lag"]]
    assert late and late != records
    assert all(record["old/k3"] < 1e-11 for record in records if record not in late)
    assert all(record["old/mismatch_k3"] < 1e-11 < record["old/staleness_k3"] for record in late)


def test_the_tokens_of_the_calculator_count_for_nothing(runs: Path) -> None:
    batches = list(read_dump(runs / "whole" / "dump"))
    assert len(batches) == 3
    for records, metrics in zip(batches, steps(runs, "whole"), strict=True):
        masks = [record["loss_mask"] for record in records]
        assert any(not all(mask) for mask in masks)
        lengths = [sum(mask) for mask in masks]
        assert metrics["response_length/mean"] == pytest.approx(sum(lengths) / len(lengths))
        turns = [max(record["turn"]) + 1 for record in records]
        assert metrics["turns/mean"] == pytest.approx(sum(turns) / len(turns))
        truncated = [record["finish_reason"] == "length" for record in records]
        assert metrics["response_length/truncated"] == pytest.approx(sum(truncated) / len(truncated))
        assert max(len(record["output_ids"]) for record in records) <= 30


def test_segments_are_weighted_turn_by_turn(runs: Path) -> None:
    seen = 0
    for records in read_dump(runs / "segments" / "dump"):
        for record in records:
            by_turn: dict[int, set[float]] = {}
            for turn, drawn, weight in zip(record["turn"], record["loss_mask"], record["weights"], strict=True):
                assert drawn or weight == 0
                if drawn:
                    by_turn.setdefault(turn, set()).add(weight)
            assert all(len(weights) == 1 for weights in by_turn.values())
            seen += len({weight for weights in by_turn.values() for weight in weights}) > 1
    assert seen, "some response has turns of different weights"


def test_a_job_that_goes_on_and_one_that_replays_repeat_the_metrics(runs: Path) -> None:
    whole, *others = (timeless(steps(runs, name), "eval/accuracy") for name in ("whole", "two steps", "replayed"))
    assert others == [whole] * 2


def test_score_centering_of_logits_and_of_the_linear_head_agree_for_ten_recorded_steps(runs: Path) -> None:
    pairs = zip(steps(runs, "centred"), steps(runs, "linear"), strict=True)
    updated = [pair for pair in pairs if pair[0]["updates"]]
    assert len(updated) >= 10 and max(logits["centering/drift_removed"] for logits, _ in updated) > 1e-3
    for logits, linear in updated:
        for name in ("loss", "grad_norm", "centering/drift_removed", "current/k3"):
            # where nothing is removed, the drift is the rounding of probabilities
            least = 1e-8 if "drift" in name else 0
            assert linear[name] == pytest.approx(logits[name], rel=1e-5, abs=least), (logits["step"], name)


def test_what_if_finds_in_the_dump_the_drift_that_the_weights_of_a_run_leave(runs: Path) -> None:
    sample = diagnose_dump(runs / "recompute pi/dump").evidence.sample
    groups = sample.sequences["group"]
    rewards = [set(sample.sequences["reward"][groups == group].tolist()) for group in groups]
    # the run trains on groups of unequal rewards alone
    trained = sample.select_sequences(np.array([len(each) > 1 for each in rewards]))
    left = residual_drift(trained.tokens["top"], RolloutCorrection())
    [of_run] = steps(runs, "current pi")
    assert left == pytest.approx(of_run["centering/residual_drift"], rel=1e-4) and left > 1e-3
    truncated = residual_drift(trained.tokens["top"], RolloutCorrection.preset("token-tis"))
    assert truncated is not None and truncated < left / 10
    assert residual_drift(trained.tokens["top"], RolloutCorrection.preset("seq-tis")) is None
