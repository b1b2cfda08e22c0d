"""Sums over tokens, first per sequence and then per value of a column: exact, additive, and small."""

import math
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rc.analyze.chunk import Chunk, Floats

ZERO_BELOW = -0.7
"""nats; a sampler that logs exactly 0 where the trainer gives less than this (p < 0.5) logged no probability: if
top-p keeps a single id, that id is more probable."""
IMPOSSIBLE_BELOW = -30.0
"""nats; a sampler with V ids draws one of those below this with a probability of at most V e^-30: 1e-7 for V = 1e6."""

_SUMMED = ("tokens", "sequences", "log_ratio", "k1_squared", "k3", "excess", "excess_squared", "surprise",
           "surprise_squared", "ratio_with_entropy", "uncertainty", "exact_zeros", "impossible_zeros",
           "impossible_zeros_k3", "impossible_draws", "exact")  # fmt: skip
_LARGEST = ("excess_squared_max", "surprise_squared_max", "k1_squared_max")
FIELDS = _SUMMED + _LARGEST
_INDEX = {name: index for index, name in enumerate(FIELDS)}


def token_values(chunk: Chunk) -> dict[str, Floats]:
    """[N] fp64 terms of the sums.

    With l = log pi - log mu and rho = e^l: excess rho - 1, uncertainty (1 - pi)^2, exact_zeros log mu = 0, exact l = 0,
    and surprise rho (-log pi - H). H is the entropy of pi, or 0 without that column.
    """
    ratio, log_ratio, k3 = chunk.ratio, chunk.log_ratio, chunk.k3
    excess, squared = np.expm1(log_ratio), log_ratio * log_ratio
    zeros = chunk.log_mu == 0
    impossible = (zeros & (chunk.log_pi < ZERO_BELOW)).astype(np.float64)
    values = {
        "log_ratio": log_ratio,
        "k1_squared": squared,
        "k3": k3,
        "excess": excess,
        "excess_squared": excess * excess,
        "uncertainty": np.square(1 - np.exp(np.minimum(chunk.log_pi, 0))),
        "exact_zeros": zeros.astype(np.float64),
        "impossible_zeros": impossible,
        "impossible_zeros_k3": impossible * k3,
        "impossible_draws": (chunk.log_mu < IMPOSSIBLE_BELOW).astype(np.float64),
        "exact": (log_ratio == 0).astype(np.float64),
    }
    if "entropy" in chunk.tokens:
        # a token that the trainer cannot draw has ratio 0 and -log pi = inf: its term is 0
        surprise = ratio * (np.minimum(-chunk.log_pi, 1e3) - chunk.tokens["entropy"])
        values |= {"surprise": surprise, "surprise_squared": surprise * surprise, "ratio_with_entropy": ratio}
    return values


def sequence_sums(chunk: Chunk) -> Floats:
    """[S, len(FIELDS)] sums and maxima of each sequence."""
    result = np.zeros((chunk.num_sequences, len(FIELDS)))
    result[:, FIELDS.index("tokens")] = chunk.lengths
    result[:, FIELDS.index("sequences")] = chunk.lengths > 0
    # reduceat gives an empty sequence the first value of the next one, so empty ones are left out
    filled = np.flatnonzero(chunk.lengths)
    if not filled.size:
        return result
    starts = chunk.cu_seqlens[filled]
    values = token_values(chunk)
    for name, terms in values.items():
        result[filled, FIELDS.index(name)] = np.add.reduceat(terms, starts)
    for name in _LARGEST:
        if (squares := values.get(name.removesuffix("_max"))) is not None:
            result[filled, FIELDS.index(name)] = np.maximum.reduceat(squares, starts)
    return result


class WeightSums:
    """Sums of weights and of their squares, in a unit that cannot overflow."""

    def __init__(self) -> None:
        self._unit = -math.inf
        self._sums = np.zeros(2)

    def add(self, log_weights: Floats) -> None:
        """Add e^w and e^(2 w) of at least one weight."""
        unit = max(self._unit, float(log_weights.max()))
        weights, scale = np.exp(log_weights - unit), math.exp(self._unit - unit)
        self._sums = self._sums * [scale, scale**2] + [weights.sum(), weights @ weights]
        self._unit = unit

    def ess(self, count: float) -> float:
        """Effective share of ``count`` weights: (sum W)^2 / (count sum W^2)."""
        return float(self._sums[0] ** 2 / (self._sums[1] * count))


class Sums:
    """The sums of one set of tokens, by name."""

    def __init__(self, row: Floats) -> None:
        self.row = row

    def __getattr__(self, name: str) -> float:
        if name not in _INDEX:
            raise AttributeError(name)
        return float(self.row[_INDEX[name]])

    def mean(self, name: str) -> float:
        """Mean over the tokens; NaN without any."""
        return getattr(self, name) / self.tokens if self.tokens else math.nan


class KeyedSums:
    """Sums by the value of a column."""

    def __init__(self) -> None:
        self._rows: dict[Hashable, Floats] = {}

    def add(self, keys: NDArray[Any], sums: Floats) -> None:
        """Add the sums [S, len(FIELDS)] of sequences to those of their keys [S]."""
        names, inverse = np.unique(keys, return_inverse=True)
        summed, largest = np.zeros((2, names.size, len(FIELDS)))
        np.add.at(summed, inverse, sums)
        np.maximum.at(largest, inverse, sums)
        for name, row, top in zip(names.tolist(), summed, largest, strict=True):
            row[len(_SUMMED) :] = top[len(_SUMMED) :]
            self._rows[name] = merged(self._rows[name], row) if name in self._rows else row

    def items(self, most: float = math.inf) -> Iterator[tuple[Any, Sums]]:
        """Sums by value of the column, in the order of the values; none where there are more than ``most``."""
        for name in sorted(self._rows if len(self._rows) <= most else (), key=lambda value: (str(type(value)), value)):
            yield name, Sums(self._rows[name])


def total(rows: Floats) -> Floats:
    """The sums of several sets of tokens [R, len(FIELDS)] together."""
    return np.concatenate([rows[:, : len(_SUMMED)].sum(axis=0), rows[:, len(_SUMMED) :].max(axis=0, initial=0.0)])


def merged(one: Floats, other: Floats) -> Floats:
    """The sums of two sets of tokens together."""
    return total(np.stack([one, other]))
