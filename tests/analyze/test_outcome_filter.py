"""A dump of groups that were filtered by their rewards is recognised, and tests that see the filter decide nothing."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations_with_replacement, product
from typing import Any

import numpy as np
import pytest
from simulated_dumps import TRAPS, diagnosed, hidden_top_p, honest, levels, renormalised_top_p, world, zero_filled

from megatron_rc.analyze import conditions, output, terminal
from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.diagnosis import Diagnosis
from megatron_rc.analyze.pages.html import page
from megatron_rc.analyze.rules.rule import Level
from megatron_rc.analyze.statistics.outcome_filter import COLUMNS, OutcomeFilter, OutcomeSums


def rewarded(groups: np.ndarray, rewards: np.ndarray, steps: int = 1) -> Chunk:
    """Responses of no tokens."""
    size = rewards.size
    columns = {"step": np.arange(size) * steps // size, "group": groups, "reward": rewards}
    return Chunk(np.zeros(0), np.zeros(0), np.zeros(size + 1, dtype=np.int64), {}, columns)


def checked(*chunks: Chunk) -> OutcomeFilter:
    sums = OutcomeSums()
    for chunk in chunks:
        sums.add(chunk)
    return sums.outcome_filter(frozenset(COLUMNS))


def simulated(seed: int) -> OutcomeFilter:
    """Groups of prompts whose difficulties follow a beta law, equal to very unequal; responses in random order."""
    random = np.random.default_rng(seed)
    count, easy, hard = random.integers(8, 200), *np.exp(random.uniform(-2, 5, 2))
    sizes = random.integers(1, 10, count) if seed % 2 else np.full(count, random.integers(2, 17))
    share = np.repeat(random.beta(easy, hard, count), sizes)
    groups = np.repeat(np.arange(count), sizes)
    rewards = (random.random(share.size) < share).astype(np.float64)
    order = random.permutation(groups.size)
    return checked(*(rewarded(groups[half], rewards[half]) for half in np.array_split(order, 2)))


def test_honest_rewards_are_never_called_filtered() -> None:
    assert not [seed for seed in range(1000) if simulated(seed).filtered]


@pytest.mark.parametrize(
    ("size", "count", "shape"), [(8, 1024, (2.0, 2.0)), (16, 512, (0.5, 0.5)), (16, 512, (0.3, 2.0))]
)
def test_dynamic_sampling_of_a_usual_size_is_recognised(size: int, count: int, shape: tuple[float, float]) -> None:
    random = np.random.default_rng(0)
    right = random.binomial(size, random.beta(*shape, 20 * count))
    mixed = right[(right > 0) & (right < size)][:count]
    assert mixed.size == count
    assert dump_of(size, mixed.tolist()).filtered
    assert not dump_of(size, right[:count].tolist()).filtered


def dump_of(size: int, right: Sequence[int]) -> OutcomeFilter:
    """A dump of groups of one size, with the number of right responses of each."""
    groups = np.repeat(np.arange(len(right)), size)
    return checked(rewarded(groups, np.concatenate([np.arange(size) < k for k in right]).astype(np.float64)))


@pytest.mark.parametrize(("size", "count"), [(2, 5), (3, 4), (5, 4), (6, 3)])
@pytest.mark.parametrize("shares", [(0.5,), (0.2,), (0.1, 0.5, 0.9), (0.02, 0.98)])
def test_no_unfiltered_dump_has_more_than_the_chance_named(size: int, count: int, shares: tuple[float, ...]) -> None:
    """Exact: over all numbers of right responses, for prompts of these difficulties with equal chances."""
    chances = [
        float(np.mean([math.comb(size, k) * share**k * (1 - share) ** (size - k) for share in shares]))
        for k in range(size + 1)
    ]
    named: dict[float, float] = {}
    for right in combinations_with_replacement(range(1, size), count):
        orders = math.factorial(count) / math.prod(math.factorial(right.count(k)) for k in range(1, size))
        chance = dump_of(size, right).chance
        named[chance] = named.get(chance, 0.0) + orders * math.prod(chances[k] for k in right)
    for level in named:
        assert sum(each for chance, each in named.items() if chance <= level) <= level * (1 + 1e-9)


@pytest.mark.parametrize("size", [2, 5])
def test_the_chance_is_exact_where_all_prompts_are_equally_difficult(size: int) -> None:
    """By all ways to give the right responses to the groups that have at most two of them."""
    for ones, twos in ((4, 0), (3, 1)) if size > 2 else ((4, 0),):
        ways: dict[bool, float] = {True: 0.0, False: 0.0}
        for right in product((0, 1, 2), repeat=ones + twos):
            if sum(right) == ones + 2 * twos:
                ways[0 in right] += math.prod(math.comb(size, k) for k in right)
        exact = ways[False] / (ways[True] + ways[False])
        # a group in the middle belongs to no end, and lets the rewards have two values
        assert dump_of(size, [1] * ones + [2] * twos + [3] * (size == 5)).chance == pytest.approx(exact)


def test_groups_are_those_of_a_step_and_go_on_in_the_next_file() -> None:
    groups, rewards = np.array([1, 1, 1, 1]), np.array([0.0, 0.0, 1.0, 1.0])
    assert checked(rewarded(groups, rewards, steps=2)).uniform == 2
    assert checked(rewarded(groups[:2], rewards[:2]), rewarded(groups[2:], rewards[2:])).uniform == 0


@pytest.mark.parametrize(
    ("groups", "rewards", "reason"),
    [
        (np.arange(80) // 8, np.arange(80) / 80, "more than two values"),
        (np.arange(80), np.arange(80) % 2.0, "no group has two rewards"),
        (np.arange(80) // 8, np.ones(80), "all rewards are equal"),
        (np.arange(80) // 8, np.full(80, np.nan), "no group has two rewards"),
    ],
)
def test_rewards_that_say_nothing_are_not_checked(groups: np.ndarray, rewards: np.ndarray, reason: str) -> None:
    result = checked(rewarded(groups, rewards))
    assert reason in result.not_run
    assert not result.filtered


def test_a_dump_without_the_columns_is_not_checked_and_the_report_names_them() -> None:
    diagnosis = diagnosed(honest(world(1, sequences=16)))
    assert diagnosis.evidence.outcome_filter.not_run == "the columns group, reward are missing"
    assert "the columns group, reward are missing" in page(diagnosis)
    assert OutcomeSums().outcome_filter(frozenset({"step", "group"})).not_run == "the column reward is missing"


def with_columns(chunk: Chunk, **columns: Any) -> Diagnosis:
    return diagnosed(replace(chunk, sequences={**chunk.sequences, **columns}))


def columns_of(count: int, *, filtered: bool) -> dict[str, np.ndarray]:
    """Pairs of responses with one right one each; without the filter, every other pair has equal rewards."""
    order = np.arange(count)
    rewards = order % 2.0
    return {"group": order // 2, "reward": rewards if filtered else np.where(order % 4 == 1, 0.0, rewards)}


@pytest.mark.parametrize("make", [lambda w: hidden_top_p(w, 0.95), lambda w: renormalised_top_p(w, 0.95)])
def test_a_filter_leaves_hidden_sampling_undecided(make: Any) -> None:
    chunk = make(world(1, sequences=48))
    before, after = (with_columns(chunk, **columns_of(48, filtered=filtered)) for filtered in (False, True))
    (bug,), (open_,) = before.verdicts, after.verdicts
    assert not before.evidence.outcome_filter.filtered
    assert "iltered by outcome" not in terminal.text(before)
    assert (bug.level, open_.level, open_.code) == (Level.BUG, Level.UNDECIDED, bug.code)
    assert after.level is Level.UNDECIDED
    assert open_.p is None
    assert after.recommendation.suspects == (bug.code,)
    assert not conditions.read("RC1=none")[0].check(after).holds
    found = json.loads(output.to_json(after))
    assert {test["undecided"] for test in (found["honesty"][name] for name in ("z_rho", "z_W", "z_mean_l"))} == {
        "filtered by outcome"
    }
    for text in (terminal.text(after), page(after)):
        assert "Filtered by outcome: none of 24 groups has equal rewards (chance below 1e-6 " in " ".join(text.split())
        assert "dump before the filter" in " ".join(text.split())


@pytest.mark.parametrize("per", ["sequence", "token"])
def test_advantages_of_one_sign_show_a_filter_without_rewards(per: str) -> None:
    chunk = TRAPS["hidden temperature .7"][1](world(1, sequences=48))
    size = 48 if per == "sequence" else chunk.log_pi.size
    one_sided, both = np.full(size, 0.5), np.where(np.arange(size) < size // 2, 0.5, -0.5)
    where = "sequences" if per == "sequence" else "tokens"
    known = ({**getattr(chunk, where), "advantage": values} for values in (one_sided, both))
    found = [diagnosed(replace(chunk, **{where: columns})) for columns in known]
    assert levels(found[0]) == {"RC103": Level.UNDECIDED} and levels(found[1]) == {"RC103": Level.BUG}
    assert "all 48 advantages that are not 0 are above 0" in found[0].evidence.outcome_filter.sentence


def test_a_filter_hides_no_bug_of_rules_that_do_not_see_it_and_accuses_no_honest_dump() -> None:
    filtered = columns_of(48, filtered=True)
    assert with_columns(zero_filled(world(1, sequences=48), 1 / 8), **filtered).level is Level.BUG
    diagnosis = with_columns(TRAPS["honest"][1](world(1, sequences=48)), **filtered)
    assert [(verdict.code, verdict.level) for verdict in diagnosis.verdicts] == [("RC501", Level.NUMERICS)]
    assert "Filtered by outcome" in terminal.text(diagnosis)
