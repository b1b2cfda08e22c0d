"""Live display of a running job: a table in a terminal, one plain line per step elsewhere."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from megatron_rc.report import panels
from megatron_rc.report.curves import duration, phase_of, value_of
from megatron_rc.report.panels import Curve

PLAIN_PHASE_SECONDS = 15.0
"""Without a terminal, a long phase prints its progress at this interval."""
HISTORY = 40
"""Latest values of a metric that its row draws."""
_BLOCKS = "▁▂▃▄▅▆▇█"


class Row(NamedTuple):
    short: str
    curve: Curve
    format: str


ROWS = (
    Row("loss", panels.CROSS_ENTROPY, "{:.3f}"),
    Row("reward", panels.REWARD, "{:.3f}"),
    Row("held-out", panels.ACCURACY, "{:.1%}"),
    Row("length", panels.LENGTH, "{:.1f}"),
    Row("k3", panels.K3, "{:.1e}"),
    Row("ESS", panels.ESS, "{:.4f}"),
    Row("masked", panels.MASKED, "{:.1%}"),
    Row("grad", panels.GRAD_NORM, "{:.2f}"),
    Row("lr", panels.LEARNING_RATE, "{:.1e}"),
    Row("tok/s", panels.THROUGHPUT, "{:,.0f}"),
)


class Display:
    """Shows a job while it runs; a context manager, to be used on one process only.

    In a terminal it redraws a table and two bars in place. Elsewhere (a CI log, a file) it prints one line per step.
    """

    def __init__(self, total_steps: int, name: str, *, console: Console | None = None) -> None:
        """``total_steps``: reinforcement-learning steps of the job; ``name``: its name."""
        self._console = console or Console(highlight=False)
        self._total = total_steps
        self._history: dict[str, deque[float]] = {}
        self._warming_up = True
        self._clock: tuple[int, float] | None = None
        self._printed_at = 0.0
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=32), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, TextColumn("{task.fields[note]}"), console=self._console)
        self._overall = self._bars.add_task(f"[bold]{name}", total=total_steps, note="")
        self._current = self._bars.add_task("", total=None, visible=False, note="")
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4)

    def __enter__(self) -> "Display":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._console.is_terminal:
            self._bars.update(self._current, visible=False)
            self._live.stop()

    def phase(self, name: str, total: int) -> None:
        """Start a phase of ``total`` units, such as warm-up steps, responses or optimizer steps."""
        self._printed_at = time.monotonic()
        self._bars.reset(self._current, description=name, total=total, visible=True)

    def advance(self, count: int = 1) -> None:
        """Count ``count`` more units of the phase as done."""
        self._bars.advance(self._current, count)
        if not self._console.is_terminal and time.monotonic() - self._printed_at > PLAIN_PHASE_SECONDS:
            self._printed_at = time.monotonic()
            shown = self._bars.tasks[self._current]
            self.message(f"{shown.description} {shown.completed:.0f}/{shown.total:.0f}")

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show a finished step: its number within its phase, where 0 is the state before reinforcement learning, and
        its record; one without a ``phase`` belongs to "rl".
        """
        warming_up = phase_of(metrics) == "warmup" or value_of(metrics, panels.CROSS_ENTROPY) is not None
        if warming_up != self._warming_up:
            # gradient norm and learning rate have other sizes in the other phase
            self._history.clear()
            self._warming_up = warming_up
        shown = [(row, value) for row in ROWS if (value := value_of(metrics, row.curve)) is not None]
        for row, value in shown:
            self._history.setdefault(row.short, deque(maxlen=HISTORY)).append(value)
        left = "" if warming_up else self._time_left(step)
        if not warming_up:
            self._bars.update(self._overall, completed=step, note=left)
        if self._console.is_terminal:
            return
        # a warm-up has many short steps, so only every 25th and those with an evaluation are printed
        if warming_up and step % 25 and value_of(metrics, panels.ACCURACY) is None:
            return
        head = f"warm-up {step}" if warming_up else f"step {step}/{self._total}"
        cells = [f"{row.short} {row.format.format(value)}" for row, value in shown]
        self.message(" | ".join([head, *cells, *([left] if left else [])]))

    def message(self, text: str) -> None:
        """Print a line of text above the table."""
        # with markup=False the table would be redrawn without its own markup
        self._console.print(Text(text), soft_wrap=True)

    def _time_left(self, step: int) -> str:
        """Estimate from the mean time per step in this process, without its first step, which also compiles."""
        now = time.monotonic()
        if self._clock is None:
            self._clock = (step, now)
            return ""
        done = step - self._clock[0]
        seconds = (now - self._clock[1]) / done * (self._total - step) if done > 0 else 0.0
        return f"ETA {duration(seconds)}" if step < self._total else ""

    def _render(self) -> Group:
        table = Table(box=None, pad_edge=False, padding=(0, 2))
        for heading, justify in (("metric", "left"), ("now", "right"), ("mean of 10", "right"), ("", "left")):
            table.add_column(heading, justify=justify, style=None, header_style="dim")  # type: ignore[arg-type]
        for row in ROWS:
            if values := list(self._history.get(row.short, ())):
                mean = sum(values[-10:]) / len(values[-10:])
                now = f"[bold]{row.format.format(values[-1])}[/]"
                table.add_row(row.curve.label, now, row.format.format(mean), f"[cyan]{_sparkline(values)}[/]")
        return Group(self._bars, table)


def _sparkline(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in values)
