"""gpu.sh: its stages, its one JSON, and what a machine that lacks something still gets."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import gpu_counters  # noqa: E402
import gpu_quickstart  # noqa: E402
import gpu_report  # noqa: E402
from jobs import script_environment  # noqa: E402
from timing.section import Section  # noqa: E402

pytestmark = pytest.mark.interpreter


def gpu_sh(*arguments: str, script: Path = ROOT / "benchmarks/gpu.sh", **environment: str) -> Any:
    command = ["bash", str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=script_environment() | environment)


def fake_python(folder: Path, statuses: str) -> tuple[Path, Path]:
    """An interpreter that writes its arguments down and ends with one status after the other, and where it writes.

    "hang" in place of a status: it does not end.
    """
    log, python = folder / "log", folder / "python"
    python.write_text(
        f'#!/usr/bin/env bash\necho "$@" >>{log}\nset -- {statuses}\nshift $(($(wc -l <{log}) - 1))\n'
        "[[ $1 == hang ]] && sleep 600\nexit $1\n"
    )
    python.chmod(0o755)
    return python, log


def test_a_stage_goes_on_after_a_failed_check_and_after_calls_that_lose_the_device(tmp_path: Path) -> None:
    python, log = fake_python(tmp_path, "1 75 139 0 0")
    options = ("--smoke", "--stage", "1", "--minutes", "3", "--out", str(tmp_path), "--flash-attention", "F")
    done = gpu_sh(*options, PYTHON=str(python))
    assert done.returncode == 1, done.stdout + done.stderr
    check, *runs, report = log.read_text().splitlines()
    file = f"{tmp_path}/gpu-smoke.json"
    assert "gpu_check.py --small --minutes 1.5 " in check and check.endswith(f"--out {file} --section checks")
    assert len(runs) == 3
    for run in runs:
        assert "kernels.py --smoke --flash-attention F --resume " in run
        assert f"--out {file} --section kernels --minutes 1." in run
    assert report.endswith(f"gpu_report.py {file}")


def impatient(folder: Path) -> tuple[str, Path]:
    """A PATH whose `timeout` ends every command after a second, and the file with the seconds that it was asked for."""
    asked, timeout = folder / "seconds", folder / "timeout"
    timeout.write_text(f'#!/usr/bin/env bash\necho "$3" >>{asked}\nexec {shutil.which("timeout")} -k 1 1 "${{@:4}}"\n')
    timeout.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}", asked


def test_a_command_that_hangs_is_ended_within_its_stage_and_the_next_one_goes_on(tmp_path: Path) -> None:
    python, log = fake_python(tmp_path, "hang hang 0 0")
    path, asked = impatient(tmp_path)
    options = ("--smoke", "--stage", "1", "--minutes", "9", "--out", str(tmp_path))
    done = gpu_sh(*options, PYTHON=str(python), PATH=path)
    assert "attempt 1 ended with status 124; the next one goes on without" in done.stdout
    # checks that hang are no success; rows that the next process came to are
    assert done.returncode == 1
    scripts = [Path(line.split()[0]).name for line in log.read_text().splitlines()]
    assert scripts == ["gpu_check.py", "kernels.py", "kernels.py", "gpu_report.py"]
    # the time that is left of the stage and a minute: all of it is over after nine minutes
    checks, *rows = map(int, asked.read_text().split())
    assert checks < 9 * 60 and all(8 * 60 < seconds < 9 * 60 for seconds in rows)
    given = [float(line.split()[-1]) for line in log.read_text().splitlines()[1:3]]
    assert all(seconds - 60 * minutes == pytest.approx(60, abs=6) for seconds, minutes in zip(rows, given, strict=True))


def test_gpu_sh_that_is_ended_leaves_no_process_behind(tmp_path: Path) -> None:
    python, log = fake_python(tmp_path, "hang")
    command = ["bash", str(ROOT / "benchmarks/gpu.sh"), "--smoke", "--out", str(tmp_path)]
    script = subprocess.Popen(command, stdout=subprocess.PIPE, env=script_environment() | {"PYTHON": str(python)})
    while not log.exists():
        time.sleep(0.05)
    script.terminate()
    # the pipe ends when the last process that could write to it has ended
    script.communicate(timeout=30)
    assert script.returncode == 143


def test_stages_divide_the_work_and_what_a_machine_lacks_costs_no_status(tmp_path: Path) -> None:
    python, log = fake_python(tmp_path, "1 0 0")
    assert gpu_sh("--smoke", "--stage", "2", "--out", str(tmp_path), PYTHON=str(python)).returncode == 1
    rows, sweep, _ = log.read_text().splitlines()
    assert "--section kernels --minutes 5.9" in rows or "--section kernels --minutes 6.0" in rows
    assert "--smoke --sweep --resume" in sweep and "--section sweep" in sweep
    log.unlink()
    python, log = fake_python(tmp_path, "1 1 0 0")
    done = gpu_sh("--smoke", "--stage", "3", "--out", str(tmp_path), PYTHON=str(python))
    assert done.returncode == 0, done.stdout + done.stderr
    scripts = [Path(line.split()[0]).name for line in log.read_text().splitlines()]
    assert scripts == ["gpu_counters.py", "gpu_quickstart.py", "kernels.py", "gpu_report.py"]
    assert "counters ended with status 1" in done.stdout


def test_gpu_sh_says_what_it_needs(tmp_path: Path) -> None:
    asked = gpu_sh("--minutes", "soon")
    assert asked.returncode == 2 and "--minutes must be a whole number, got soon" in asked.stderr
    stage = gpu_sh("--stage", "4")
    assert stage.returncode == 2 and "--stage must be 1, 2 or 3, got 4" in stage.stderr
    without = gpu_sh("--out", str(tmp_path), PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="")
    assert without.returncode == 2 and "--smoke runs without one" in without.stderr


def test_a_section_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "a/file.json"
    checks, rows = Section(file, "checks"), Section(file, "kernels")
    assert checks.read() is None
    checks.write({"states": {}})
    rows.write({"rows": [1]})
    checks.write({"states": {"passed": 2}})
    assert json.loads(file.read_text()) == {"checks": {"states": {"passed": 2}}, "kernels": {"rows": [1]}}
    assert rows.read() == {"rows": [1]} and Section(file).read() == json.loads(file.read_text())


NCU = """==PROF== Connected to process 1
==PROF== Profiling "row_statistics_fwd_kernel": 0%....100% - 8 passes
"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","1","row_statistics_fwd_kernel","Command line profiler metrics","smsp__inst_executed.sum","inst","1,234"
"0","1","row_statistics_fwd_kernel","Command line profiler metrics","dram__bytes_read.sum","byte","2,500,000"
"1","1","row_gradient_bwd_kernel","Command line profiler metrics","smsp__inst_executed.sum","inst","7"
"""


def fake_ncu(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ncu = folder / "ncu"
    ncu.write_text(f"#!/usr/bin/env bash\ncat <<'TEXT'\n{text}TEXT\n")
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_counters_are_read_from_what_ncu_prints_and_its_errors_are_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ncu(tmp_path, NCU, monkeypatch)
    found = gpu_counters.counted("logits", gpu_counters.METRICS, 60)
    first = {"smsp__inst_executed.sum": 1234.0, "dram__bytes_read.sum": 2.5e6}
    second = {"kernel": "row_gradient_bwd_kernel", "smsp__inst_executed.sum": 7.0}
    assert found == {"launches": [{"kernel": "row_statistics_fwd_kernel"} | first, second]}
    refused = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access counters"
    fake_ncu(tmp_path, f"==PROF== Connected\n{refused}\n", monkeypatch)
    assert gpu_counters.counted("logits", gpu_counters.METRICS, 60) == {"reason": refused}


def test_a_quickstart_that_fails_or_takes_too_long_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = gpu_quickstart.train(60, ["no.such=1"])
    assert failed["state"] == "failed" and "unknown field 'no'" in failed["reason"] and failed["steps"] == 0
    late = gpu_quickstart.train(0.01, [])
    assert late["state"] == "cut short" and late["steps"] == 0


def test_the_report_names_what_is_wrong_absent_and_still_to_come(tmp_path: Path) -> None:
    smoke = json.loads((ROOT / "benchmarks/results/kernels-smoke.json").read_text())
    wrong = {"group": "rows", "name": "bf16", "state": "failed"}
    file = {
        "checks": {"states": {"passed": 3, "failed": 1}, "results": [wrong]},
        "kernels": smoke
        | {"skipped": ["many short rows"], "lost": [["update path", "Liger"]], "trying": ["head", None]},
        "counters": {"absent": "ncu is not on PATH", "calls": {}},
        "quickstart": {"runs": {"linear": {"state": "failed", "reason": "No module named 'megatron'", "steps": 0}}},
    }
    text = "\n".join(gpu_report.report(file))
    for part in (
        "3 passed, 1 failed\nfailed: rows: bf16",
        "not measured row statistics, share of the read bandwidth",
        "absent peer: Liger: ModuleNotFoundError",
        "a process ended there: update path: Liger\na process ended there: head\n",
        "still to come: many short rows",
        "== sweep\nnot run yet",
        "== counters\nncu is not on PATH",
        "train.head=linear: state failed, reason No module named 'megatron', steps 0",
    ):
        assert part in text, text


@pytest.mark.full
@pytest.mark.timeout(900)
def test_all_stages_run_interpreted_in_a_fresh_clone(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    done = gpu_sh("--smoke", "--out", str(tmp_path), script=clone / "benchmarks/gpu.sh", PYTHON=sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    file = json.loads((tmp_path / "gpu-smoke.json").read_text())
    assert list(file) == ["checks", "kernels", "sweep", "counters", "quickstart"]
    assert set(file["checks"]["states"]) == {"passed", "skipped"} and file["checks"]["states"]["passed"] > 200
    # what is skipped is what only a device has
    reasons = {result["reason"] for result in file["checks"]["results"] if result["state"] == "skipped"}
    assert reasons == {"needs a CUDA device"}
    assert file["kernels"]["skipped"] == file["sweep"]["skipped"] == [] and file["kernels"]["seconds"] is None
    assert file["counters"]["absent"] and len(file["counters"]["calls"]) == 5
    runs = file["quickstart"]["runs"]
    assert {head: (run["state"], run["steps"]) for head, run in runs.items()} == {
        "logits": ("ran", 2), "linear": ("ran", 2),
    }  # fmt: skip
    assert runs["linear"]["k3"] == pytest.approx(runs["logits"]["k3"], rel=1e-3)
