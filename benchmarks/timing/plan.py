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


class Condition(NamedTuple):
    """What makes rows of logits other than whole, aligned, all counted and of temperature 1."""

    name: str
    shape: Shape
    temperature: float = 1.0
    masked: float = 0.0
    """Share of the rows that do not count."""


class HeadShape(NamedTuple):
    """Hidden states of one micro-batch, and the shard of the head of one rank."""

    tokens: int
    hidden: int
    vocabulary: int
    tp: int
    masked: float = 0.0
    """Share of the rows that do not count, and are left out."""

    @property
    def columns(self) -> int:
        return self.vocabulary // self.tp

    @property
    def counted(self) -> int:
        """Rows that count."""
        return round(self.tokens * (1 - self.masked))

    @property
    def size(self) -> str:
        masked = f", {100 * self.masked:.0f} % of the rows masked" if self.masked else ""
        return f"{self.tokens:,} x {self.columns:,} of {self.hidden:,} (TP {self.tp}){masked}"

    @property
    def name(self) -> str:
        return f"head, {self.size}"


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
    kept: tuple[int, ...]
    """Most kept ids per token."""
    conditions: tuple[Condition, ...]
    heads: tuple[HeadShape, ...]

    @property
    def shapes(self) -> list[Shape]:
        return [Shape(tokens, self.vocabulary, tp) for tp in self.tp for tokens in self.tokens]

    @property
    def paths(self) -> Shape:
        """The logits of the kept ids and of the update path."""
        return self.shapes[0]

    @property
    def head_names(self) -> list[str]:
        """The names of the rows of the head: its losses, its log-probs without gradient, its peers."""
        return [
            *(shape.name for shape in self.heads),
            *(old_pass_name(shape) for shape in self.heads),
            cross_entropy_name(self.heads[0]),
        ]

    @property
    def names(self) -> list[str]:
        """The names of the rows that are not about log-probs alone."""
        tokens, layers, k = self.routes
        logits = _size(self.paths)
        return [
            *(f"correct, {n:,} tokens" for n in self.correct),
            f"policy_loss, {self.policy_loss:,} tokens",
            f"compare_routes, {tokens:,} x {layers} x {k}",
            *(f"kept ids, {logits}, up to {most} per token" for most in self.kept),
            f"update path, {logits}",
        ]


def logits_name(shape: Shape) -> str:
    return f"logits, {_size(shape)} (TP {shape.tp})"


def old_pass_name(shape: HeadShape) -> str:
    return f"old pass, {shape.size}"


def cross_entropy_name(shape: HeadShape) -> str:
    return f"cross entropy, {shape.size}"


def condition_name(condition: Condition) -> str:
    return f"{condition.name}: {_size(condition.shape)}"


def _size(shape: Shape) -> str:
    return f"{shape.tokens:,} x {shape.columns:,}"


FULL = Plan(
    tokens=(8192, 16_384, 65_536),
    vocabulary=151_936,
    tp=(1, 2, 8),
    correct=(65_536, 2**20),
    policy_loss=65_536,
    routes=(65_536, 48, 8),
    kept=(20, 128),
    conditions=(
        Condition("temperature 0.7", Shape(8192, 151_936, 1), temperature=0.7),
        Condition("40 % of the rows masked", Shape(8192, 151_936, 1), masked=0.4),
        # a multiple of 8 and not of 16: rows that start at 16 bytes, at strides for which Triton does not specialise
        Condition("rows of 16 bytes times an odd number", Shape(65_536, 151_936, 16)),
        Condition("rows at odd addresses", Shape(8192, 50_257, 1)),
        Condition("many short rows", Shape(2**20, 1024, 1)),
    ),
    heads=(
        HeadShape(8192, 4096, 151_936, 1),
        HeadShape(8192, 4096, 151_936, 8),
        HeadShape(8192, 4096, 151_936, 1, masked=0.5),
        HeadShape(32_768, 4096, 151_936, 1),
    ),
)
TOY = Plan(
    tokens=(8,),
    vocabulary=1024,
    tp=(1, 2, 8),
    correct=(4096,),
    policy_loss=4096,
    routes=(192, 5, 4),
    kept=(3, 6),
    conditions=(
        Condition("temperature 0.7", Shape(5, 256, 1), temperature=0.7),
        Condition("40 % of the rows masked", Shape(5, 256, 1), masked=0.4),
        Condition("rows of 16 bytes times an odd number", Shape(5, 264, 1)),
        Condition("rows at odd addresses", Shape(5, 257, 1)),
        Condition("many short rows", Shape(12, 32, 1)),
    ),
    heads=(HeadShape(24, 8, 256, 1), HeadShape(24, 8, 256, 8), HeadShape(24, 8, 256, 1, masked=0.5)),
)
"""For a CPU and Triton's interpreter."""
