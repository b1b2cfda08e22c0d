"""Two dumps compared: before and after an upgrade, on two cards, from two engines. What got worse, and is it chance?

A mean per token is the ratio of two sums over responses, sum_i x_i / sum_i n_i, whose standard error follows from the
residuals x_i - mean n_i, because the responses are independent and their tokens are not:

    z = (mean_B - mean_A) / sqrt(e_A^2 + e_B^2),    e^2 = sum_i (x_i - mean n_i)^2 / (sum_i n_i)^2

Source: Cochran (1977), Sampling Techniques, chapter 6 (ratio estimators).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_rc.analyze.chunk import Chunk, Floats, join
from megatron_rc.analyze.diagnosis import Diagnosis
from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rule import DOUBTS, Verdict
from megatron_rc.analyze.statistics.noise import Noise
from megatron_rc.analyze.statistics.significance import Test, holm, normal_p

SCHEMA_VERSION = 1
"""Rises when a key of the JSON changes its meaning or is removed."""
LEVEL = 0.01
"""Corrected p below which a number has changed."""
WORSE = 1.2
"""Least factor by which k3, or the noise at equal confidence, must have grown to count as worse."""
NOISE = "noise at equal confidence"
"""Mean |l| over its mean in both dumps at like probability: it does not follow how sure the model is."""


@dataclass(frozen=True)
class Line:
    """One number of both dumps."""

    name: str
    before: float
    after: float
    p: float | None = None
    """Corrected for the number of tests; None where nothing is tested."""

    @property
    def worse(self) -> bool:
        grown = self.after > WORSE * self.before
        return self.name in ("k3", NOISE) and grown and self.p is not None and self.p < LEVEL


@dataclass(frozen=True)
class Comparison:
    """Numbers side by side, and the findings that only one of the dumps has."""

    lines: Sequence[Line]
    appeared: Sequence[Verdict]
    went: Sequence[Verdict]

    @property
    def worse(self) -> bool:
        """A bug or suspect that appeared, or a gap that grew."""
        return bool(self.appeared) or any(line.worse for line in self.lines)

    @property
    def headline(self) -> str:
        if self.appeared:
            return f"WORSE: {', '.join(dict.fromkeys(verdict.code for verdict in self.appeared))} appeared"
        grown = [line.name for line in self.lines if line.worse]
        if grown:
            return f"WORSE: {' and '.join(grown)} grew"
        return "NOT WORSE: no finding appeared, and the gap did not grow"

    def to_dict(self, *, share: bool = False) -> dict[str, Any]:
        """The comparison as plain values; ``share`` leaves out sentences, which may name servers and ids."""
        appeared, went = (
            [{"code": v.code, "level": v.level, "sentence": "" if share else v.sentence} for v in found]
            for found in (self.appeared, self.went)
        )
        head = {"schema_version": SCHEMA_VERSION, "headline": self.headline, "worse": self.worse}
        return {**head, "numbers": [asdict(line) for line in self.lines], "appeared": appeared, "went": went}

    def show(self, console: Console, *, share: bool = False) -> None:
        console.print(f"[bold {'red' if self.worse else 'green'}]{escape(self.headline)}[/]")
        for title, verdicts in (("Appeared", self.appeared), ("Went", self.went)):
            for verdict in verdicts:
                said = "" if share else f": {verdict.sentence}"
                console.print(f"{title}: [bold]{verdict.code}[/] ({verdict.level}){escape(said)}", soft_wrap=True)
        shown = Table("", "before", "after", "factor", "p", box=None, padding=(0, 2, 0, 0))
        for line in self.lines:
            factor = f"{line.after / line.before:.2f}" if line.before > 0 and line.after > 0 else ""
            cells = f"{line.before:.4g}", f"{line.after:.4g}", factor, "" if line.p is None else f"{line.p:.2g}"
            shown.add_row(line.name, *cells, style="red" if line.worse else "")
        console.print(shown)


def compare(before: Diagnosis, after: Diagnosis) -> Comparison:
    """What changed from one dump to another; numbers that are tested come from the samples of both."""
    sides = [found.evidence for found in (before, after)]
    samples = [evidence.sample for evidence in sides]
    tested: dict[str, list[Floats]] = {
        "k3": [sample.k3 for sample in samples],
        NOISE: _noise(samples),
        "mean ratio": [sample.ratio for sample in samples],
    }
    if all("entropy" in sample.tokens for sample in samples):
        entropies = [sample.tokens["entropy"] for sample in samples]
        tested["surprise"] = [s.ratio * (-s.log_pi - h) for s, h in zip(samples, entropies, strict=True)]
    pairs = {name: _test(name, values, samples) for name, values in tested.items()}
    adjusted = holm([test for _, test in pairs.values()])
    lines = [Line(name, *means, adjusted.get(name)) for name, (means, _) in pairs.items()]
    for name, of in _PLAIN.items():
        lines.append(Line(name, *(float(of(evidence)) for evidence in sides)))
    old, new = ({v.code: v for v in found.verdicts if v.level in DOUBTS} for found in (before, after))
    return Comparison(lines, [new[code] for code in new if code not in old], [old[c] for c in old if c not in new])


_PLAIN: dict[str, Callable[[Evidence], float]] = {
    "tokens": lambda evidence: evidence.whole.tokens,
    "T*": lambda evidence: evidence.growth.horizon,
    "ESS of responses": lambda evidence: evidence.growth.ess,
    "growth": lambda evidence: evidence.growth.exponent,
    "k-hat of tokens": lambda evidence: evidence.token_tail.k,
    "equal bit for bit": lambda evidence: evidence.whole.exact,
}
"""Numbers that are shown and not tested."""


def _noise(samples: Sequence[Chunk]) -> list[Floats]:
    """[N] relative noise of the tokens of each dump, compared within both together; NaN for certain tokens."""
    known = [{name: values for name, values in s.sequences.items() if name == "temperature"} for s in samples]
    plain = [replace(s, tokens={}, sequences=each) for s, each in zip(samples, known, strict=True)]
    return np.split(Noise(join(plain)).relative, [samples[0].log_pi.size])


def _test(name: str, values: Sequence[Floats], samples: Sequence[Chunk]) -> tuple[tuple[float, float], Test]:
    """Means per token of both dumps, and the test that they are equal."""
    means, errors = [], []
    for value, sample in zip(values, samples, strict=True):
        known = np.isfinite(value)
        size = sample.num_sequences
        total = np.bincount(sample.sequence_of[known], value[known], minlength=size)
        count = np.bincount(sample.sequence_of[known], minlength=size)
        mean = float(total.sum() / max(count.sum(), 1))
        means.append(mean)
        errors.append(float(np.square(total - mean * count).sum()) / max(float(count.sum()), 1.0) ** 2)
    error = math.sqrt(sum(errors))
    if not error:
        same = means[0] == means[1]
        return (means[0], means[1]), Test(name, 0.0, None, "equal" if same else "no response differs from another")
    z = (means[1] - means[0]) / error
    return (means[0], means[1]), Test(name, z, normal_p(z))
