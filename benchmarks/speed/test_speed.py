"""The timing of the kernels runs without a GPU, reports what it measured, and loses to a broken call only its part."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from speed import ROOT, report, run
from speed.cases import UNUSUAL, Case, Target, cases
from speed.meter import Call, Meter, launches_of
from speed.peers import EAGER, NOBODY, OURS, TORCH, Peer, Peers, find_peers
from speed.run import KERNELS, Launch, launch_lines, sweep
from speed.tokens import Shape

pytestmark = pytest.mark.interpreter


@pytest.fixture
def meter() -> Meter:
    return Meter(torch.device("cpu"))


def some_peers() -> Peers:
    """Those of PyTorch alone, which take no second to import."""
    return find_peers(torch.device("cpu"), without=("Megatron-Core",))


def toy(peers: Peers = NOBODY) -> dict[str, Case]:
    return {case.name: case for case in cases(peers, toy=True)}


@pytest.mark.usefixtures("no_debug_checks")
@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("correct, 4,096 tokens", 1.13),
        ("policy_loss, 4,096 tokens", 1.12),
        ("head, 24 x 256 of 8 (TP 1), 50 % masked", 1.12),
        ("cross entropy, 24 x 256 of 8 (TP 1)", 1.12),
        ("log-probs: 8 x 1,024 (TP 1)", 1.12),
    ],
)
def test_a_case_is_right_and_counts_what_the_page_says(meter: Meter, name: str, most: float) -> None:
    row = run.row_of(toy(some_peers())[name], meter)
    assert report.wrong({"rows": {name: row}}) == [] and len(row["providers"]) > 1
    (line,) = [line for line in report.counted({"rows": {name: row}}).splitlines() if line.startswith(f"| {name}")]
    assert line in (ROOT / "docs/performance.md").read_text()
    amount = sum(value for what, value in row["providers"][OURS].items() if what.endswith("_bytes"))
    assert "bytes" not in row or 1 <= amount / sum(row["bytes"].values()) <= most


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_gpu_sh_runs_all_of_it_interpreted_in_a_fresh_clone(tmp_path: Path) -> None:
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "clone")], check=True)
    command = ["bash", str(tmp_path / "clone/benchmarks/gpu.sh"), "--smoke", "--minutes", "6", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHON": sys.executable})
    assert done.returncode == 0, done.stdout + done.stderr
    file = json.loads((tmp_path / "gpu-smoke.json").read_text())
    assert list(file["rows"]) == list(toy()) and list(report.amiss(file)) == []
    assert {name: found["status"] for name, found in file["stages"].items()} == {"tests": 0, "quickstart": 0}
    assert len(file["sweep"]) == 2 and not any("refused" in times for times in file["sweep"].values())
    assert report.counted(file) in (ROOT / "docs/performance.md").read_text()
    for name, row in file["rows"].items():
        ours, phases = row["providers"][OURS], row.get("bytes", {})
        if "backward" in phases and "tp" in row:
            found = {phase: ours[f"{phase}_bytes"] for phase in phases}
            assert found == pytest.approx(phases, rel=0.02), name
    assert set(UNUSUAL) <= {name.split(":")[0] for name in file["rows"]}


def store(folder: Path) -> run.Store:
    return run.Store(folder / "run.json")


def case(name: str, errors: Callable[[], dict[str, float]], *others: str) -> Case:
    calls = {who: Call({"call": lambda: None}, errors) for who in (OURS, *others)}
    return Case(name, lambda meter: calls, {"loss": 1e-3}, {"tokens": 1})


def fails() -> Any:
    raise RuntimeError("no such kernel\nand more")


def test_every_row_is_on_disk_before_the_next_and_a_second_run_adds_what_is_missing(
    tmp_path: Path, meter: Meter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter, "figures", lambda calls, *_: {})
    asked: list[list[str]] = []

    def right() -> dict[str, float]:
        asked.append([name for name, row in store(tmp_path)["rows"].items() if "providers" in row])
        return {"loss": 0.0}

    def ends() -> Any:
        right()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.run([case("first", right), case("hangs", ends), case("last", right)], store(tmp_path), meter, 60)
    assert asked == [[], ["first"]] and "its process ended" in store(tmp_path)["rows"]["hangs"]["failed"]
    # what ended the process before is tried when all others are done
    run.run([case("first", fails), case("hangs", fails), case("last", right)], store(tmp_path), meter, 60)
    rows = store(tmp_path)["rows"]
    assert asked[2:] == [["first"]] and list(rows) == ["first", "hangs", "last"]
    assert report.wrong({"rows": rows}) == [f"hangs: {OURS}: failed: RuntimeError: no such kernel"]
    run.run([case("no time", right)], store(tmp_path), meter, -1)
    assert "no time" not in store(tmp_path)["rows"]
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(("far", "wrong"), [(1e-4, []), (2e-3, ["loss"]), (float("nan"), ["loss"])])
def test_a_wrong_answer_is_recorded_as_such_of_a_peer_and_of_ours(meter: Meter, far: float, wrong: list[str]) -> None:
    row = run.row_of(case("one", lambda: {"loss": far, "other": 1.0}, "a peer"), meter)
    assert [row["providers"][name].get("wrong", []) for name in (OURS, "a peer")] == [wrong, wrong]
    assert [one[1] for one in report.amiss({"rows": {"one": row}})] == [OURS, "a peer"] * bool(wrong)
    assert len(report.wrong({"rows": {"one": row}})) == len(wrong)


def test_a_peer_that_is_off_by_a_little_is_wrong_and_is_not_the_best(meter: Meter) -> None:
    def off(logits: torch.Tensor, targets: torch.Tensor, entropy: bool) -> Any:
        return 1.01 * logits.float().log_softmax(-1).gather(-1, targets[:, None])[:, 0], None

    peers = some_peers()
    peers.present.append(Peer("off", "1", off))
    row = run.row_of(toy(peers)["log-probs: 8 x 1,024 (TP 1)"], meter)
    assert row["providers"]["off"]["wrong"] and "wrong" not in row["providers"][EAGER]
    for name, providers in row["providers"].items():
        providers |= {"forward_us": 1.0, "backward_us": 1.0 if name in ("off", TORCH) else 2.0}
    assert report.best_peer(row)[0] == 3


def test_a_peer_that_raises_while_it_is_timed_costs_the_others_nothing(meter: Meter, monkeypatch: Any) -> None:
    left = iter([1, 2])

    def once(call: Call) -> dict[str, float]:
        call.run()
        return {"call_us": 1e6}

    monkeypatch.setattr(meter, "once", once)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    ways: dict[str, Callable[[], object]] = {"good": lambda: None, "bad": fails, "at last": lambda: next(left)}
    failed: list[str] = []
    calls = {name: Call({"call": way}, dict) for name, way in ways.items()}
    times = meter.interleaved(calls, lambda name, error: failed.append(name))
    expected = {"call_us": 1e6, "call_spread": 0.0}
    assert times == {"good": expected, "at last": expected} and failed == ["bad", "at last"]


def test_launches_on_a_gpu_are_what_ran_on_the_device_and_waits_those_of_streams_and_events() -> None:
    def event(name: str, device: DeviceType = DeviceType.CPU) -> SimpleNamespace:
        return SimpleNamespace(name=name, device_type=device)

    ran = [event(name, DeviceType.CUDA) for name in ("row_statistics_fwd_kernel", "Memcpy DtoD", "Memset (Device)")]
    host = [event(name) for name in ("cudaLaunchKernel", "cuStreamSynchronize", "cudaDeviceSynchronize")]
    assert launches_of([*ran, *host]) == {"launches": 3, "waits": 1}
    assert launches_of(host) == {}


def made_up(microseconds: dict[str, tuple[float, float]], shape: Shape, **facts: Any) -> dict[str, Any]:
    """A run on a card that moves 1 byte per microsecond, with one row."""
    providers = {name: {"forward_us": f, "backward_us": b, "extra_bytes": 8.0} for name, (f, b) in microseconds.items()}
    row = {"tokens": shape.tokens, "columns": shape.columns, "tp": shape.tp, "rows": shape.tokens - shape.left_out}
    row |= {"bytes": shape.bytes(False), "providers": providers} | facts
    rates = {"read": 1e6, "copy": 1e6, "matmul": 1e12}
    return {"machine": {"device": "a card"}, "ceilings": rates, "rows": {"one": row}}


def test_figures_are_bytes_over_time_and_bandwidth_and_targets_are_met_by_the_worst_case() -> None:
    shape = Shape(8, 1024)
    least = shape.bytes(False)
    one = made_up({OURS: (least["forward"] / 0.95, least["backward"] / 0.8), EAGER: (1e5, 2e4)}, shape)

    def judged(figure: str, bound: float) -> tuple[float | None, str]:
        return report.judge(one, Target(figure, bound), ["one"])

    assert judged("share of reading", 0.9) == (pytest.approx(0.95), "met")
    assert judged("share of copying", 0.92) == (pytest.approx(0.8), "missed")
    assert judged("bytes per logit", 6.6) == (pytest.approx(2 / 0.95 + 4 / 0.8, rel=0.02), "missed")
    assert judged("extra bytes per token", 32) == (1.0, "met")
    ours = least["forward"] / 0.95 + least["backward"] / 0.8
    assert judged("best peer's time / ours", 1.0) == (pytest.approx(1.2e5 / ours), "met")
    assert judged("ms", ours / 1e3 - 1) == (pytest.approx(ours / 1e3), "missed")
    # a case that is missing, failed or wrong proves nothing
    assert report.judge(one, Target("launches", 5), ["one"]) == (None, "")
    assert report.judge(one, Target("share of reading", 0.9), ["one", "two"]) == (None, "")
    one["rows"]["one"]["providers"][OURS]["wrong"] = ["gradient"]
    assert judged("share of reading", 0.9) == (None, "")
    assert f"one: {OURS}: wrong: ['gradient']" in report.tables(one)


def test_every_target_has_a_figure_and_its_line(meter: Meter) -> None:
    wanted = {target for one in cases(NOBODY, toy=False) for target in one.targets}
    assert {target.figure for target in wanted} == set(report.FIGURES)
    lines = report.targets({"machine": {"device": "a card"}}).splitlines()
    assert len(lines) == 2 + len(wanted) and all(line.endswith("|  |  |") for line in lines[2:])


def test_a_sweep_refuses_a_wrong_candidate_restores_the_table_and_prints_lines(meter: Meter, monkeypatch: Any) -> None:
    from megatron_rc.kernels import launch_table

    monkeypatch.setattr(launch_table, "NARROW", 300)
    before, times = dict(launch_table.LAUNCH), iter([1.0, 8.0, 3.0, 4.0])

    def interleaved(calls: Any, failed: Any, seconds: float) -> dict[str, dict[str, float]]:
        return {"": dict.fromkeys((f"{phase}_us" for phase in KERNELS), next(times))}

    monkeypatch.setattr(meter, "interleaved", interleaved)
    monkeypatch.setattr(meter, "measures", True)
    tried = [Launch(128, 1), Launch(256, 2), Launch(100, 1)]
    near = next(iter(toy().values()))._replace(tolerance={"logprobs": 1e-4, "gradient": 2.0**-7}).tolerance
    found = sweep(meter, [Shape(2, 300), Shape(2, 600)], tried, near, 60)
    assert "refused" in found["Launch(block=100, num_warps=1)"] and before == launch_table.LAUNCH
    entries = eval("{" + "".join(launch_lines(found)) + "}", vars(launch_table))
    assert entries == {
        "row_statistics_narrow": tried[0], "row_gradient_narrow": tried[0],
        "row_statistics": tried[1], "row_gradient": tried[1],
    }  # fmt: skip


def test_peers_are_found_left_out_or_absent_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "flash_attn/ops/triton/cross_entropy.py"
    file.parent.mkdir(parents=True)
    file.write_text("import no_such_library")
    peers = find_peers(torch.device("cpu"), tmp_path, ("Megatron-Core",))
    assert peers.absent["Megatron-Core"] == "left out" and "no_such_library" in peers.absent["flash-attention"]
    assert {"Liger", "TransformerEngine", "cut-cross-entropy"} <= set(peers.absent)
    assert EAGER in {peer.name for peer in peers.rows(entropy=True, sharded=False)}
    assert peers.rows(entropy=False, sharded=True) == []


def test_a_stage_is_run_and_written_down_even_if_it_is_ended(tmp_path: Path) -> None:
    kept = store(tmp_path)
    seen = "import json, sys; print(json.load(open(sys.argv[1]))['stages'])"
    run.stage(kept, "tests", [sys.executable, "-c", seen, str(kept.path)])
    assert "its process ended" in kept["stages"]["tests"]["said"]
    assert run.stage(kept, "tests", [sys.executable, "-c", "print('.\\n4 passed\\n'); raise SystemExit(3)"]) == 3
    assert store(tmp_path)["stages"]["tests"] | {"seconds": 0} == {"status": 3, "seconds": 0, "said": ".; 4 passed"}


@pytest.mark.full
def test_gpu_sh_says_what_it_needs_and_ends_what_hangs(tmp_path: Path) -> None:
    def gpu_sh(*options: str, **environment: str) -> Any:
        command = ["bash", str(ROOT / "benchmarks/gpu.sh"), *options]
        return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)

    assert "--minutes must be a whole number, got soon" in gpu_sh("--minutes", "soon").stderr
    assert "--stage must be 1, 2 or 3, got 4" in gpu_sh("--stage", "4").stderr
    without = gpu_sh("--out", str(tmp_path), PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="")
    assert without.returncode == 2 and "--smoke runs without one" in without.stderr
    python, log, timeout = tmp_path / "python", tmp_path / "log", tmp_path / "timeout"
    python.write_text(f'#!/usr/bin/env bash\necho "$@" >>{log}\n[[ $1 != */run.py ]] || sleep 600\n')
    timeout.write_text('#!/usr/bin/env bash\nexec /usr/bin/timeout "$1" "$2" 1 "${@:4}"\n')
    for script in (python, timeout):
        script.chmod(0o755)
    options = ("--smoke", "--stage", "3", "--minutes", "4", "--out", str(tmp_path))
    done = gpu_sh(*options, PYTHON=str(python), PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 1 and "gpu.sh: no quickstart" in done.stdout
    first, second, third, last = log.read_text().splitlines()
    assert "run.py --smoke --out" in first and "--sweep" in second and "--stage quickstart" in third
    assert last.endswith(f"report.py {tmp_path}/gpu-smoke.json")
