"""Conditions on a diagnosis, for continuous integration: "k3<1e-3, RC2=none"."""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from megatron_rc.analyze.diagnosis import Diagnosis
from megatron_rc.analyze.rules import RULES
from megatron_rc.analyze.rules.rule import DOUBTS


class Number(NamedTuple):
    meaning: str
    of: Callable[[Diagnosis], float | None]


NUMBERS = {
    "k3": Number("mean k3", lambda d: d.evidence.whole.k3),
    "sigma": Number("noise of a logit that would give this gap", lambda d: d.evidence.whole.sigma),
    "kappa": Number("mean(−l) / mean(l² / 2)", lambda d: d.evidence.whole.kappa),
    "mean_ratio": Number("mean ρ", lambda d: d.evidence.whole.mean_ratio),
    "surprise": Number("mean of ρ (−log π − H), nats; needs the column `entropy`", lambda d: d.evidence.whole.surprise),
    "z_rho": Number("statistic of the mean ratio", lambda d: d.evidence.whole.z_ratio.z),
    "z_W": Number(
        "statistic of the surprise; needs the column `entropy`",
        lambda d: d.evidence.whole.z_surprise.z if d.evidence.whole.z_surprise else None,
    ),
    "exact": Number("share of tokens whose two log-probs are equal bit for bit", lambda d: d.evidence.whole.exact),
    "ess": Number("effective share of the responses", lambda d: d.evidence.growth.ess),
    "k_hat": Number("k-hat of token ratios", lambda d: d.evidence.token_tail.k),
    "k_hat_sequence": Number("k-hat of the weights of whole responses", lambda d: d.evidence.sequence_tail.k),
    "damaged": Number(
        "responses left out because of a log-prob that is NaN, infinite or above 0",
        lambda d: float(sum(d.evidence.damaged.values())),
    ),
    "corrupt": Number("rows that could not be read", lambda d: float(d.corrupt.count)),
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


@dataclass(frozen=True)
class Condition:
    text: str
    name: str
    """A key of NUMBERS, or how the codes of rules begin."""
    sign: str
    value: str

    def check(self, diagnosis: Diagnosis, *, share: bool = False) -> Outcome:
        """Whether it holds; ValueError for a number that these data do not have.

        ``share`` leaves out the sentences of verdicts, which may name servers and ids.
        """
        name, sign, value = self.name, self.sign, self.value
        if name not in NUMBERS:
            wrong = [v for v in diagnosis.verdicts if v.code.startswith(name) and v.level in DOUBTS]
            seen = "; ".join(f"{v.code} ({v.level})" + ("" if share else f": {v.sentence}") for v in wrong)
            return Outcome(self.text, not wrong, seen or f"no rule {name}* found a bug")
        measured = NUMBERS[name].of(diagnosis)
        if measured is None:
            raise ValueError(f"--require: {name} needs the column entropy, which the dump does not have")
        # a number that could not be computed is NaN, and fails every condition
        holds = bool(COMPARISONS[sign](measured, float(value)))
        return Outcome(self.text, holds, f"{name} is {measured:.4g}, wanted {sign}{value}")


def read(require: str) -> list[Condition]:
    """Conditions separated by commas; ValueError for one that cannot be read.

    ``k3<1e-3`` compares a number; ``RC2=none`` forbids bugs, suspects and undecided answers of the rules whose codes
    begin with RC2, ``RC=none`` those of all rules.
    """
    conditions = [part.strip() for part in require.split(",") if part.strip()]
    if not conditions:
        raise ValueError("--require has no condition; an example is 'k3<1e-3, RC2=none'")
    return [_condition(text) for text in conditions]


def _condition(text: str) -> Condition:
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise ValueError(f"--require: {text!r} is no condition; examples are 'k3<1e-3' and 'RC2=none'")
    name, sign, value = match["name"], match["sign"], match["value"]
    if name.startswith("RC"):
        if sign != "=" or value != "none":
            raise ValueError(f"--require: {text!r} must be {name}=none")
        if not any(code.startswith(name) for code in RULES):
            known = ", ".join(sorted(RULES))
            raise ValueError(f"--require: no rule has a code that begins with {name!r}; the rules are {known}")
        return Condition(text, name, sign, value)
    if name not in NUMBERS:
        raise ValueError(f"--require: unknown number {name!r}; known: {', '.join(NUMBERS)}, and codes such as RC2")
    if sign not in COMPARISONS:
        raise ValueError(f"--require: {text!r} must compare with one of {', '.join(COMPARISONS)}")
    try:
        float(value)
    except ValueError:
        raise ValueError(f"--require: {value!r} in {text!r} is not a number") from None
    return Condition(text, name, sign, value)
