"""Prompts and rewards: what the policy is asked and how an answer is scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Prompt:
    token_ids: tuple[int, ...]
    text: str
    answer: str


class Task(Protocol):
    """A source of prompts with a verifiable reward. Everything is a pure function of (seed, index)."""

    vocab_size: int
    pad_token_id: int
    stop_token_ids: tuple[int, ...]

    def prompts(self, start: int, count: int) -> list[Prompt]:
        """Training prompts number start .. start + count - 1 of an endless stream; ``start`` is the data cursor."""
        ...

    def eval_prompts(self) -> list[Prompt]:
        """The held-out prompts; none of them occurs in the training stream."""
        ...

    def demonstrations(self, start: int, count: int) -> list[tuple[list[int], list[int]]]:
        """(prompt ids, response ids) pairs for the supervised warm-up; raises ValueError when the task has none."""
        ...

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]]) -> list[float]:
        """One finite number a response; prompts[i] belongs to responses[i]."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str: ...
