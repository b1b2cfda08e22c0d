"""What tasks with generated problems share: one token per character, and a held-out eighth of all problems."""

import hashlib
import itertools
import random
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

from megatron_rc.tasks import Demonstration, Prompt, Task

Problem = TypeVar("Problem")


class Alphabet:
    """One id per character in their order, then the stop token, which is written '.', then padding."""

    def __init__(self, characters: str) -> None:
        self.stop, self.padding = len(characters), len(characters) + 1
        self.size = len(characters) + 2
        self._characters = characters + "."
        self._ids = {character: index for index, character in enumerate(self._characters)}

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, one per character."""
        return [self._ids[character] for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        """The text, with '?' for padding and ids outside the vocabulary."""
        known = self._characters
        return "".join(known[i] if 0 <= i <= self.stop else "?" for i in map(int, ids))


class GeneratedTask(Task, Generic[Problem]):
    """A task that draws its problems at random, and needs no tokenizer.

    A hash of its text decides whether a problem is held out, so the split is the same for every seed.
    """

    alphabet: Alphabet
    options: Any

    def __init__(self, options: Any, tokenizer: str | None = None) -> None:
        """Draw the held-out problems, all different; raises ValueError where the options allow too few."""
        self.options = options
        self.vocab_size, self.longest_prompt = self.alphabet.size, options.longest_prompt
        self.stop_token_ids: tuple[int, ...] = (self.alphabet.stop,)
        self._held_out = self._draw_held_out(options.held_out)

    @abstractmethod
    def draw(self, rng: random.Random) -> Problem:
        """Any problem, held out or not."""

    @abstractmethod
    def text(self, problem: Problem) -> str:
        """The prompt, which no other problem has."""

    @abstractmethod
    def answer(self, problem: Problem) -> str: ...

    @abstractmethod
    def demonstrate(self, problem: Problem, rng: random.Random) -> list[tuple[str, bool]]:
        """The parts of the teacher's response: their text, and whether the teacher wrote it or the environment did."""

    def prompts(self, start: int, count: int) -> list[Prompt]:
        return [self._prompt(self._training_problem("prompt", i)[0]) for i in range(start, start + count)]

    def eval_prompts(self) -> list[Prompt]:
        return [self._prompt(problem) for problem in self._held_out]

    def demonstrations(self, start: int, count: int) -> list[Demonstration]:
        return [self._demonstration(index) for index in range(start, start + count)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text, with '.' for the stop token and '?' for padding and ids outside the vocabulary."""
        return self.alphabet.decode(token_ids)

    def _prompt(self, problem: Problem) -> Prompt:
        text = self.text(problem)
        return Prompt(token_ids=tuple(self.alphabet.encode(text)), text=text, answer=self.answer(problem))

    def _demonstration(self, index: int) -> Demonstration:
        problem, rng = self._training_problem("demonstration", index)
        parts, encode = self.demonstrate(problem, rng), self.alphabet.encode
        mask = [by_teacher for text, by_teacher in parts for _ in text]
        response = encode("".join(text for text, _ in parts))
        return Demonstration(encode(self.text(problem)), response, None if all(mask) else mask)

    def _training_problem(self, stream: str, index: int) -> tuple[Problem, random.Random]:
        rng = random.Random(f"{self.options.seed}/{stream}/{index}")
        return next(problem for problem in self._drawn(rng) if not is_held_out(self.text(problem))), rng

    def _draw_held_out(self, wanted: int) -> list[Problem]:
        problems = dict[str, Problem]()
        # options that allow few problems soon repeat them; 400 draws per problem reach nearly all of them
        for problem in itertools.islice(self._drawn(random.Random(f"{self.options.seed}/held-out")), 400 * wanted + 1):
            if is_held_out(self.text(problem)):
                problems.setdefault(self.text(problem), problem)
            if len(problems) == wanted:
                return list(problems.values())
        raise ValueError(f"held_out={wanted} is more than the {len(problems)} held-out problems of these options")

    def _drawn(self, rng: random.Random) -> Iterator[Problem]:
        while True:
            yield self.draw(rng)


def is_held_out(text: str) -> bool:
    """Whether a problem belongs to the held-out eighth, which depends on its text alone."""
    return hashlib.sha256(text.encode()).digest()[0] % 8 == 0


def check_shared_options(*, demonstration_error_rate: float, held_out: int) -> None:
    """Check the options that every generated task has; raises ValueError that names the field."""
    if not 0 <= demonstration_error_rate <= 1:
        raise ValueError(f"demonstration_error_rate must be in [0, 1], got {demonstration_error_rate!r}")
    if held_out < 1:
        raise ValueError(f"held_out must be >= 1, got {held_out!r}")
