"""The task arithmetic: chains of additions and subtractions with written steps, which needs no download."""

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megatron_rc.schema import nearest
from megatron_rc.tasks import Prompt
from megatron_rc.tasks.generated import Alphabet, GeneratedTask, check_shared_options

ALPHABET = Alphabet("0123456789+-=,")
LEVELS = tuple(f"{terms}x{digits}" for digits in (1, 2, 3) for terms in range(2, 7))


@dataclass(frozen=True, kw_only=True)
class ArithmeticOptions:
    levels: dict[str, float] = field(default_factory=lambda: {"3x1": 1.0, "4x1": 1.0, "5x1": 1.0, "6x1": 1.0})
    """Weight of each level; "3x2" has three terms and numbers of at most two digits; 2 to 6 terms, 1 to 3 digits."""
    written_steps: bool = True
    """Demonstrations write every running total (47+38= 77,85.); false: only the result (47+38= 85.)."""
    demonstration_error_rate: float = 0.7
    """Share of demonstrations with a wrong answer: half of them stop one step early, half slip by one or by a carry."""
    held_out: int = 256
    """Number of held-out problems, all different."""
    seed: int = 1
    """Seed of the problems and of the errors in demonstrations; train.seed if not given."""

    def __post_init__(self) -> None:
        if not self.levels or not sum(self.levels.values()) > 0:
            raise ValueError(f"levels must give at least one level a weight > 0, got {self.levels!r}")
        for level, weight in self.levels.items():
            if level not in LEVELS:
                raise ValueError(f"levels: unknown level {level!r}{nearest(level, LEVELS)}")
            if not 0 <= weight < float("inf"):
                raise ValueError(f"levels: the weight of {level!r} must be >= 0, got {weight!r}")
        check_shared_options(demonstration_error_rate=self.demonstration_error_rate, held_out=self.held_out)

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt: every term has its digits and the sign after it."""
        sizes = [level.split("x") for level in self.levels]
        return max(int(terms) * (int(digits) + 1) for terms, digits in sizes)


class ArithmeticTask(GeneratedTask[list[int]]):
    """Problems such as ``47+38-5=``, lists of terms; the answer is the last number before the stop token."""

    alphabet = ALPHABET
    options: ArithmeticOptions

    def draw(self, rng: random.Random) -> list[int]:
        levels = self.options.levels
        terms, digits = map(int, rng.choices(list(levels), list(levels.values()))[0].split("x"))
        return draw_terms(rng, terms, 10**digits - 1)

    def text(self, problem: list[int]) -> str:
        return str(problem[0]) + "".join(f"{term:+d}" for term in problem[1:]) + "="

    def answer(self, problem: list[int]) -> str:
        return str(sum(problem))

    def demonstrate(self, problem: list[int], rng: random.Random) -> list[tuple[str, bool]]:
        """The share ``demonstration_error_rate`` of the demonstrations ends in a wrong answer."""
        careless = rng.random() < self.options.demonstration_error_rate
        totals = careless_totals(problem, rng) if careless else running_totals(problem)
        written = totals if self.options.written_steps else totals[-1:]
        return [(",".join(map(str, written)) + ".", True)]

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]]) -> list[float]:
        """1.0 if the response has stopped and its last number is the answer, otherwise 0.0."""
        numbers = [re.fullmatch(r"(?:\d+,)*(\d+)\.", self.decode(response)) for response in responses]
        pairs = zip(prompts, numbers, strict=True)
        return [float(found is not None and found[1] == prompt.answer) for prompt, found in pairs]


def running_totals(terms: Sequence[int]) -> list[int]:
    """The total after each step; a step adds or subtracts one non-zero digit of one term, highest digit first.

    47 + 38 - 5 -> 77, 85, 80.
    """
    return list(itertools.accumulate(_steps(terms), initial=terms[0]))[1:]


def careless_totals(terms: Sequence[int], rng: random.Random) -> list[int]:
    """The totals of a teacher in a hurry, who leaves out the last step or makes an error in one: the last is wrong.

    The error loses the carry or borrow of its step; a step without one has a digit that is off by one. Later steps
    continue from the wrong total. If possible, no number gets more digits than the problem has.
    """
    steps, totals = list(_steps(terms)), running_totals(terms)
    if rng.random() < 0.5:
        return totals[:-1] or [terms[0]]
    slip = rng.randrange(len(steps))
    place = 10 ** (len(str(abs(steps[slip]))) - 1)
    errors = [place, -place] if rng.random() < 0.5 else [-place, place]
    if totals[slip] // (10 * place) != (totals[slip] - steps[slip]) // (10 * place):
        errors.insert(0, -10 * place if steps[slip] > 0 else 10 * place)
    after, largest = totals[slip:], 10 ** max(len(str(abs(number))) for number in [*terms, *totals]) - 1
    error = next((e for e in errors if min(after) + e >= 0 and max(after) + e <= largest), place)
    return totals[:slip] + [total + error for total in after]


def _steps(terms: Sequence[int]) -> Iterator[int]:
    for term in terms[1:]:
        digits = str(abs(term))
        for position, digit in enumerate(digits):
            if digit != "0":
                yield (1 if term > 0 else -1) * int(digit) * 10 ** (len(digits) - 1 - position)


def draw_terms(rng: random.Random, count: int, largest: int) -> list[int]:
    """Terms whose totals stay within 0 and largest, so that no answer needs a sign."""
    terms = [rng.randrange(largest + 1)]
    for _ in range(count - 1):
        total = sum(terms)
        adds = total < largest and (total == 0 or rng.random() < 0.5)
        terms.append(rng.randint(1, largest - total) if adds else -rng.randint(1, total))
    return terms
