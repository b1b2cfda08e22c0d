"""Which rows the benchmark has, at which sizes."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """The logits of one tensor-parallel rank."""

    tokens: int
    vocabulary: int
    tp: int

    @property
    def columns(self) -> int:
        return self.vocabulary // self.tp


class Plan(NamedTuple):
    tokens: tuple[int, ...]
    vocabulary: int
    tp: tuple[int, ...]
    correct: tuple[int, ...]
    """Tokens of every correction."""
    policy_loss: int
    """Tokens."""
    routes: tuple[int, int, int]
    """Tokens, layers, k."""
    kept: int
    """Most kept ids a token."""

    @property
    def shapes(self) -> list[Shape]:
        return [Shape(tokens, self.vocabulary, tp) for tp in self.tp for tokens in self.tokens]

    @property
    def paths(self) -> Shape:
        """The logits of the kept ids and of the update path."""
        return self.shapes[0]

    @property
    def names(self) -> list[str]:
        """Of the rows that are not about log-probs alone."""
        tokens, layers, k = self.routes
        logits = f"{self.paths.tokens:,} x {self.paths.columns:,}"
        return [
            *(f"correct, {n:,} tokens" for n in self.correct),
            f"policy_loss, {self.policy_loss:,} tokens",
            f"compare_routes, {tokens:,} x {layers} x {k}",
            f"kept ids, {logits}, up to {self.kept} a token",
            f"update path, {logits}",
        ]


FULL = Plan(
    tokens=(8192, 16_384, 65_536),
    vocabulary=151_936,
    tp=(1, 2, 8),
    correct=(65_536, 2**20),
    policy_loss=65_536,
    routes=(65_536, 48, 8),
    kept=128,
)
TOY = Plan(tokens=(8,), vocabulary=1024, tp=(1, 2, 8), correct=(4096,), policy_loss=4096, routes=(192, 5, 4), kept=6)
"""For a CPU and Triton's interpreter."""
