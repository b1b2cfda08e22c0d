"""A uniform sample of whole sequences of a stream, for what cannot be computed as a sum."""

import numpy as np

from megatron_rc.analyze.chunk import Chunk, join

MAX_TOKENS = 1_000_000
"""Most tokens that are kept, so that memory does not grow with the dump."""
SEED = 1
"""Any one: the same dump must give the same sample."""


class Reservoir:
    """Keeps the sequences with the smallest random keys, as many as fit into ``max_tokens``.

    Every sequence has the same chance, whatever its length and place, and the same stream gives the same sample.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS, seed: int = SEED) -> None:
        self._max_tokens = max_tokens
        self._random = np.random.default_rng(seed)
        self._kept: list[Chunk] = []
        self._keys: list[np.ndarray] = []
        self._limit = 1.0

    def add(self, chunk: Chunk) -> None:
        keys = self._random.random(chunk.num_sequences)
        keep = keys < self._limit
        if keep.any():
            self._kept.append(chunk.select_sequences(keep))
            self._keys.append(keys[keep])
        if sum(c.log_pi.size for c in self._kept) > 2 * self._max_tokens:
            self._shrink()

    def sample(self) -> Chunk:
        """The kept sequences, in the order in which they came."""
        self._shrink()
        return self._kept[0]

    def _shrink(self) -> None:
        chunk, keys = join(self._kept), np.concatenate(self._keys)
        order = np.argsort(keys)
        fits = np.cumsum(chunk.lengths[order]) <= self._max_tokens
        fits[:1] = True
        keep = np.zeros(chunk.num_sequences, dtype=bool)
        keep[order[: int(fits.sum())]] = True
        if not keep.all():
            self._limit = float(keys[~keep].min())
        self._kept, self._keys = [chunk.select_sequences(keep)], [keys[keep]]
