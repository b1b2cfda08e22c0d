"""Tasks: what the policy is asked, who answers it between its turns, and how its responses are scored."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True)
class Prompt:
    token_ids: tuple[int, ...]
    text: str
    answer: str


class Demonstration(NamedTuple):
    """A response that the supervised warm-up teaches."""

    prompt_ids: list[int]
    output_ids: list[int]
    output_mask: list[bool] | None = None
    """False for tokens that the environment wrote, which are not taught; None: the teacher wrote all."""


class Task(Protocol):
    """A source of prompts with verifiable rewards. Everything that it returns is a pure function of seed and index.

    A response has one turn unless ``max_turns`` says otherwise. In a task of several turns the policy writes up to a
    stop token, `reply` writes after it, and the policy goes on from all tokens so far. The environment is this one
    function, so a response has no hidden state: the same tokens always get the same reply.
    """

    vocab_size: int
    stop_token_ids: tuple[int, ...]
    """Each of them ends a turn."""
    longest_prompt: int = 0
    """Most tokens of a prompt. A job whose context has no room for it and a response does not start."""
    max_turns: int = 1
    """Most turns of a response; with 1, `reply` is never asked."""
    max_turn_tokens: int = 0
    """Most tokens that the policy writes in one turn, when there are several; rollout.max_new_tokens limits the whole
    response, replies included."""

    def prompts(self, start: int, count: int) -> list[Prompt]:
        """Training prompts start to start + count - 1 of an endless stream; ``start`` is the data cursor."""

    def eval_prompts(self) -> list[Prompt]:
        """The held-out prompts; none of them occurs in the training stream."""

    def demonstrations(self, start: int, count: int) -> list[Demonstration]:
        """Responses for the supervised warm-up; raises ValueError if the task has none."""

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]]) -> list[float]:
        """One finite number per response; responses[i] answers prompts[i], replies included."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids."""

    def reply(self, prompt: Prompt, response: Sequence[int]) -> Sequence[int]:
        """The tokens that the environment writes after ``response``, which ends in a stop token; none ends it."""
        return ()
