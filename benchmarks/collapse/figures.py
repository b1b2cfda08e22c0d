"""The figures of docs/collapse.md, each with the arms that it shows."""

from typing import Any

from collapse.claims import FIXED, HIGH, LAG, LOW, NEW, NONE, TOP_P
from collapse.figure_data import FigureSettings

Arms = dict[str, dict[str, Any]]
LAG_16, OLD = LAG | {"strength": "16"}, "16 updates old, "
TURN_TIS = "{weight: {level: segment, mode: truncate, upper: 2.0}}"
NAMES = {
    "none": "no correction",
    "none, old: rollout": "no correction, old: rollout",
    "none with R3": "no correction, routes replayed (R3)",
    TURN_TIS: "turn-tis",
}
"""Methods that figures call otherwise than the rows do."""
CONTROLS = {"shuffled-weights": "weights shuffled", "mean-weight": "mean weight", "random-mask": "random mask"}


def methods(gap: dict[str, Any], *names: str, label: str = "") -> Arms:
    """Maps the label of each method to its runs at a gap."""
    return {f"{label}{NAMES.get(name, name)}": gap | {"method": name} for name in names}


def controls(gap: dict[str, Any], method: str, *names: str) -> Arms:
    return {f"{method}, {CONTROLS[name]}": gap | {"method": method, "control": name} for name in names}


def exact(*names: str) -> Arms:
    """The exact sampler with each of these methods."""
    return {f"exact sampler, {name.removeprefix('none, ')}": {"mechanism": "exact", "method": name} for name in names}


def shuffled(method: str) -> Arms:
    """The controls of a method at the large lag: its weights shuffled, and their mean on every token."""
    return controls(LAG_16, method, "shuffled-weights", "mean-weight")


def masks(*names: str) -> Arms:
    """Each method at the large lag, followed by a random mask of its own rate of rejection."""
    pairs = (methods(LAG_16, name, label=OLD) | controls(LAG_16, name, "random-mask") for name in names)
    return {label: arm for pair in pairs for label, arm in pair.items()}


EXACT = {"exact sampler": {"mechanism": "exact"} | NONE}
STANDARD = ("none", "none, old: rollout", "token-tis", "seq-tis", "standardized")

FIGURES = (
    FigureSettings("arms", "curves",
        "Held-out accuracy: the exact sampler, and rollouts 16 updates old (off-policy lag)",
        arms=EXACT | methods(LAG_16, *STANDARD[:2], "none with R3", "token-tis", TURN_TIS, "seq-tis", "standardized")
        | exact("seq-tis") | shuffled("seq-tis")),
    FigureSettings("noise", "curves", "Held-out accuracy: an exact sampler, and one with fixed noise",
        arms=EXACT | methods(FIXED | {"strength": "0.2"}, *STANDARD[:4]) | exact("none, old: rollout")),
    FigureSettings("strength", "strength", "Uncorrected runs that failed, by mechanism and measured k3",
        arms=EXACT | {gap["mechanism"]: gap | NONE for gap in (LAG, FIXED, NEW, TOP_P, LOW, HIGH)}),
    FigureSettings("strength-corrected", "strength", "Runs with lag that failed, by correction and measured k3",
        arms=EXACT | exact("seq-tis") | controls(LAG, "seq-tis", "shuffled-weights") | methods(LAG, *STANDARD)),
    *(
        FigureSettings(f"{name}-corrected", "strength",
            f"Runs with {name} noise that failed, by correction and measured k3",
            arms=EXACT | exact("seq-tis", "none, old: rollout") | methods(gap, *STANDARD))
        for name, gap in (("fixed", FIXED), ("new", NEW))
    ),
    FigureSettings("survival", "survival", "Time to collapse with rollouts 16 updates old",
        arms=methods(LAG_16, "none") | {"no correction, lr 1e-4": LAG_16 | NONE | {"lr": 1e-4}}
        | {f"no correction, decay period {n}": LAG_16 | NONE | {"lr_rule": f"decay period {n}"} for n in (30, 60)}
        | methods(LAG_16, "token-tis", "seq-tis") | EXACT | exact("seq-tis") | shuffled("seq-tis")),
    FigureSettings("diagram", "diagram", "Runs that failed, by T / T* and learning rate", columns=4,
        arms=EXACT | methods({}, "none", "token-tis", "seq-tis")),
    FigureSettings("controls", "controls", "Final accuracy of corrections and of their controls",
        arms=EXACT | exact("token-tis", "seq-tis", "seq-mis", "geo-mask")
        | methods(LAG_16, "none", "token-tis", label=OLD) | shuffled("token-tis")
        | methods(LAG_16, "seq-tis", label=OLD) | shuffled("seq-tis")
        | masks("token-mis", "seq-mis", "geo-mask")),
    FigureSettings("order", "order", "Which signal moves first in uncorrected runs that fell",
        arms=methods({}, "none")),
)  # fmt: skip
