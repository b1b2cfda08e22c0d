"""Where SurgeDetector finds the surge of simulated response lengths.

    python benchmarks/surge_detector.py [--runs 1000]

A curve is a logistic surge, half done at a known step, times log-normal noise on the mean of the batch and sometimes a
linear drift (tests/support/length_curves.py has the formula). A width is the scale of the logistic: the surge takes
4.4 widths from 10 % to 90 %.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import checkout  # noqa: F401
from length_curves import length_curves, share_within, surge_steps

from megatron_rc.jobs.describe import table
from megatron_rc.surge import SurgeDetector

# what the tests assert comes first
SURGES: list[tuple[str, dict[str, Any]]] = [
    *(
        (f"{peak / 1000:g}x, width {width:g}, cv {cv}", {"peak": peak, "width": width, "cv": cv})
        for peak in (3000.0, 3500.0)
        for width, cv in ((0.1, 0.15), (1.0, 0.15), (4.0, 0.03), (4.0, 0.08), (4.0, 0.15), (10.0, 0.15))
    ),
    ("3.5x, width 4, drift +15 %", {"drift": 0.15}),
    ("3.5x, width 10, drift +15 %", {"drift": 0.15, "width": 10.0}),
    ("3x, width 4, at 90", {"peak": 3000.0, "at": 90}),
    ("3x, width 4, at 60", {"peak": 3000.0, "at": 60}),
    ("3x, width 4, at 30", {"peak": 3000.0, "at": 30}),
    ("3x, width 4, at 200", {"peak": 3000.0, "at": 200}),
    ("4x, width 4", {"peak": 4000.0}),
    ("4x, width 4, drift +15 %", {"peak": 4000.0, "drift": 0.15}),
    ("2x, width 4", {"peak": 2000.0}),
    ("2x, width 10", {"peak": 2000.0, "width": 10.0}),
    ("1.5x, width 4", {"peak": 1500.0}),
    ("3x, width 4, cv 0.3", {"peak": 3000.0, "cv": 0.3}),
    ("3x, width 10, cv 0.3", {"peak": 3000.0, "cv": 0.3, "width": 10.0}),
    ("3x, width 4, noise correlated 0.9", {"peak": 3000.0, "correlation": 0.9}),
    ("3x, width 20", {"peak": 3000.0, "width": 20.0}),
    ("3x, width 40", {"peak": 3000.0, "width": 40.0, "at": 150}),
]
FLAT: list[tuple[str, dict[str, Any]]] = [
    ("cv 0.15", {}),
    ("cv 0.3", {"cv": 0.3}),
    ("cv 0.5", {"cv": 0.5}),
    ("cv 0.15, noise correlated 0.9", {"correlation": 0.9}),
    ("cv 0.3, noise correlated 0.9", {"cv": 0.3, "correlation": 0.9}),
    ("cv 0.15, drift +15 % per 100 steps", {"drift": 0.15}),
    ("cv 0.15, drift +50 % per 100 steps", {"drift": 0.5}),
]


def surge_row(name: str, runs: int, curve: dict[str, Any]) -> list[str]:
    at = curve.get("at", 110)
    found = surge_steps(length_curves(runs, 400, seed=1, **curve))
    steps = sorted(step for step in found if step is not None)
    spread = "-"
    if steps:
        ends = (steps[int(share * (len(steps) - 1))] for share in (0.05, 0.95))
        spread = f"{statistics.median(steps):g} ({'-'.join(map(str, ends))})"
    shares = (f"{100 * share_within(found, at, distance):.1f} %" for distance in (3, 8))
    return [name, str(at), spread, *shares, str(runs - len(steps))]


def flat_row(name: str, runs: int, curve: dict[str, Any]) -> list[str]:
    curves = length_curves(runs, 400, peak=1000.0, seed=2, **curve)
    alarms = sum(step is not None for step in surge_steps(curves))
    flags = 0
    for lengths in curves:
        detector = SurgeDetector()
        for length in lengths[: detector.warmup]:
            detector.update(length)
        flags += detector.surge_in_warmup is not None
    return [name, f"{alarms} / {runs}", f"{flags} / {runs}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="curves per row")
    runs = parser.parse_args().runs
    surge_header = ("surge (drift: per 100 steps)", "at", "found, median (5-95 %)", "within 3", "within 8", "missed")
    print(table(surge_header, [surge_row(name, runs, curve) for name, curve in SURGES]))
    flat_header = ("flat curve of 400 steps", "false alarms", "warm-up flags")
    print(table(flat_header, [flat_row(name, runs, curve) for name, curve in FLAT]), end="")


if __name__ == "__main__":
    main()
