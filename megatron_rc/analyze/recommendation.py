"""Which correction suits the gap of a dump, and how sure that is; needs no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rc import schema
from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.lab_range import FAILED_K3, LAB, LabRange
from megatron_rc.analyze.rules.rule import Level, Verdict
from megatron_rc.analyze.statistics.bound import Bound, sequence_ratio, sequence_terms, token_terms
from megatron_rc.analyze.statistics.tail import LIMIT
from megatron_rc.correction.settings import PRESETS, RolloutCorrection, Weight
from megatron_rc.files import replace_text

NEGLIGIBLE = 0.1
"""Largest total variation between the responses of both policies that needs no correction. It changes the mean of a
reward in [0, 1] by at most this much, and 100 responses measure that mean no more precisely (two standard errors)."""
USEFUL = 0.5
"""nats; KL(mu || pi) of a whole response below which sequence weights are useful: the mean length is below
T* = 1 / (2 K), and the effective sample size above 1 / e."""
RESAMPLINGS = 200
"""Resamplings of the responses behind the intervals and the agreement."""
SEED = 1
"""Any one: the same dump must give the same intervals."""
INTERVAL = (2.5, 97.5)
"""Percentiles of the resamplings that an interval spans."""


@dataclass(frozen=True)
class Recommendation:
    """The correction that suits a dump.

    The gap is measured on whole responses, whose weight is W = exp(sum l): by the total variation, mean (1 - W)_+, and
    by KL(mu || pi), mean sum k3. While the first is negligible, and no run with this k3 failed without a correction,
    nothing needs to be corrected. Otherwise the sequence weight, which alone leaves no bias, is taken where its
    variance is small (KL < 1/2) and its tail can be trusted (k-hat <= 0.7), and the weight of each token elsewhere.
    C is the bound with the least measured error.
    """

    method: str
    """none, token-tis or seq-tis, followed by "(C = 3)" if C is not the preset's; empty while a bug comes first."""
    correction: RolloutCorrection | None
    """None while a bug comes first."""
    first: tuple[str, ...]
    """Rules that answered BUG: these bugs must be fixed before any correction."""
    untested: tuple[str, ...]
    """In what respects the dump is outside the ranges of the collapse lab's runs with a correction; empty inside."""
    suspects: tuple[str, ...]
    """Rules that answered suspect or undecided."""
    trusted: bool
    """Whether the tail of the weights of sequences can be trusted; never with fewer than 25 sequences."""
    k3: float
    """Mean k3 per token, nats."""
    kl: float
    """Mean KL(mu || pi) of a response, nats."""
    variation: float
    """Total variation between the responses of both policies."""
    variation_interval: tuple[float, float]
    """Range of the middle 95 % of the resamplings."""
    upper_interval: tuple[float, float] | None
    """The same for C; None without a weight."""
    agreement: float
    """Share of the resamplings that lead to the same level: no weight, sequence or token."""
    bounds: dict[str, Bound]
    """MSE(C) by level: token and sequence."""

    @property
    def headline(self) -> str:
        """What to do, in one line."""
        if self.first:
            return f"A correction would hide a bug: fix {' and '.join(self.first)} first."
        once = f" once {' and '.join(self.suspects)} is decided" if self.suspects else ""
        what = f"No correction is needed{once}" if self.method == "none" else f"Recommended{once}: {self.method}"
        what += ", beyond what our lab tested" if self.untested else ""
        return f"{what} ({round(self.agreement * RESAMPLINGS)} of {RESAMPLINGS} bootstrap samples agree)."

    @property
    def reason(self) -> str:
        """What the headline rests on; empty while a bug comes first."""
        if self.first:
            return ""
        if self.upper_interval is None:
            low, high = self.variation_interval
            return (
                f"The two policies put {self.variation:.1%} of their probability on different responses ({low:.1%} to "
                f"{high:.1%}), less than a step of 100 responses measures.{self._caveat}"
            )
        if self.kl >= USEFUL:
            size = "too much for weights of whole responses"
        elif not self.trusted:
            size = "but the tail of the weights of whole responses cannot be trusted"
        else:
            size = "little enough for weights of whole responses"
        low, high = self.upper_interval
        bound = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
        return (
            f"The two policies differ by {self.kl:.2g} nats per response, {size}; C is {bound} in 95 % of the "
            f"resamplings.{self._caveat}"
        )

    @property
    def _caveat(self) -> str:
        if not self.untested:
            return ""
        outside = "; ".join(self.untested)
        advice = ""
        if self.k3 >= FAILED_K3:
            advice = f" Runs without a correction failed from a k3 of {FAILED_K3:g} on, so do not start without one."
        elif self.upper_interval is not None:
            advice = f" Try none first, then {self.method}."
        return f" Beyond what the collapse lab tested: {outside}.{advice}"

    def to_dict(self) -> dict[str, Any]:
        """The recommendation in numbers, as plain values."""
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "trusted"}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in kept.items()}
        plain["correction"] = None if self.correction is None else self.correction.to_dict()
        plain["bounds"] = {name: bound.to_dict() for name, bound in self.bounds.items()}
        return {"method": self.method, "sentence": f"{self.headline} {self.reason}".strip(), **plain}

    def write(self, path: Path) -> None:
        """Write the YAML that `megatron-rc train` and the patches accept; ValueError where a bug comes first."""
        if self.correction is None:
            codes = " and ".join(self.first)
            raise ValueError(f"{path} is not written: a correction would hide a bug, fix {codes} first")
        if not path.parent.is_dir():
            raise ValueError(f"{path} cannot be written: no such folder: {str(path.parent)!r}")
        replace_text(path, schema.dump_yaml({"correction": self.correction.to_dict()}))


