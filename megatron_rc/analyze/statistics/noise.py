"""Noise of the logits, told from how sure the model is: |l| next to what |l| usually is at that probability.

A log-ratio is about (1 - p) times the noise of a logit, so k3 and |l| of a place (a server, a turn, the start of a
response) follow how sure the model is there. The relative noise of a token is |l| over the mean |l| of all tokens of
its probability, temperature, lag and task where these are known: it is 1 everywhere if every logit has the same noise.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rc.analyze.chunk import Chunk, Flags, Floats, Integers
from megatron_rc.analyze.statistics.factors import lag

UNSURE = 0.01
"""Least 1 - p of the tokens that count: below it, a log-prob is mostly its own rounding."""
EDGES = np.array([0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98])
"""Edges of the ranges of p, within which tokens are compared."""
FEWEST = 100
"""Unsure tokens that each side of a comparison needs, and that the noise at the typical token needs."""
MOST_PARTS = 20
"""Limit on the values of a column such as task: with more of them, each would have too few tokens to compare."""
NORMAL_MEDIAN = NormalDist().inv_cdf(0.75)
"""Median of |x| of a standard normal law."""


@dataclass(frozen=True)
class Contrast:
    """The relative noise of some tokens, against that of others."""

    ratio: float
    """Its mean in the place over its mean elsewhere."""
    z: float
    """The difference of the means over its standard error, with the responses of a prompt as one unit."""

    def above(self, ratio: float, z: float) -> bool:
        return self.ratio >= ratio and self.z >= z


NO_CONTRAST = Contrast(1.0, 0.0)
"""What a place with too few tokens has."""


class Noise:
    """The noise of the tokens of a sample that are not certain."""

    def __init__(self, chunk: Chunk) -> None:
        self._chunk = chunk
        p = np.exp(np.minimum(chunk.log_pi, 0.0))
        self.unsure: Flags = 1 - p > UNSURE
        """[N] tokens that count."""
        self.eps: Floats = chunk.log_ratio / np.maximum(1 - p, UNSURE) * temperatures(chunk)
        """[N] noise of a logit that gives l, before the division by the temperature where that is known."""
        self.cell: Integers = _compared(chunk, p)
        """[N] tokens of one cell are compared with each other."""

    @cached_property
    def unit(self) -> Integers:
        """[N] index of the prompt, or of the response where groups are unknown: one unit of the standard errors."""
        chunk = self._chunk
        names = [chunk.sequences[name] for name in ("step", "group") if name in chunk.sequences]
        if len(names) < 2:
            return chunk.sequence_of
        return np.unique(np.stack(names), axis=1, return_inverse=True)[1].reshape(-1)[chunk.sequence_of]

    @cached_property
    def relative(self) -> Floats:
        """[N] |l| over the mean |l| of the tokens of its cell; NaN for certain tokens."""
        size, inside = np.abs(self._chunk.log_ratio), self.unsure
        cells = int(self.cell.max(initial=0)) + 1
        count = np.maximum(np.bincount(self.cell[inside], minlength=cells), 1)
        mean = np.bincount(self.cell[inside], size[inside], minlength=cells) / count
        return np.where(inside & (mean[self.cell] > 0), size / np.maximum(mean[self.cell], 1e-300), np.nan)

    @cached_property
    def typical(self) -> float:
        """Median of |eps|, in units of a normal law: the noise at the typical token; NaN with too few unsure tokens."""
        if self.unsure.sum() < FEWEST:
            return math.nan
        return float(np.median(np.abs(self.eps[self.unsure]))) / NORMAL_MEDIAN

    @cached_property
    def spread(self) -> float:
        """Root mean square of eps over the noise at the typical token: 1 for a normal law, more for heavy tails."""
        squares = np.square(self.eps[self.unsure])
        return math.sqrt(float(squares.mean())) / self.typical if self.typical > 0 else math.nan

    def loudest(self, names: NDArray[Any]) -> tuple[Contrast, Flags]:
        """The places whose tokens are noisiest, and their contrast to the others.

        ``names`` [N] is the place of each token. The places are split half way, in log, between the loudest and the
        quietest, so that several bad ones do not hide each other; returned are also their tokens [N].
        """
        places, of = np.unique(names, return_inverse=True)
        known = np.isfinite(self.relative)
        count = np.bincount(of[known], minlength=places.size)
        sums = np.bincount(of[known], self.relative[known], minlength=places.size)
        enough = count >= FEWEST
        if enough.sum() < 2:
            return NO_CONTRAST, np.zeros(of.size, dtype=bool)
        level = np.log(np.maximum(sums / np.maximum(count, 1), 1e-12))
        split = (level[enough].max() + level[enough].min()) / 2
        loud = enough & (level > split)
        return self.contrast(loud[of], ~loud[of]), loud[of]

    def contrast(self, place: Flags, elsewhere: Flags) -> Contrast:
        """The relative noise of the tokens in ``place`` [N] against that of those in ``elsewhere`` [N]."""
        known = np.isfinite(self.relative)
        sides = place & known, elsewhere & known
        if min(int(side.sum()) for side in sides) < FEWEST:
            return NO_CONTRAST
        (here, there), error = self.means(self.relative, *sides)
        return Contrast(here / max(there, 1e-12), (here - there) / error if error else 0.0)

    def means(self, values: Floats, place: Flags, elsewhere: Flags) -> tuple[tuple[float, float], float]:
        """Mean of ``values`` [N] in either place [N], and the standard error of the difference of both."""
        means = float(values[place].mean()), float(values[elsewhere].mean())
        terms = np.zeros(int(self.unit.max()) + 1)
        for side, mean, sign in zip((place, elsewhere), means, (1, -1), strict=True):
            terms += sign * np.bincount(self.unit[side], values[side] - mean, minlength=terms.size) / side.sum()
        return means, math.sqrt(float(terms @ terms))


def temperatures(chunk: Chunk) -> Floats:
    """[N] sampling temperature of each token; 1 where the dump does not say."""
    if "temperature" not in chunk.sequences:
        return np.ones(chunk.log_pi.size)
    known = chunk.per_token("temperature").astype(np.float64)
    found: Floats = np.where(np.isfinite(known) & (known > 0), known, 1.0)
    return found


def _compared(chunk: Chunk, p: Floats) -> Integers:
    cell = np.digitize(p, EDGES)
    known: list[NDArray[Any]] = [temperatures(chunk)]
    if chunk.has("version") and chunk.has("trainer_version"):
        known.append(lag(chunk))
    if chunk.has("task") and len(np.unique(chunk.sequences["task"])) <= MOST_PARTS:
        known.append(chunk.per_token("task"))
    for values in known:
        cell = cell + (int(cell.max(initial=0)) + 1) * np.unique(values, return_inverse=True)[1].reshape(-1)
    return cell
