"""Whole jobs with moe settings through the command line: what they report, and what they refuse."""

from pathlib import Path
from typing import Any

import pytest
from jobs import TASK, run_together, settings_file, timeless, train, warm_model

from megatron_rc.dump.schema import read_dump
from megatron_rc.report.log import read_metrics

JOB: dict[str, Any] = {
    "task": TASK,
    "rollout": {"prompts_per_step": 6, "samples_per_prompt": 8, "max_new_tokens": 6, "amplify": 0.3},
    "train": {"steps": 2, "lr": 1e-2, "eval_interval": 100, "mini_batches_per_rollout": 2},
}
GATE = "correction={reject: [{statistic: route_shift, level: sequence, reduce: mean, upper: 0.05}]}"
CASES = {
    "recorded": ["moe.record=true", GATE],
    "R3": ["moe={record: true, replay: R3, dump_routes: true}", "train.dtype=bf16", "correction=icepop"],
}
AGAIN = [*CASES["R3"], "rollout.engine=recorded"]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, str]]]:
    folder = tmp_path_factory.mktemp("moe-jobs")
    config = settings_file(folder, {**JOB, "model": {"hf_path": str(warm_model("moe", tmp_path_factory))}})
    commands = [train(config, folder / name, *chosen) for name, chosen in CASES.items()]
    commands[list(CASES).index("R3")].append("--dump")
    commands.append(train(config, folder / "again", *AGAIN, f"rollout.recorded_path={folder / 'R3/dump'}"))
    return folder, run_together(commands, folder)


@pytest.mark.parametrize("case", CASES)
def test_a_job_reports_how_far_the_experts_moved(case: str, jobs: tuple[Path, list[tuple[int, str]]]) -> None:
    folder, done = jobs
    status, said = done[list(CASES).index(case)]
    assert status == 0, said
    records = [r for r in read_metrics(folder / case) if r["phase"] == "rl" and r["step"]]
    assert len(records) == 2
    for record in records:
        assert 0 < record["old/route_any_diff"] < 1 and record["old/route_layers"] == [0, 1]
        assert len(record["old/route_any_diff_by_layer"]) == 2
    updated = [record for record in records if record["updates"]]
    assert updated and all(record["current_old/route_kl"] > -1e-9 for record in updated)
    assert all(("replay/share" in record) == (case != "recorded") for record in updated)
    if case == "recorded":
        assert 0 < records[0]["old/rejected_route_shift_sequence_mean_seq"] <= 1
    text = (folder / case / "report.html").read_text()
    assert "Expert overlap" in text and "Load change of every expert" in text


@pytest.mark.parametrize("case", CASES)
def test_the_dump_says_how_many_layers_of_a_token_moved(case: str, jobs: tuple[Path, list[tuple[int, str]]]) -> None:
    folder, done = jobs
    assert done[list(CASES).index(case)][0] == 0
    reported = [r["old/route_any_diff"] for r in read_metrics(folder / case) if r["phase"] == "rl" and r["step"]]
    for records, mean in zip(list(read_dump(folder / case / "dump")), reported, strict=True):
        shares = [share for r in records for share in r["routes_shifted"]]
        assert set(shares) <= {0.0, 0.5, 1.0} and sum(shares) / len(shares) == pytest.approx(mean, rel=1e-6)
        assert all(len(r["routes_shifted"]) == len(r["rollout_logprobs"]) for r in records)
        assert all((r["routes"] is None) == (case == "recorded") for r in records)


def test_dumped_routes_are_replayed_as_those_of_the_sampler_were(jobs: tuple[Path, list[tuple[int, str]]]) -> None:
    folder, done = jobs
    assert done[-1][0] == 0, done[-1][1]
    dumped, again = (
        [r for r in read_metrics(folder / name) if r["phase"] == "rl" and r["step"]] for name in ("R3", "again")
    )
    assert timeless(dumped, "eval/accuracy") == timeless(again, "eval/accuracy")
