"""How the log-ratio of a sequence grows with its length, and how long it may be before its weight is useless."""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from megatron_rc.analyze.chunk import Chunk, Floats
from megatron_rc.analyze.statistics.sums import WeightSums
from megatron_rc.correction.warnings import horizon

LENGTHS = 2 ** np.arange(31)
"""Lengths at which the running sum of log-ratios is recorded."""


@dataclass(frozen=True)
class Growth:
    deviations: Floats
    """Standard deviation of S_t, the sum of the first t log-ratios, at each length t that 20 sequences reached."""
    exponent: float
    """h of sd(S_t) ~ t^h: 0.5 for noise, 1 for a systematic offset, above 1 for a drift with the position, 0 for a
    transient at the start; NaN with fewer than three lengths. Independent noise has another one where later tokens are
    noisier or surer than the first."""
    coherence: float
    """Var(S_t) / mean(sum_{i <= t} l_i^2) at the largest t: 1 for independent tokens, however noisy each is, and more
    where they go the same way along a response; NaN without such a t."""
    ess: float
    """Effective number of sequences as a share: (sum W)^2 / (S sum W^2) with W = e^(S_T)."""
    ess_predicted: float
    """The share to expect of these lengths and this k3 if all tokens are alike: S / sum exp(2 T_i K)."""
    horizon: float
    """T* = 1 / (2 K): tokens after which a sequence weight has a variance of e - 1; infinite without mismatch."""

    @property
    def reach(self) -> str:
        """The horizon in words."""
        return self.words(self.horizon)

    @staticmethod
    def words(horizon: float) -> str:
        """A number of tokens in words."""
        if math.isinf(horizon):
            return "no limit"
        if horizon < 1:
            return "less than 1 token"
        return "1 token" if round(horizon) == 1 else f"{horizon:,.0f} tokens"


class GrowthSums:
    """Moments of the running sum at each length, and of the weights of whole sequences."""

    def __init__(self) -> None:
        self._moments = np.zeros((LENGTHS.size, 4))
        self._weights = WeightSums()
        self._lengths = Counter[int]()
        self._k3 = 0.0

    def add(self, chunk: Chunk) -> Floats:
        """Add the loss tokens of a chunk; returns [S'] log-ratios of its sequences that are not empty."""
        running = np.concatenate([[0.0], np.cumsum(chunk.log_ratio)])
        apart = np.concatenate([[0.0], np.cumsum(np.square(chunk.log_ratio))])
        start, lengths = chunk.cu_seqlens[:-1], chunk.lengths
        for index, length in enumerate(LENGTHS):
            long = lengths >= length
            if not long.any():
                break
            sums = running[start[long] + length] - running[start[long]]
            alone = apart[start[long] + length] - apart[start[long]]
            self._moments[index] += [sums.size, sums.sum(), sums @ sums, alone.sum()]
        filled = lengths > 0
        whole = running[chunk.cu_seqlens[1:]][filled] - running[start][filled]
        if whole.size:
            self._weights.add(whole)
            self._lengths.update(lengths[filled].tolist())
            self._k3 += float(chunk.k3.sum())
        return whole

    def growth(self) -> Growth:
        count, total, squares, alone = self._moments.T
        enough = count >= 20
        lengths = LENGTHS[enough].astype(np.float64)
        deviations = np.sqrt(np.maximum(squares[enough] / count[enough] - (total[enough] / count[enough]) ** 2, 0))
        usable = deviations > 0
        exponent = math.nan
        if usable.sum() >= 3:
            across, up = np.log(lengths[usable]), np.log(deviations[usable])
            exponent = float(np.polyfit(across, up, 1, w=np.sqrt(count[enough][usable]))[0])
        largest = np.flatnonzero(enough & (alone > 0))[-1:]
        coherence = deviations[largest] ** 2 / (alone[largest] / count[largest])
        sequences, tokens = self._lengths.total(), sum(t * c for t, c in self._lengths.items())
        mean, predicted = self._k3 / tokens if tokens else 0.0, math.nan
        if tokens:
            counts, growths = np.array([[c, 2 * t * mean] for t, c in self._lengths.items()]).T
            predicted = sequences / float((counts * np.exp(np.minimum(growths, 700))).sum())
        return Growth(
            deviations=deviations,
            exponent=exponent,
            coherence=float(coherence[0]) if coherence.size else math.nan,
            ess=self._weights.ess(sequences) if sequences else math.nan,
            ess_predicted=predicted,
            horizon=horizon(mean),
        )
