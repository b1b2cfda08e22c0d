"""Runs checks one after the other and says how each ended."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import torch

from checking import correction, device, far, groups, head, kept, loss, routes, rows, shards
from checking.setting import Check, Comparison, Setting, Skip

Result = dict[str, Any]
"""One check: its group and name, how it ended, and the quantity that used most of what is allowed."""
WRONG = ("failed", "raised", "crashed", "hung")

_MODULES = (rows, kept, shards, far, loss, correction, routes, head, device, groups)


def all_checks(setting: Setting, groups: list[str]) -> list[Check]:
    """The checks of these groups, of all groups when none is given, in the order they run in."""
    checks = [check for module in _MODULES for check in module.checks(setting)]
    assert len({check.title for check in checks}) == len(checks), "two checks of one name"
    unknown = set(groups) - {check.group for check in checks}
    if unknown:
        known = ", ".join(dict.fromkeys(check.group for check in checks))
        raise SystemExit(f"--only: no group {', '.join(sorted(unknown))}; there are {known}")
    return [check for check in checks if not groups or check.group in groups]


def part_of(checks: list[Check], number: int, count: int) -> list[Check]:
    """The checks of one of `count` processes; one process has all that need much memory, so that each has it alone."""
    light = [check for check in checks if not check.large]
    large = [check for check in checks if check.large]
    return light[number::count] + (large if number == 0 else [])


def run_check(check: Check, setting: Setting) -> Result:
    result: Result = {"group": check.group, "name": check.name}
    started, comparison = time.perf_counter(), Comparison()
    try:
        check.run(setting, comparison)
        result |= _judged(comparison)
    except Skip as why:
        result |= {"state": "skipped", "reason": str(why)}
    except torch.cuda.OutOfMemoryError:
        result |= {"state": "skipped", "reason": "needs more memory than this device has"}
    except Exception as error:  # a check that cannot end is a result, and the others are worth having
        first_line = (str(error).splitlines() or [""])[0]
        result |= {"state": "raised", "reason": f"{type(error).__name__}: {first_line}"}
    if setting.cuda:
        torch.cuda.empty_cache()
    return result | {"seconds": round(time.perf_counter() - started, 2)}


def _judged(comparison: Comparison) -> Result:
    assert comparison.distances, "a check that compares nothing"
    worst = max(comparison.distances, key=lambda distance: (distance.use, distance.pytorch is not None))
    wrong = [asdict(distance) for distance in comparison.distances if not distance.correct]
    return {"state": "failed" if wrong else "passed", **asdict(worst), **({"wrong": wrong} if wrong else {})}
