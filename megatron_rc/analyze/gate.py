"""Conditions on a diagnosis, for continuous integration: "k3<1e-3, RC2=none"."""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from megatron_rc.analyze.diagnosis import Diagnosis
from megatron_rc.analyze.rules.rule import DOUBTS

NUMBERS: dict[str, Callable[[Diagnosis], float | None]] = {
    "k3": lambda d: d.evidence.whole.k3,
    "sigma": lambda d: d.evidence.whole.sigma,
    "kappa": lambda d: d.evidence.whole.kappa,
    "mean_ratio": lambda d: d.evidence.whole.mean_ratio,
    "surprise": lambda d: d.evidence.whole.surprise,
    "z_rho": lambda d: d.evidence.whole.z_ratio.z,
    "z_W": lambda d: d.evidence.whole.z_surprise.z if d.evidence.whole.z_surprise else None,
    "exact": lambda d: d.evidence.whole.exact,
    "ess": lambda d: d.evidence.growth.ess,
    "k_hat": lambda d: d.evidence.token_tail.k,
    "k_hat_sequence": lambda d: d.evidence.sequence_tail.k,
    "damaged": lambda d: float(sum(d.evidence.damaged.values())),
    "corrupt": lambda d: float(d.corrupt.count),
}
"""Numbers that a condition may name."""
COMPARISONS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
_CONDITION = re.compile(r"(?P<name>\w+)\s*(?P<sign><=|>=|<|>|=)\s*(?P<value>[^\s]+)")


@dataclass(frozen=True)
class Outcome:
    condition: str
    holds: bool
    sentence: str
    """What was measured."""


def check(diagnosis: Diagnosis, gate: str) -> list[Outcome]:
    """Whether each condition holds; ValueError for one that cannot be read or that these data do not have.

    ``gate``: conditions separated by commas. ``k3<1e-3`` compares a number; ``RC2=none`` forbids bugs, suspects and
    undecided answers of the rules whose codes begin with RC2, ``RC=none`` those of all rules.
    """
    conditions = [part.strip() for part in gate.split(",") if part.strip()]
    if not conditions:
        raise ValueError("--gate has no condition; an example is 'k3<1e-3, RC2=none'")
    return [_outcome(diagnosis, condition) for condition in conditions]


def _outcome(diagnosis: Diagnosis, condition: str) -> Outcome:
    match = _CONDITION.fullmatch(condition)
    if match is None:
        raise ValueError(f"--gate: {condition!r} is no condition; examples are 'k3<1e-3' and 'RC2=none'")
    name, sign, value = match["name"], match["sign"], match["value"]
    if name.startswith("RC"):
        if sign != "=" or value != "none":
            raise ValueError(f"--gate: {condition!r} must be {name}=none")
        wrong = [v for v in diagnosis.verdicts if v.code.startswith(name) and v.level in DOUBTS]
        seen = "; ".join(f"{verdict.code} ({verdict.level}): {verdict.sentence}" for verdict in wrong)
        return Outcome(condition, not wrong, seen or f"no rule {name}* found a bug")
    if name not in NUMBERS:
        raise ValueError(f"--gate: unknown number {name!r}; known: {', '.join(NUMBERS)}, and codes such as RC2")
    if sign not in COMPARISONS:
        raise ValueError(f"--gate: {condition!r} must compare with one of {', '.join(COMPARISONS)}")
    try:
        bound = float(value)
    except ValueError:
        raise ValueError(f"--gate: {value!r} in {condition!r} is not a number") from None
    measured = NUMBERS[name](diagnosis)
    if measured is None:
        raise ValueError(f"--gate: {name} needs the column entropy, which the dump does not have")
    # a number that could not be computed is NaN, and fails every condition
    holds = bool(COMPARISONS[sign](measured, bound))
    return Outcome(condition, holds, f"{name} is {measured:.4g}, wanted {sign}{value}")
