"""The task copy: hundreds of tokens in which an early error costs all that follows, and which needs no download."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_rc.schema.limits import check_at_least
from megatron_rc.tasks import Prompt
from megatron_rc.tasks.generated import Alphabet, GeneratedTask, check_shared_options

LETTERS = "abcdefghijklmnopqrst"
ALPHABET = Alphabet("0123456789" + LETTERS)
MOST_LINES = 99  # the number of a line has two digits
_NUMBER = 2
"""Digits of a line's number."""
_LINE = re.compile(rf"(\d{{{_NUMBER}}})([a-z]*)")


@dataclass(frozen=True, kw_only=True)
class CopyOptions:
    fewest_lines: int = 64
    """Fewest lines of a response; a line has two digits and its letters, and the stop token follows the last line."""
    most_lines: int = 64
    """Most lines of a response, at most 99; every number of lines between the two is equally likely."""
    letters: int = 6
    """Letters per line."""
    alphabet: int = 20
    """Different letters, 2 to 20."""
    demonstration_error_rate: float = 0.2
    """Share of demonstrated lines with a new wrong letter, which the lines below it copy."""
    held_out: int = 64
    """Number of held-out problems, all different."""
    seed: int = 1
    """Seed of the problems and of the errors in demonstrations; train.seed if not given."""

    def __post_init__(self) -> None:
        check_at_least(1, fewest_lines=self.fewest_lines, letters=self.letters)
        if not self.fewest_lines <= self.most_lines <= MOST_LINES:
            got = f"fewest_lines={self.fewest_lines!r} most_lines={self.most_lines!r}"
            raise ValueError(f"most_lines must be in [fewest_lines, {MOST_LINES}], got {got}")
        if not 2 <= self.alphabet <= len(LETTERS):
            raise ValueError(f"alphabet must be in [2, {len(LETTERS)}], got {self.alphabet!r}")
        check_shared_options(demonstration_error_rate=self.demonstration_error_rate, held_out=self.held_out)

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt, which is a line."""
        return _NUMBER + self.letters


class CopyProblem(NamedTuple):
    letters: str
    lines: int
    """Lines of the response, which count down to 00."""


class CopyTask(GeneratedTask[CopyProblem]):
    """``64kdbahc`` is continued by ``63kdbahc`` and so on down to ``00kdbahc``, and the stop token."""

    alphabet = ALPHABET
    options: CopyOptions

    def draw(self, rng: random.Random) -> CopyProblem:
        options = self.options
        letters = "".join(rng.choices(LETTERS[: options.alphabet], k=options.letters))
        return CopyProblem(letters, rng.randint(options.fewest_lines, options.most_lines))

    def text(self, problem: CopyProblem) -> str:
        return _line(problem.lines, problem.letters)

    def answer(self, problem: CopyProblem) -> str:
        return _written([problem.letters] * problem.lines)

    def demonstrate(self, problem: CopyProblem, rng: random.Random) -> list[tuple[str, bool]]:
        """The copy of a teacher who looks at the line above only, so that an error stays."""
        letters, lines = problem.letters, list[str]()
        for _ in range(problem.lines):
            if rng.random() < self.options.demonstration_error_rate:
                place = rng.randrange(len(letters))
                others = [letter for letter in LETTERS[: self.options.alphabet] if letter != letters[place]]
                letters = letters[:place] + rng.choice(others) + letters[place + 1 :]
            lines.append(letters)
        return [(_written(lines), True)]

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]]) -> list[float]:
        """The share of right tokens, line by line, of the longer of response and answer.

        A line is known by its number, the first of two with the same number counts, and so does a letter in its place.
        """
        return [_share_right(p.answer, self.decode(r)) for p, r in zip(prompts, responses, strict=True)]


def _line(number: int, letters: str) -> str:
    return f"{number:0{_NUMBER}d}{letters}"


def _written(lines: Sequence[str]) -> str:
    numbers = range(len(lines) - 1, -1, -1)
    return "".join(_line(number, letters) for number, letters in zip(numbers, lines, strict=True)) + "."


def _share_right(answer: str, response: str) -> float:
    expected, written = _lines(answer), _lines(response)
    right = 0
    for number, letters in expected.items():
        if number in written:
            right += _NUMBER + sum(a == b for a, b in zip(letters, written[number], strict=False))
    right += response.endswith(".")
    return right / max(len(answer), len(response))


def _lines(text: str) -> dict[str, str]:
    """The letters of each line by its number."""
    return {number: letters for number, letters in reversed(_LINE.findall(text))}
