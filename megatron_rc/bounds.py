"""A RolloutCorrection as its backends read it: units, bounds, and the names of both in metrics."""

from __future__ import annotations

import math

from megatron_rc.config import Rejection, RolloutCorrection, Unit, Weight


def weight_unit(weight: Weight) -> Unit:
    """Which tokens share one weight."""
    return "sequence" if weight.level == "geometric" else weight.level


def shared_units(correction: RolloutCorrection) -> set[Unit]:
    """Which units the weight and the gates share values over."""
    units: set[Unit] = {gate.level for gate in correction.reject}
    if correction.weight is not None:
        units.add(weight_unit(correction.weight))
    return units


def weight_bound_names(weight: Weight | None) -> dict[str, str]:
    """ "lower" and "upper", where they are set -> name of the units outside."""
    if weight is None:
        return {}
    names = {
        "truncate": {"upper": "truncated"},
        "clip": {"lower": "clipped_low", "upper": "clipped_high"},
        "mask": {"lower": "outside_low", "upper": "outside_high"},
    }[weight.mode]
    return {side: name for side, name in names.items() if getattr(weight, side) is not None}


def gate_names(gates: tuple[Rejection, ...]) -> list[str]:
    """ "rejected_<gate>" each, numbered where a name repeats."""
    names: list[str] = []
    for name in (f"rejected_{gate.name}" for gate in gates):
        same = sum(other == name or other.startswith(f"{name}#") for other in names)
        names.append(f"{name}#{same + 1}" if same else name)
    return names


def gate_bounds(gate: Rejection) -> tuple[float | None, float | None]:
    """Lower and upper, as logs for a ratio."""
    if gate.statistic != "ratio":
        return gate.lower, gate.upper
    return log_bound(gate.lower), log_bound(gate.upper)


def log_bound(bound: float | None) -> float | None:
    return None if bound is None else math.log(bound)
