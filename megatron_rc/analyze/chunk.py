"""Whole sequences of a dump as flat arrays: what every reader yields, and what every statistic reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rc.analyze.columns import SEQUENCE_COLUMNS, TOKEN_COLUMNS
from megatron_rc.correction.sums import POSITIVE_FROM

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

LOG_RATIO_BOUND = 50.0
"""nats; log-ratios are clamped to it, so that one impossible token does not make sums overflow."""

TURN_GAP = 3
"""Fewest tokens outside the loss between two turns: shorter gaps are single tokens that a host has masked."""


def k3(log_ratio: Floats) -> Floats:
    """e^l - 1 - l, without cancellation at small l."""
    found: Floats = np.expm1(log_ratio) - log_ratio
    return found


@dataclass(frozen=True)
class Chunk:
    """Whole sequences, packed one after the other."""

    log_pi: Floats
    """[N] nats; the trainer's, before the update."""
    log_mu: Floats
    """[N] nats; the sampler's, as it was logged."""
    cu_seqlens: Integers
    """[S + 1]; where each sequence starts."""
    tokens: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """[N] values by their name in TOKEN_COLUMNS."""
    sequences: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """[S] values by their name in SEQUENCE_COLUMNS."""

    def __post_init__(self) -> None:
        sizes = {"log_mu": (self.log_mu, self.log_pi.size)}
        sizes |= {name: (values, self.log_pi.size) for name, values in self.tokens.items()}
        sizes |= {name: (values, self.cu_seqlens.size - 1) for name, values in self.sequences.items()}
        for name, (values, size) in sizes.items():
            if values.shape != (size,):
                raise ValueError(f"{name} must hold {size} values, one for each that it goes with, got {values.shape}")
        offsets = self.cu_seqlens
        if offsets.ndim != 1 or not offsets.size or offsets[0] != 0 or offsets[-1] != self.log_pi.size:
            raise ValueError(
                f"cu_seqlens must run from 0 to the {self.log_pi.size} tokens, got {offsets[:1]} to {offsets[-1:]}"
            )
        if (np.diff(offsets) < 0).any():
            raise ValueError("cu_seqlens must not fall")
        for names, known in ((self.tokens, TOKEN_COLUMNS), (self.sequences, SEQUENCE_COLUMNS)):
            for name in names:
                if name not in known:
                    raise ValueError(f"unknown column {name!r}; known: {', '.join(known)}")

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.size - 1

    @cached_property
    def lengths(self) -> Integers:
        return np.diff(self.cu_seqlens)

    @cached_property
    def sequence_of(self) -> Integers:
        """[N] index of the sequence that each token belongs to."""
        return np.repeat(np.arange(self.num_sequences), self.lengths)

    @cached_property
    def index(self) -> Integers:
        """[N] index of each token in its sequence, from 0."""
        return np.arange(self.log_pi.size) - np.repeat(self.cu_seqlens[:-1], self.lengths)

    @cached_property
    def log_ratio(self) -> Floats:
        """[N] nats: log pi - log mu, clamped to LOG_RATIO_BOUND."""
        return np.clip(self.log_pi - self.log_mu, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    @cached_property
    def ratio(self) -> Floats:
        """[N] pi / mu."""
        return np.exp(self.log_ratio)

    @cached_property
    def k3(self) -> Floats:
        """[N] k3 of each token."""
        return k3(self.log_ratio)

    def per_token(self, name: str) -> NDArray[Any]:
        """[N] values of a column of tokens or sequences."""
        return self.tokens[name] if name in self.tokens else self.sequences[name][self.sequence_of]

    def begins(self, values: NDArray[Any]) -> Flags:
        """[N] whether a run of equal ``values`` [N] begins at the token; no run crosses the end of a sequence."""
        first: Flags = self.index == 0
        first[1:] |= values[1:] != values[:-1]
        return first

    def has(self, name: str) -> bool:
        return name in self.tokens or name in self.sequences

    def select(self, keep: Flags) -> "Chunk":
        """The tokens with ``keep`` [N]; all sequences stay, some of them perhaps empty."""
        offsets = np.concatenate([[0], np.cumsum(keep)])[self.cu_seqlens]
        tokens = {name: values[keep] for name, values in self.tokens.items()}
        return Chunk(self.log_pi[keep], self.log_mu[keep], offsets, tokens, self.sequences)

    def select_sequences(self, keep: Flags) -> "Chunk":
        """The sequences with ``keep`` [S]."""
        kept = self.select(keep[self.sequence_of])
        offsets = np.concatenate([[0], np.cumsum(self.lengths[keep])])
        sequences = {name: values[keep] for name, values in self.sequences.items()}
        return Chunk(kept.log_pi, kept.log_mu, offsets, kept.tokens, sequences)


def loss_tokens(chunk: Chunk) -> Chunk:
    """The tokens that count in the loss, with the column position instead of loss_mask, and turns from its gaps."""
    columns = {name: values for name, values in chunk.tokens.items() if name != "loss_mask"}
    whole = replace(chunk, tokens={**columns, "position": chunk.index})
    if "loss_mask" not in chunk.tokens:
        return whole
    mask = chunk.tokens["loss_mask"]
    kept = whole.select(mask)
    return kept if "turn" in columns else replace(kept, tokens={**kept.tokens, "turn": turns(kept)})


def turns(kept: Chunk) -> Integers:
    """[N] number of the turn of each loss token, from 0: a turn begins behind TURN_GAP tokens outside the loss."""
    position = kept.tokens["position"]
    begins = np.zeros(position.size, dtype=np.int64)
    begins[1:] = (np.diff(position) > TURN_GAP) & (np.diff(kept.sequence_of) == 0)
    counted = np.cumsum(begins)
    first = counted[kept.cu_seqlens[:-1][kept.lengths > 0]]
    result: Integers = counted - np.repeat(first, kept.lengths[kept.lengths > 0])
    return result


def join(chunks: Sequence[Chunk]) -> Chunk:
    """One chunk with the sequences of all chunks, and the columns that all of them have."""

    return Chunk(
        np.concatenate([c.log_pi for c in chunks]),
        np.concatenate([c.log_mu for c in chunks]),
        np.concatenate([[0], np.cumsum(np.concatenate([c.lengths for c in chunks]))]),
        {name: np.concatenate([c.tokens[name] for c in chunks]) for name in common([c.tokens for c in chunks])},
        {name: np.concatenate([c.sequences[name] for c in chunks]) for name in common([c.sequences for c in chunks])},
    )


def common(columns: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names that all of them have."""
    return [name for name in columns[0] if all(name in other for other in columns)]


def damaged(chunk: Chunk) -> dict[str, Flags]:
    """[N] flags by the kind of damage: values that no log-prob can have.

    A -inf of the trainer is a probability of 0, not damage.
    """
    log_pi, log_mu = chunk.log_pi, chunk.log_mu
    return {
        "nan": np.isnan(log_pi) | np.isnan(log_mu),
        "infinite": np.isposinf(log_pi) | np.isinf(log_mu),
        "positive": (np.isfinite(log_pi) & (log_pi > POSITIVE_FROM)) | (np.isfinite(log_mu) & (log_mu > POSITIVE_FROM)),
    }
