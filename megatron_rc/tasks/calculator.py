"""The task calculator: sums in several turns, in which a calculator writes the results; it needs no download."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatron_rc.schema.limits import check_at_least
from megatron_rc.tasks import Prompt
from megatron_rc.tasks.arithmetic import draw_terms
from megatron_rc.tasks.generated import Alphabet, GeneratedTask, check_shared_options

LABELS = "abcdefghijklmnopqrstuvwxyz"
ALPHABET = Alphabet("0123456789+-=;:?" + LABELS)
MOST_DIGITS = 6  # sums of 26 terms stay within the 12 digits that a call may have
CALL_END = "="
REPLY_END = ";"
_CALL = re.compile(r"[a-z]?(-?\d{1,12})([+-])(\d{1,12})=")


@dataclass(frozen=True, kw_only=True)
class CalculatorOptions:
    fewest_terms: int = 4
    """Fewest terms of a sum, at least 2; a sum of N terms takes N - 1 calls."""
    most_terms: int = 6
    """Most terms of a sum, at most 26; every number of terms between the two is equally likely."""
    digits: int = 2
    """Most digits of the terms and totals, 1 to 6."""
    max_turns: int = 8
    """Maximum turns of a response; the last is the answer, and a response that wants another turn is cut off."""
    max_turn_tokens: int = 16
    """Most tokens that the policy writes in one turn."""
    demonstration_error_rate: float = 0.6
    """Share of demonstrations with a wrong answer: half of them leave out the last call, half miscopy a digit."""
    held_out: int = 256
    """Number of held-out problems, all different."""
    seed: int = 1
    """Seed of the problems and of the errors in demonstrations; train.seed if not given."""

    def __post_init__(self) -> None:
        if not 2 <= self.fewest_terms <= self.most_terms <= len(LABELS):
            got = f"fewest_terms={self.fewest_terms!r} most_terms={self.most_terms!r}"
            raise ValueError(f"terms must have 2 <= fewest_terms <= most_terms <= {len(LABELS)}, got {got}")
        if not 1 <= self.digits <= MOST_DIGITS:
            raise ValueError(f"digits must be in [1, {MOST_DIGITS}], got {self.digits!r}")
        # n terms need n - 1 calls and one answer; each call is label, sign, digits, end
        check_at_least(self.most_terms, max_turns=self.max_turns)
        check_at_least(2 * self.digits + 3, max_turn_tokens=self.max_turn_tokens)
        check_shared_options(demonstration_error_rate=self.demonstration_error_rate, held_out=self.held_out)

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt: every term has a label, and all but the first a sign."""
        return self.most_terms * (self.digits + 2)


class CalculatorTask(GeneratedTask[list[int]]):
    """``a47b+38c-5:`` is answered by ``b47+38=``, then, after the calculator's ``85;``, by ``c85-5=``, and so on.

    The label of a call helps the policy to keep its place; the calculator does not read it. The last turn is the
    answer and the stop token.
    """

    alphabet = ALPHABET
    options: CalculatorOptions

    def __init__(self, options: CalculatorOptions, tokenizer: str | None = None) -> None:
        super().__init__(options)
        self.stop_token_ids = (*self.stop_token_ids, *ALPHABET.encode(CALL_END))
        self.max_turns, self.max_turn_tokens = self.options.max_turns, self.options.max_turn_tokens

    def draw(self, rng: random.Random) -> list[int]:
        return draw_terms(rng, rng.randint(self.options.fewest_terms, self.options.most_terms), self._largest)

    def text(self, problem: list[int]) -> str:
        signed = [str(problem[0]), *(f"{term:+d}" for term in problem[1:])]
        return "".join(label + term for label, term in zip(LABELS, signed, strict=False)) + ":"

    def answer(self, problem: list[int]) -> str:
        return str(sum(problem))

    def demonstrate(self, problem: list[int], rng: random.Random) -> list[tuple[str, bool]]:
        """The share ``demonstration_error_rate`` of the demonstrations ends in a wrong answer."""
        terms = problem
        if rng.random() < self.options.demonstration_error_rate:
            terms = careless_terms(problem, rng, self._largest)
        totals, parts = list(accumulate(terms)), list[tuple[str, bool]]()
        for label, before, term, total in zip(LABELS[1:], totals, terms[1:], totals[1:], strict=False):
            parts += [(f"{label}{before}{term:+d}{CALL_END}", True), (f"{total}{REPLY_END}", False)]
        return [*parts, (f"{totals[-1]}.", True)]

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]]) -> list[float]:
        """1.0 if the last turn is the answer and the stop token, otherwise 0.0; the calls are not checked."""
        turns = [self.decode(response).rpartition(REPLY_END)[2] for response in responses]
        return [float(turn == prompt.answer + ".") for prompt, turn in zip(prompts, turns, strict=True)]

    def reply(self, prompt: Prompt, response: Sequence[int]) -> list[int]:
        """The result of the call that ``response`` ends in, or '?' if it is not a sum of two numbers."""
        turn = self.decode(response).rpartition(REPLY_END)[2]
        return self.alphabet.encode(result(turn) + REPLY_END) if turn.endswith(CALL_END) else []

    @property
    def _largest(self) -> int:
        return int(10**self.options.digits) - 1


def result(call: str) -> str:
    """What the calculator writes after ``call``: 85 for ``b47+38=``, and '?' for what it cannot read."""
    read = _CALL.fullmatch(call)
    if read is None:
        return "?"
    first, sign, second = read.groups()
    return str(int(first) + int(sign + second))


def careless_terms(terms: Sequence[int], rng: random.Random, largest: int) -> list[int]:
    """The terms that a teacher in a hurry adds up: without the last one, or with a digit that is off by one.

    The total is wrong. Where no digit can be off without a total outside 0 to ``largest``, the last term is left out.
    """
    slips = [slip for slip in _slips(terms) if all(0 <= total <= largest for total in accumulate(slip))]
    return list(terms[:-1]) if rng.random() < 0.5 or not slips else rng.choice(slips)


def _slips(terms: Sequence[int]) -> list[list[int]]:
    """All ways to copy a term after the first with a digit that is off by one."""
    slips = []
    for place, term in enumerate(terms[1:], start=1):
        digits = str(abs(term))
        for position, digit in enumerate(digits):
            for other in (int(digit) - 1, int(digit) + 1):
                if 0 <= other <= 9:
                    wrong = int(digits[:position] + str(other) + digits[position + 1 :])
                    slips.append([*terms[:place], wrong if term > 0 else -wrong, *terms[place + 1 :]])
    return slips
