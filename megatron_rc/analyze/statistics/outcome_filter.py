"""Was a dump filtered by outcome? Dynamic sampling drops the prompt groups whose rewards are all equal.

With two rewards, a group of n responses to a prompt of difficulty p has k right ones with probability C(n, k) m_k,
where m_k = E[p^k (1 - p)^(n - k)] over the prompts, which were drawn at random. By Cauchy and Schwarz m_0 m_2 >= m_1^2,
with equality where all prompts are equally difficult. Let c_0, c_1, c_2 be the numbers of groups with 0, 1 and 2 right
responses. Given their sum and c_1 + 2 c_2,

    P(c_0) is proportional to C(n, 1)^c_1 C(n, 2)^c_2 / (c_0! c_1! c_2!) (m_0 m_2 / m_1^2)^c_0,

so P(c_0 = 0) is largest for equal prompts, where nothing in it is unknown. The same holds for wrong responses,
independently where n >= 5, and for the groups of another size.

Source: the conditional law is that of the exact test of Haldane (1954) for Hardy-Weinberg proportions, where n is 2.
"""

import math
from dataclasses import dataclass

import numpy as np

from megatron_rc.analyze.chunk import Chunk, Floats, Integers

COLUMNS = ("step", "group", "reward")
"""Columns that the check needs: the numbers of groups start again in every step."""
LARGEST_CHANCE = 1e-6
"""A dump counts as filtered if the chance that an unfiltered one looks like it is below this. An honest dump is called
filtered at most this often, which is rare enough for an answer that silences four rules."""
FEWEST_SIGNED = 40
"""Sequences with an advantage that is not 0, from which advantages of one sign alone show a filter: those of a baseline
have both."""
MOST_GROUPS = 100_000
"""Groups that are kept in memory; later ones are not counted, and the chance covers only the kept ones."""


@dataclass(frozen=True)
class OutcomeFilter:
    """What the rewards of the groups say about a filter."""

    groups: int = 0
    """Prompt groups of at least two rewards."""
    uniform: int = 0
    """Groups among these whose rewards are all equal."""
    chance: float = 1.0
    """Upper bound on the probability that an unfiltered dump has no uniform group, given its nearly uniform ones; 1 if
    there is a uniform group or the check was not run."""
    not_run: str = ""
    """Why the check was not run; empty if it was."""
    one_sided: str = ""
    """How the advantages show that only some answers were kept; empty if they do not."""

    @property
    def filtered(self) -> bool:
        """True where the groups of equal rewards were taken out, or all answers of one outcome."""
        return self.chance < LARGEST_CHANCE or bool(self.one_sided)

    @property
    def sentence(self) -> str:
        """What to do about a filter; empty without one."""
        if not self.filtered:
            return ""
        if self.one_sided:
            return (
                f"Filtered by outcome: {self.one_sided}, so the honesty tests decide nothing; dump before the filter."
            )
        digits = math.floor(-math.log10(max(self.chance, 1e-99)))
        return (
            f"Filtered by outcome: none of {self.groups:,} groups has equal rewards (chance below 1e-{digits} "
            "without a filter), so the honesty tests decide nothing; dump before the filter."
        )


class OutcomeSums:
    """Rewards of each group, counted chunk by chunk."""

    def __init__(self) -> None:
        self._rewards: set[float] = set()
        self._first: float | None = None
        self._groups: dict[tuple[float, float], list[int]] = {}
        """By step and group: the number of rewards, and of those that equal the first reward of the dump."""
        self._signs = np.zeros(2, dtype=np.int64)
        """Sequences whose advantage is above and below 0."""

    def add(self, chunk: Chunk) -> None:
        """Add the rewards and advantages of the sequences of a chunk, with loss tokens or without."""
        self._signs += _signs(chunk)
        columns = [chunk.sequences[name] for name in COLUMNS if name in chunk.sequences]
        if len(self._rewards) > 2 or len(columns) < len(COLUMNS) or any(c.dtype.kind not in "biuf" for c in columns):
            return
        known = np.logical_and.reduce([np.isfinite(values) for values in columns])
        steps, groups, rewards = (values[known].tolist() for values in columns)
        self._rewards.update(rewards)
        if len(self._rewards) > 2:
            self._groups.clear()
            return
        if self._first is None and rewards:
            self._first = rewards[0]
        for step, group, reward in zip(steps, groups, rewards, strict=True):
            if (step, group) in self._groups or len(self._groups) < MOST_GROUPS:
                counts = self._groups.setdefault((step, group), [0, 0])
                counts[0] += 1
                counts[1] += reward == self._first

    def outcome_filter(self, columns: frozenset[str]) -> OutcomeFilter:
        """What the rewards and advantages say about a dump whose files all have ``columns``."""
        if self._signs.sum() >= FEWEST_SIGNED and not self._signs.all():
            side = "above" if self._signs[0] else "below"
            return OutcomeFilter(one_sided=f"all {self._signs.sum():,} advantages that are not 0 are {side} 0")
        if missing := [name for name in COLUMNS if name not in columns]:
            named = f"column {missing[0]} is" if len(missing) == 1 else f"columns {', '.join(missing)} are"
            return OutcomeFilter(not_run=f"the {named} missing")
        if len(self._rewards) > 2:
            return OutcomeFilter(not_run="the rewards have more than two values")
        pairs = np.array([pair for pair in self._groups.values() if pair[0] > 1], dtype=np.float64).reshape(-1, 2)
        if len(self._rewards) < 2 or not len(pairs):
            return OutcomeFilter(not_run="no group has two rewards, or all rewards are equal")
        sizes, right = pairs.T
        if self._first == min(self._rewards):
            right = sizes - right
        uniform = int(((right == 0) | (right == sizes)).sum())
        logarithm = sum(_log_chance(int(size), right[sizes == size]) for size in np.unique(sizes))
        return OutcomeFilter(len(pairs), uniform, 1.0 if uniform else math.exp(logarithm))


def _signs(chunk: Chunk) -> Integers:
    """How many sequences have an advantage above 0 and below 0; those of a sequence's tokens are added."""
    if "advantage" in chunk.sequences:
        values: Floats = chunk.sequences["advantage"].astype(np.float64)
    elif "advantage" in chunk.tokens:
        tokens = np.nan_to_num(chunk.tokens["advantage"].astype(np.float64))
        values = np.bincount(chunk.sequence_of, tokens, minlength=chunk.num_sequences).astype(np.float64)
    else:
        return np.zeros(2, dtype=np.int64)
    return np.array([(values > 0).sum(), (values < 0).sum()])


def _log_chance(size: int, right: Floats) -> float:
    """Logarithm of the largest probability that no group of ``size`` is uniform, given the nearly uniform ones."""
    ends = [right] if size < 5 else [right, size - right]
    return sum(_log_none_at(size, int((end == 1).sum()), int((end == 2).sum())) for end in ends)


def _log_none_at(size: int, ones: int, twos: int) -> float:
    """log P(c_0 = 0), given c_0 + c_1 + c_2 = ones + twos and c_1 + 2 c_2 = ones + 2 twos."""
    single, double = math.log(size), math.log(math.comb(size, 2))

    def term(none: int) -> float:
        one, two = ones - 2 * none, twos + none
        return one * single + two * double - math.lgamma(none + 1) - math.lgamma(one + 1) - math.lgamma(two + 1)

    terms = np.array([term(none) for none in range(ones // 2 + 1)])
    return float(terms[0] - terms.max() - np.log(np.exp(terms - terms.max()).sum()))
