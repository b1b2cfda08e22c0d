"""The benchmark of the kernels runs end to end without a GPU, and docs/performance.md is what its runs say."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
# the modules of the benchmark import each other as a script's neighbours do
sys.path.append(str(ROOT / "benchmarks"))

import performance_docs  # noqa: E402
from aot import kernel_names  # noqa: E402
from jobs import script_environment  # noqa: E402
from kernel_resources import launch_table  # noqa: E402
from timing.bench import OURS, Bench  # noqa: E402
from timing.ceilings import reader  # noqa: E402
from timing.head_forms import ANY_LOSS  # noqa: E402
from timing.logits import GradientError  # noqa: E402
from timing.meter import Work  # noqa: E402
from timing.moved import MOVED, logits_bytes  # noqa: E402
from timing.peers import ours  # noqa: E402
from timing.plan import TOY, Shape, condition_name, logits_name  # noqa: E402
from timing.sweep import Candidate, launch_lines, sweep  # noqa: E402
from timing.targets import TARGETS, best_peer, bytes_per_logit, of_head, ratio, rows_of, share  # noqa: E402
from traffic import counted_traffic  # noqa: E402

pytestmark = pytest.mark.interpreter


@pytest.fixture
def bench() -> Bench:
    return Bench(torch.device("cpu"), seconds=600)


@pytest.fixture
def smoke() -> dict[str, Any]:
    """The committed run of `kernels.py --smoke`."""
    return json.loads((ROOT / "benchmarks/results/kernels-smoke.json").read_text())


@pytest.fixture
def made_up(smoke: dict[str, Any]) -> dict[str, Any]:
    """The smoke run as if it came from a GPU: 1 byte a microsecond read and copied, nobody timed yet."""
    run = copy.deepcopy(smoke)
    run["device"] |= {"kind": "cuda", "name": "a made-up GPU"}
    run["ceilings"] = {what: {"best": 1e6} for what in ("read", "copy", "matmul")}
    return run


def test_every_row_runs_and_is_right_without_a_gpu(tmp_path: Path, smoke: dict[str, Any]) -> None:
    command = ["bash", str(ROOT / "benchmarks/gpu.sh"), "--smoke", "--stage", "2", "--out", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=script_environment() | {"PYTHON": sys.executable}
    )
    # it ends with an error when an answer of ours is wrong
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not measured row statistics, share of the read bandwidth" in done.stdout
    file = json.loads((tmp_path / "gpu-smoke.json").read_text())
    (sweep_row,) = file["sweep"]["rows"]
    assert sweep_row["kind"] == "sweep" and not sweep_row["refused"]
    run = file["kernels"]
    assert run["device"]["kind"] == "cpu" and run["device"]["interpreted"] and run["seconds"] is None
    first = [*TOY.names, *TOY.head_names]
    names, others = [row["name"] for row in run["rows"]], len(first)
    assert [row["kind"] for row in run["rows"]][others:] == ["logits"] * 6 + ["condition"] * len(TOY.conditions)
    assert names[:others] == first and names[others + 6 :] == [condition_name(c) for c in TOY.conditions]
    assert run["skipped"] == run["lost"] == [] and run["trying"] is None
    for row in run["rows"]:
        assert OURS in row["providers"] and len(row["providers"]) > 1
        for name, provider in row["providers"].items():
            assert provider["state"] == "ran" and provider["correct"] and provider["errors"], (row["name"], name)
            assert "not_measured" not in provider
            figures = provider["measured"]
            timed = [name for name in figures if name.endswith(("_us", "_spread")) or name == "extra_bytes"]
            assert timed and all(figures[name] is None for name in timed)
    assert all(rate is None for rates in run["ceilings"].values() for rate in rates.values())
    peers = run["peers"]
    assert {OURS, "PyTorch eager", "torch.compile", "Megatron-Core fused"} <= set(peers["present"])
    assert set(rows_of(run, "logits")[0]["providers"]) == set(peers["present"])
    assert {"PyTorch eager", "PyTorch linear_cross_entropy"} <= set(peers["heads"])
    assert set(rows_of(run, "cross entropy")[0]["providers"]) == {OURS, ANY_LOSS, *peers["heads"]}
    assert {"flash-attention", "Liger fused linear cross entropy"} <= set(peers["absent"])
    assert all(peers["absent"].values())
    # what docs/performance.md says of our launches and bytes is what the code does today
    figures_of = [[row["providers"][OURS]["measured"] for row in one["rows"]] for one in (run, smoke)]
    assert figures_of[0] == figures_of[1]


@pytest.mark.parametrize("key", MOVED)
def test_the_derived_bytes_are_those_that_the_interpreter_counts(smoke: dict[str, Any], key: str) -> None:
    kind, _, phase = key.partition(", ")
    for row in rows_of(smoke, kind):
        figures = row["providers"][OURS]["measured"]
        counted = sum(
            figures.get(f"{name}_bytes") or 0 for name in ([phase] if phase else ["forward", "backward", "call"])
        )
        assert 1 <= counted / MOVED[key].total(row) <= 1 + MOVED[key].share, row["name"]


def test_performance_md_is_what_the_committed_runs_say() -> None:
    printed = performance_docs.performance(*performance_docs.committed_runs(), performance_docs.committed_resources())
    assert (ROOT / "docs/performance.md").read_text() == printed


def test_the_committed_resources_are_of_todays_kernels_and_launch_shapes() -> None:
    found = performance_docs.committed_resources()
    assert found is not None
    assert found["launch"] == launch_table(), "run python benchmarks/kernel_resources.py"
    assert list(found["kernels"]) == kernel_names(), "run python benchmarks/kernel_resources.py"
    assert all(used["most spilled"] == 0 for used in found["kernels"].values())


def test_the_derived_bytes_allow_for_masked_rows_and_for_any_width(smoke: dict[str, Any]) -> None:
    for row in rows_of(smoke, "condition"):
        for phase in ("forward", "backward"):
            counted = row["providers"][OURS]["measured"][f"{phase}_bytes"]
            assert counted == pytest.approx(logits_bytes(row, phase), rel=0.02), (row["name"], phase)
    assert [row["counted_rows"] for row in rows_of(smoke, "condition") if "masked" in row["name"]] == [3]


def test_without_a_gpu_run_its_columns_are_empty_and_the_page_says_so(smoke: dict[str, Any]) -> None:
    page = performance_docs.performance(None, smoke, None)
    assert "**No run on a GPU is committed: the columns about a GPU are empty.**" in page
    assert "| 8 | 65,536 | 18,992 | logprobs, entropy |  |  |  |  |  |  |  |  |  |" in page
    assert performance_docs.performance(None, None, None).count("\n| ") < page.count("\n| ")


def test_of_the_committed_runs_the_newest_of_a_gpu_is_read_and_a_sweep_is_not(tmp_path: Path) -> None:
    for name, kind, when, row in (
        ("old", "cuda", "2026-01-01", "logits"),
        ("new", "cuda", "2026-02-01", "logits"),
        ("sweep", "cuda", "2026-03-01", "sweep"),
        ("smoke", "cpu", "2026-04-01", "logits"),
    ):
        run = {"device": {"kind": kind}, "when": when, "rows": [{"kind": row}]}
        (tmp_path / f"kernels-{name}.json").write_text(json.dumps(run))
    gpu, smoke = performance_docs.committed_runs(tmp_path)
    assert gpu is not None and smoke is not None
    assert (gpu["when"], smoke["when"]) == ("2026-02-01", "2026-04-01")
    assert performance_docs.committed_runs(tmp_path / "nothing") == (None, None)


def time_row(row: dict[str, Any], times: dict[str, tuple[float, float]]) -> None:
    for name, (forward, backward) in times.items():
        row["providers"][name]["measured"] |= {"forward_us": forward, "backward_us": backward, "extra_bytes": 0.0}


def judged(run: dict[str, Any] | None, text: str) -> tuple[float | None, str]:
    (target,) = [target for target in TARGETS if target.text.startswith(text)]
    return target.judge(run)


def test_a_share_is_the_derived_bytes_over_time_and_bandwidth(made_up: dict[str, Any]) -> None:
    for row in rows_of(made_up, "logits"):
        time_row(row, {OURS: (logits_bytes(row, "forward") / 0.95, logits_bytes(row, "backward") / 0.8)})
        assert share(made_up, row, "forward") == pytest.approx(0.95)
    assert judged(made_up, "row statistics, share of the read bandwidth, one rank") == (pytest.approx(0.95), "met")
    assert judged(made_up, "row gradient, share of the copy bandwidth, one rank") == (pytest.approx(0.8), "missed")
    assert "| 95.0 % |" in performance_docs.performance(made_up, None, None)
    # one shape without a time is no proof
    time_row(rows_of(made_up, "logits")[0], {OURS: (None, None)})  # type: ignore[dict-item]
    assert judged(made_up, "row statistics, share of the read bandwidth, one rank") == (None, "")
    row = rows_of(made_up, "logits")[-1]
    time_row(row, {OURS: (1, 2)})
    assert of_head(made_up, row) == pytest.approx(3 / (2 * row["tokens"] * 4096 * row["columns"]))


def test_the_worst_shape_is_unknown_while_a_shape_is_missing(made_up: dict[str, Any]) -> None:
    for row in rows_of(made_up, "logits"):
        time_row(row, {OURS: (logits_bytes(row, "forward"), logits_bytes(row, "backward"))})
    text = "log-probs and gradient, at the measured bandwidth"
    assert judged(made_up, text)[1] == "met"
    assert judged(made_up | {"skipped": [logits_name(TOY.shapes[-1])]}, text) == (None, "")
    broken = {"kind": "failed", "name": logits_name(TOY.shapes[-1]), "reason": "", "providers": {}}
    assert judged(made_up | {"rows": [*made_up["rows"], broken]}, text) == (None, "")


def test_bytes_per_logit_are_six_at_the_whole_bandwidth_and_more_below_it(made_up: dict[str, Any]) -> None:
    row = rows_of(made_up, "logits")[0]
    time_row(row, {OURS: (logits_bytes(row, "forward"), logits_bytes(row, "backward"))})
    assert bytes_per_logit(made_up, row) == pytest.approx(6, rel=0.01)
    time_row(row, {OURS: (logits_bytes(row, "forward") / 0.5, logits_bytes(row, "backward") / 0.8)})
    assert bytes_per_logit(made_up, row) == pytest.approx(2 / 0.5 + 4 / 0.8, rel=0.01)


def test_ours_is_compared_with_the_fastest_peer_that_answers_right_and_knows_shards(made_up: dict[str, Any]) -> None:
    one, shard = (rows_of(made_up, "logits", outputs="logprobs", tp=tp)[0] for tp in (1, 8))
    for row in (one, shard):
        time_row(
            row,
            {
                OURS: (1, 1),
                "megatron_rc torch": (0.1, 0.1),
                "torch.compile": (2, 1),
                "PyTorch eager": (9, 9),
                "Megatron-Core": (3, 4),
            },
        )
    assert (best_peer(one), ratio(one)) == (("torch.compile", 3), 1.5)
    assert (best_peer(shard), ratio(shard)) == (("Megatron-Core", 7), 3.5)
    one["providers"]["torch.compile"]["correct"] = False
    assert best_peer(one) == ("Megatron-Core", 7)
    one["providers"][OURS]["correct"] = False
    assert ratio(one) is None


def test_the_correction_is_compared_wall_to_wall(made_up: dict[str, Any]) -> None:
    row = rows_of(made_up, "correct")[0] | {"tokens": 65_536}
    made_up["rows"] = [row]
    row["providers"]["framework recipe"]["measured"]["wall_us"] = 3000.0
    row["providers"][f"{OURS}, values()"]["measured"]["wall_us"] = 150.0
    row["providers"][OURS]["measured"] |= {"graph_us": 23.0, "host_us": 100.0}
    found = {target.text: target.judge(made_up) for target in TARGETS}
    assert found["`correct` and its metrics as floats, framework recipe's wall time / ours"] == (20.0, "met")
    assert found["`correct` on 65,536 tokens, replayed as a CUDA graph"] == (23.0, "missed")
    assert found["`correct` on 65,536 tokens, host time of the eager call"] == (100.0, "met")


def test_a_count_needs_no_gpu_and_a_time_does(smoke: dict[str, Any]) -> None:
    found = {target.text: target.judge(None, smoke) for target in TARGETS}
    assert found["update path, one rank, launches"] == (5.0, "met")
    assert all(found[target.text] == (None, "") for target in TARGETS if not target.counted)


def test_the_distance_of_a_gradient_is_measured_in_its_own_rounding() -> None:
    torch.manual_seed(0)
    exact, nearest, cut = (
        torch.randn(50, 40, dtype=torch.float64),
        GradientError(torch.device("cpu")),
        GradientError(torch.device("cpu")),
    )
    nearest.add(exact.bfloat16(), exact)
    cut.add((exact.float().view(torch.int32) & -65536).view(torch.float32).bfloat16(), exact)
    assert nearest.result()["gradient_over_rounding"] == 1
    # uniform on a whole unit in the last place, against half of one to either side
    assert cut.result()["gradient_over_rounding"] == pytest.approx(2, rel=0.1)


def test_a_sweep_refuses_a_wrong_candidate_restores_the_table_and_prints_lines(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_rc.kernels.launch_table import LAUNCH

    before = dict(LAUNCH)
    times = iter(range(9, 0, -1))
    measured = lambda works, seconds: {"": {f"{name}_us": float(next(times)) for name in works[""].phases}}  # noqa: E731
    monkeypatch.setattr(bench.meter, "interleaved", measured)
    good, better, broken = Candidate(128, 1), Candidate(256, 2), Candidate(100, 1)
    row = sweep(bench, [Shape(2, 600, 1)], ours("triton"), [good, better, broken])
    assert row["best"]["row_statistics_narrow"][0] == better._asdict()
    assert len(row["best"]["row_gradient_narrow"]) == 2
    assert list(row["refused"]) == [str(broken)] and before == LAUNCH
    # nothing is said of the entries that no shape is launched with
    assert launch_lines(row) == [
        f'    "{name}_narrow": Launch(block=256, num_warps=2),' for name in ("row_statistics", "row_gradient")
    ]


def test_a_sweep_prints_every_entry_of_the_table_from_the_rows_that_it_is_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_rc.kernels import launch_table

    monkeypatch.setattr(launch_table, "NARROW", 300)
    narrow, wide = Candidate(128, 1), Candidate(256, 2)
    # narrow on both shapes, then wide on both: each is the best of one, and narrow the best of both together
    times = iter([1.0, 8.0, 3.0, 4.0])

    def measured(works: dict[str, Work], seconds: float) -> dict[str, dict[str, float]]:
        taken = next(times)
        return {"": {f"{name}_us": taken for name in works[""].phases}}

    monkeypatch.setattr(bench.meter, "interleaved", measured)
    row = sweep(bench, [Shape(2, 300, 1), Shape(2, 600, 1)], ours("triton"), [narrow, wide])
    entries: dict[str, launch_table.Launch] = eval("{" + "".join(launch_lines(row)) + "}", vars(launch_table))
    assert entries == {
        "row_statistics_narrow": narrow, "row_statistics": wide, "row_gradient_narrow": narrow, "row_gradient": wide,
    }  # fmt: skip


def test_the_kernel_that_measures_reading_reads_everything_once() -> None:
    source = torch.randint(-3, 4, (4096,)).bfloat16()
    for block, tiles in ((512, 1), (128, 4)):
        sums = torch.empty(4096 // (block * tiles))
        with counted_traffic() as traffic:
            reader(source, sums, block, tiles, warps=1)()
        torch.testing.assert_close(sums, source.float().view(-1, block * tiles).sum(1), rtol=0, atol=0)
        assert traffic.loaded.total() == source.nbytes
