"""What fails in a benchmark costs one row or one provider: everything else is on disk, or goes on."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import kernels  # noqa: E402
from timing.bench import Bench, DeviceLost, Errors, Row  # noqa: E402
from timing.counting import of_trace  # noqa: E402
from timing.meter import Work  # noqa: E402
from timing.peers import flash_attention_peer, without_if_broken  # noqa: E402
from timing.record import Record  # noqa: E402
from timing.section import Section  # noqa: E402
from timing.watch import HUNG, Watch  # noqa: E402


@pytest.fixture
def bench() -> Bench:
    return Bench(torch.device("cpu"), seconds=600)


def fails() -> dict[str, Any]:
    raise RuntimeError("no such kernel\nand more")


def test_wrong_nan_and_failing_answers_are_distinguished(bench: Bench) -> None:
    def checked(check: Callable[[], Errors]) -> Row:
        return bench.checked("a peer", check, {"gradient": 1e-3})

    assert checked(lambda: {"gradient": 1e-4})["correct"]
    assert not checked(lambda: {"gradient": 2e-3})["correct"]
    assert not checked(lambda: {"gradient": float("nan")})["correct"]
    assert checked(fails) == {"state": "failed", "reason": "RuntimeError: no such kernel"}


def test_a_peer_that_raises_while_it_is_timed_costs_the_others_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter([1, 2, 3])

    def timed_once(work: Work) -> dict[str, float]:
        work.run()
        return {"call": 1e6}

    def breaks_at_last() -> None:
        if next(calls) == 3:
            raise ValueError("broken")

    monkeypatch.setattr(type(bench.meter), "measures", True)
    monkeypatch.setattr(bench.meter, "synchronize", lambda: None)
    monkeypatch.setattr(bench.meter, "_timed_once", timed_once)
    rows = {name: {"measured": {}} for name in ("good", "bad", "worse")}
    works: dict[str, Callable[[], object]] = {"good": lambda: None, "bad": fails, "worse": breaks_at_last}
    bench.timed(rows, {name: Work({"call": call}) for name, call in works.items()})
    assert rows["good"]["measured"] == {"call_us": 1e6, "call_spread": 0.0} and "not_measured" not in rows["good"]
    assert rows["bad"]["not_measured"] == ["RuntimeError: no such kernel"]
    # what was timed before it broke still counts
    assert rows["worse"]["not_measured"] == ["ValueError: broken"] and rows["worse"]["measured"]["call_us"] == 1e6


def test_every_row_is_on_disk_before_the_next_one_starts(bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    on_disk = lambda: json.loads(out.read_text())  # noqa: E731
    seen = []

    def second() -> list[Row]:
        seen.append(on_disk())
        raise RuntimeError("not this row")

    def third() -> list[Row]:
        seen.append(on_disk())
        bench.seconds = -1
        return [{"kind": "third"}]

    work: kernels.Jobs = {"first": lambda: [{"kind": "first"}], "second": second, "third": third, "fourth": second}
    kernels.run_jobs(bench, work, Record.begin(Section(out), {"device": {}}, list(work)))
    assert [row["name"] for row in seen[0]["rows"]] == ["first"] and seen[0]["skipped"] == ["second", "third", "fourth"]
    assert seen[1]["rows"][1] == {
        "name": "second", "kind": "failed", "reason": "RuntimeError: not this row", "providers": {},
    }  # fmt: skip
    end = on_disk()
    assert [row["name"] for row in end["rows"]] == ["first", "second", "third"] and end["skipped"] == ["fourth"]
    assert kernels.wrong_answers(end["rows"]) == ["second: RuntimeError: not this row"]
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_run_that_lost_the_device_goes_on_without_the_call_that_did_it(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, asked = tmp_path / "run.json", list[str]()

    def row(bench: Bench) -> list[Row]:
        def check(name: str) -> Errors:
            asked.append(name)
            return {"gradient": 0.0} if name == "good" else fails()

        return [{"kind": "a", "providers": {n: bench.checked(n, lambda n=n: check(n), {}) for n in ("good", "bad")}}]

    def run(record: Record) -> None:
        again = Bench(torch.device("cpu"), seconds=600)
        again.lost, again.trying = record.lost, record.trying
        monkeypatch.setattr(again.meter, "alive", lambda: asked[-1] != "bad")
        kernels.run_jobs(again, {"first": lambda: [{"kind": "b"}], "row": lambda: row(again)}, record)

    with pytest.raises(DeviceLost, match="bad: RuntimeError: no such kernel"):
        run(Record.begin(Section(out), {}, ["first", "row"]))
    assert [row["name"] for row in json.loads(out.read_text())["rows"]] == ["first"]
    asked.clear()
    run(Record.resume(Section(out)))
    assert asked == ["good"]
    end = json.loads(out.read_text())
    assert [row["name"] for row in end["rows"]] == ["first", "row"] and end["lost"] == [["row", "bad"]]
    assert end["rows"][1]["providers"]["bad"] == {
        "state": "failed",
        "reason": "its call lost the device, or did not come back",
    }
    # a process that is killed cannot say whose call it was: the file says it
    Record.begin(Section(out), {}, ["row"]).trying(("row", "bad"))
    assert Record.resume(Section(out)).lost == [("row", "bad")]


def test_a_call_that_does_not_come_back_ends_its_process_and_the_next_one_goes_on_without_it(
    bench: Bench, tmp_path: Path
) -> None:
    section = Section(tmp_path / "run.json")

    def providers(slow: Callable[[], Errors]) -> list[Row]:
        checks: dict[str, Callable[[], Errors]] = {"good": lambda: {"gradient": 0.0}, "sleeper": slow}
        return [{"kind": "a", "providers": {name: bench.checked(name, check, {}) for name, check in checks.items()}}]

    def sleeps() -> Any:
        time.sleep(600)

    def run(record: Record, slow: Callable[[], Errors]) -> None:
        watch = Watch(0.3)
        bench.lost, bench.trying = record.lost, partial(kernels.watched, record, watch)
        kernels.run_jobs(
            bench, {"peers": lambda: providers(slow), "built": sleeps, "last": lambda: providers(fails)}, record
        )
        watch.stop()

    def status(record: Record) -> int:
        child = os.fork()
        if child == 0:
            run(record, sleeps)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert status(Record.begin(section, {}, ["peers", "built", "last"])) == HUNG
    assert section.read()["trying"] == ["peers", "sleeper"]
    assert status(Record.resume(section)) == HUNG
    # what hangs before any provider is called costs its row
    assert section.read()["trying"] == ["built", None]
    run(Record.resume(section), fails)
    end = section.read()
    assert end["lost"] == [["peers", "sleeper"], ["built", None]] and end["skipped"] == [] and end["trying"] is None
    peers, built, last = end["rows"]
    assert peers["providers"]["good"]["state"] == "ran" and peers["providers"]["sleeper"]["state"] == "failed"
    assert built["kind"] == "failed" and last["providers"]["sleeper"]["reason"] == "RuntimeError: no such kernel"


def test_launches_on_a_gpu_are_kernels_copies_and_fills_and_waits_are_those_inside_the_call() -> None:
    def event(name: str, category: str, at: float, lasts: float = 1.0) -> dict[str, Any]:
        return {"ph": "X", "name": name, "cat": category, "ts": at, "dur": lasts}

    trace = [
        event("the counted call", "user_annotation", 10, 50),
        event("the counted call", "gpu_user_annotation", 12, 40),
        event("row_statistics_fwd_kernel", "kernel", 14),
        event("Memcpy DtoD", "gpu_memcpy", 16),
        event("Memset (Device)", "gpu_memset", 18),
        event("Stream Sync", "cuda_sync", 19),
        event("aten::empty", "cpu_op", 20),
        event("cuStreamSynchronize", "cuda_driver", 30),
        event("cudaStreamSynchronize", "cuda_runtime", 5),
        event("cudaDeviceSynchronize", "cuda_runtime", 70),
        {"ph": "M", "name": "process_name"},
    ]
    assert of_trace({"traceEvents": trace}) == {"launches": 3, "waits": 1}
    assert of_trace({"traceEvents": trace[:1]}) == {"launches": None, "waits": None}


def test_a_broken_transformer_engine_does_not_take_megatron_core_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_broken_package.py").write_text("raise RuntimeError('Found empty meta package')")
    (tmp_path / "a_good_package.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with without_if_broken("a_broken_package"), pytest.raises(ModuleNotFoundError):
        import a_broken_package  # noqa: F401
    assert "a_broken_package" not in sys.modules
    with without_if_broken("a_good_package"), without_if_broken("no_such_package"):
        import a_good_package  # noqa: F401


def test_the_file_of_a_peer_may_be_given_by_a_path_of_any_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cross_entropy.py").write_text("import no_such_library")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        list(flash_attention_peer(Path("cross_entropy.py"), torch.device("meta")))
