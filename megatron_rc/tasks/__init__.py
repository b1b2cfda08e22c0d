"""Tasks: what the policy is asked, and how its answers are scored."""

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
    """A source of prompts with verifiable rewards. Everything that it returns is a pure function of seed and index."""

    vocab_size: int
    stop_token_ids: tuple[int, ...]

    def prompts(self, start: int, count: int) -> list[Prompt]:
        """Training prompts start to start + count - 1 of an endless stream; ``start`` is the data cursor."""
        ...

    def eval_prompts(self) -> list[Prompt]:
        """The held-out prompts; none of them occurs in the training stream."""
        ...

    def demonstrations(self, start: int, count: int) -> list[tuple[list[int], list[int]]]:
        """(prompt ids, response ids) for the supervised warm-up; raises ValueError if the task has none."""
        ...

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]]) -> list[float]:
        """One finite number per response; responses[i] answers prompts[i]."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids."""
        ...