def recommend(evidence: Evidence, verdicts: Sequence[Verdict], lab: LabRange = LAB) -> Recommendation:
    """The correction that suits a dump; the same dump always gives the same one."""
    chunk, steps = evidence.sample, max(1, len(evidence.parts["step"]))
    terms = {
        "token": token_terms(chunk, evidence.whole.tokens / steps),
        "sequence": sequence_terms(chunk, evidence.sequences / steps),
    }
    divergence = np.bincount(chunk.sequence_of, weights=chunk.k3, minlength=chunk.num_sequences)
    variation = np.maximum(1 - sequence_ratio(chunk), 0)
    trusted, untested = evidence.sequence_tail.k <= LIMIT, lab.missed(evidence)
    k3 = evidence.whole.k3
    level = _level(float(variation.mean()), float(divergence.mean()), k3, trusted)
    bounds = {name: part.bound(np.ones(chunk.num_sequences)) for name, part in terms.items()}

    random = np.random.default_rng(SEED)
    levels, variations, uppers = [], [], []
    for _ in range(RESAMPLINGS):
        drawn = random.integers(chunk.num_sequences, size=chunk.num_sequences)
        variations.append(float(variation[drawn].mean()))
        levels.append(_level(variations[-1], float(divergence[drawn].mean()), k3, trusted))
        if level in terms:
            times = np.bincount(drawn, minlength=chunk.num_sequences).astype(np.float64)
            uppers.append(terms[level].bound(times).upper)

    method, correction = _method(level, bounds)
    first = tuple(verdict.code for verdict in verdicts if verdict.level is Level.BUG)
    return Recommendation(
        method="" if first else method,
        correction=None if first else correction,
        first=first,
        suspects=tuple(verdict.code for verdict in verdicts if verdict.level in (Level.SUSPECT, Level.UNDECIDED)),
        untested=untested,
        trusted=trusted,
        k3=k3,
        kl=float(divergence.mean()),
        variation=float(variation.mean()),
        variation_interval=_interval(variations),
        upper_interval=_interval(uppers) if uppers else None,
        agreement=levels.count(level) / RESAMPLINGS,
        bounds=bounds,
    )


def _level(variation: float, kl: float, k3: float, trusted: bool) -> str:
    if variation <= NEGLIGIBLE and k3 < FAILED_K3:
        return "none"
    return "sequence" if trusted and kl < USEFUL else "token"


def _method(level: str, bounds: dict[str, Bound]) -> tuple[str, RolloutCorrection]:
    if level == "none":
        return "none", RolloutCorrection()
    upper = bounds[level].upper
    preset = {"token": "token-tis", "sequence": "seq-tis"}[level]
    weight = PRESETS[preset].correction.weight
    assert weight is not None, "both presets have a weight"
    correction = RolloutCorrection(Weight(weight.level, weight.mode, upper=upper))
    return preset if upper == weight.upper else f"{preset} (C = {upper:.3g})", correction


def _interval(values: Sequence[float]) -> tuple[float, float]:
    low, high = np.percentile(values, INTERVAL, method="nearest")
    return float(low), float(high)
