"""metrics.jsonl, the display and the fingerprint."""

import io
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from process_groups import until
from refusals import refuses
from report_pages import rl, warmup, write_all
from rich.console import Console

from megatron_rc.report import display as display_module
from megatron_rc.report.display import Display
from megatron_rc.report.log import MetricsLog, read_metrics
from megatron_rc.training.fingerprint import fingerprint

ROOT = Path(__file__).parents[2]


def test_what_json_cannot_say_becomes_null(tmp_path: Path) -> None:
    values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.5, "e": 3, "f": "x", "g": None}
    write_all(tmp_path, [{"step": 1, **values}])

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = json.loads(line, parse_constant=refuse)
    assert found == {"step": 1, "a": None, "b": None, "c": None, "d": 0.5, "e": 3, "f": "x", "g": None}


def test_a_killed_writer_leaves_only_whole_steps_and_its_successor_goes_on(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom megatron_rc.report.log import MetricsLog\n"
        "log = MetricsLog(sys.argv[1])\n"
        "for step in range(1, 10**9): log.write({'step': step, **{f'metric/{i}': i / 7 for i in range(300)}})\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    writer = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], env=environment)
    try:
        file = tmp_path / "metrics.jsonl"
        assert until(lambda: file.is_file() and file.stat().st_size > 50_000, lambda: writer.poll() is None)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    steps = [record["step"] for record in read_metrics(tmp_path)]
    assert len(steps) > 5 and steps == list(range(1, len(steps) + 1))
    write_all(tmp_path, rl([len(steps) + 1]))
    assert [record["step"] for record in read_metrics(tmp_path)] == [*steps, len(steps) + 1]


@pytest.mark.parametrize("torn", ['{"phase": "rl", "step": 4, "rew', '{"phase": "rl", "step": 4', "\x00\x00", "{}x\n"])
def test_a_torn_last_line_is_left_out_and_then_gone(tmp_path: Path, torn: str) -> None:
    write_all(tmp_path, rl(range(3)))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    assert read_metrics(tmp_path) == rl(range(3))
    write_all(tmp_path, rl([3]))
    assert read_metrics(tmp_path) == rl(range(4))


def test_a_bad_line_before_the_last_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    refuses("metrics.jsonl line 2 is not a JSON object", read_metrics, tmp_path)
    refuses("no such file", read_metrics, tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("phase", "step", "kept"),
    [
        ("rl", 2, [*warmup(range(1, 6)), *rl(range(3))]),
        ("rl", 0, [*warmup(range(1, 6)), *rl([0])]),
        ("warmup", 3, warmup(range(1, 4))),
        ("rl", 99, [*warmup(range(1, 6)), *rl(range(6))]),
    ],
)
def test_resuming_forgets_what_came_later(tmp_path: Path, phase: str, step: int, kept: list[dict[str, Any]]) -> None:
    write_all(tmp_path, [*warmup(range(1, 6)), *rl(range(6))])
    with MetricsLog(tmp_path) as log:
        log.truncate_after(phase, step)
        assert read_metrics(tmp_path) == kept
        log.write(rl([100])[0])
    assert read_metrics(tmp_path) == [*kept, *rl([100])]


def test_a_repeated_step_replaces_what_followed_it(tmp_path: Path) -> None:
    write_all(tmp_path, [*warmup([1, 2]), *rl(range(5))])
    again = {"phase": "rl", "step": 2, "reward/mean": 9.0}
    write_all(tmp_path, [again])
    assert read_metrics(tmp_path) == [*warmup([1, 2]), *rl(range(2)), again]
    write_all(tmp_path, warmup([1]))
    assert read_metrics(tmp_path) == warmup([1])


STEP = {
    "reward/mean": 0.5, "eval/accuracy": 0.25, "response_length/mean": 7.25, "old/k3": 1.26e-4, "old/ess_token": 0.995,
    "old/masked_token": 0.015, "grad_norm": 1.5, "lr": 3e-4, "tokens_per_second": 9876.0,
}  # fmt: skip


def plain_display(total: int = 10) -> tuple[Display, io.StringIO]:
    out = io.StringIO()
    return Display(total, "job", console=Console(file=out, force_terminal=False, highlight=False)), out


def test_without_a_terminal_a_step_is_one_plain_line(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(display_module.time, "monotonic", lambda: now[0])
    shown, out = plain_display()
    with shown:
        shown.step(1, STEP)
        now[0] += 2.0
        shown.step(2, {"reward/mean": 0.75, "old/k3": math.nan, "grad_norm": None})
    first, second = out.getvalue().splitlines()
    assert first == (
        "step 1/10 | reward 0.500 | held-out 25.0% | length 7.2 | k3 1.3e-04 | ESS 0.9950 | masked 1.5% | grad 1.50 "
        "| lr 3.0e-04 | tok/s 9,876"
    )
    assert second == "step 2/10 | reward 0.750 | ETA 0:16"


def test_without_a_terminal_a_warm_up_prints_evaluations_and_every_25th_step() -> None:
    shown, out = plain_display()
    with shown:
        shown.phase("warm-up", 60)
        for step in range(1, 61):
            shown.step(step, {"cross_entropy": 1.0, **({"eval/accuracy": 0.5} if step == 40 else {})})
            shown.advance()
    assert out.getvalue().splitlines() == [
        "warm-up 25 | loss 1.000", "warm-up 40 | loss 1.000 | held-out 50.0%", "warm-up 50 | loss 1.000",
    ]  # fmt: skip


def test_without_a_terminal_a_long_phase_says_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(display_module.time, "monotonic", lambda: now[0])
    shown, out = plain_display()
    shown.phase("rollout", 100)
    for _ in range(40):
        now[0] += 1.0
        shown.advance(2)
    assert out.getvalue().splitlines() == ["rollout 32/100", "rollout 64/100"]


def test_messages_are_printed_as_they_are() -> None:
    shown, out = plain_display()
    with shown:
        shown.message("resumed from runs/[a] step 7: " + "x" * 200)
    assert out.getvalue() == "resumed from runs/[a] step 7: " + "x" * 200 + "\n"


def test_a_terminal_shows_bars_and_the_latest_values() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=110, color_system=None)
    with pytest.raises(RuntimeError, match="stop here"), Display(10, "job", console=console) as shown:
        shown.phase("rollout", 512)
        shown.advance(128)
        shown.step(400, {"phase": "warmup", "cross_entropy": 2.0, "grad_norm": 900.0})
        shown.step(2, {"reward/mean": 0.25})
        shown.step(3, STEP)
        shown._live.refresh()
        shown.message("a message of [bold]two[/] words")
        raise RuntimeError("stop here")
    text = out.getvalue()
    final = text[text.rindex("metric") :]
    assert "a message of [bold]two[/] words" in text and "3/10" in text and "▁█" in final
    # the message redraws the table with its own markup, and the warm-up is in no mean of what follows
    assert text.count("[bold]") == 1 and "900" not in final and "45" not in final
    for words in (("reward", "0.500"), ("held-out accuracy", "25.0%"), ("k3", "1.3e-04"), ("learning rate", "3.0e-04")):
        assert all(word in final for word in words)
    # the cursor is given back even when the job fails
    assert text.rstrip().endswith("\x1b[?25h") or "\x1b[?25h" in text[text.rindex("metric") :]


def test_the_fingerprint_names_machine_and_versions() -> None:
    import torch

    found = fingerprint(train_dtype="fp32")
    assert next(iter(found)) == "train_dtype"
    assert found["torch"] == torch.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert f"torch threads: {torch.get_num_threads()}" in found["cpu"]
    assert {"device", "memory", "system", "megatron-core", "triton", "transformers", "git_commit"} <= found.keys()
    assert all(isinstance(value, str) and value for value in found.values())
    assert found["apex"] == "not installed" or found["apex"][0].isdigit()
