"""Everything that is measured on a dump, in one pass over its sequences: what the rules and the pages read."""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from megatron_rc.analyze.chunk import Chunk, Flags, Floats, damaged, loss_tokens
from megatron_rc.analyze.columns import SEQUENCE_COLUMNS, TOKEN_COLUMNS
from megatron_rc.analyze.known import Known
from megatron_rc.analyze.statistics.alignment import LagSums
from megatron_rc.analyze.statistics.draws import DrawSums, Outside
from megatron_rc.analyze.statistics.factors import FACTORS
from megatron_rc.analyze.statistics.growth import Growth, GrowthSums
from megatron_rc.analyze.statistics.honesty import Honesty, honesty
from megatron_rc.analyze.statistics.noise import MOST_PARTS, Noise
from megatron_rc.analyze.statistics.outcome_filter import OutcomeFilter, OutcomeSums
from megatron_rc.analyze.statistics.profile import Permutations, Profile, ProfileSums
from megatron_rc.analyze.statistics.reservoir import Reservoir
from megatron_rc.analyze.statistics.sign_flips import sign_flip_test
from megatron_rc.analyze.statistics.significance import Test, holm
from megatron_rc.analyze.statistics.single_ids import OneId
from megatron_rc.analyze.statistics.steps import Step, StepSums
from megatron_rc.analyze.statistics.sums import FIELDS, KeyedSums, Sums, merged, sequence_sums, total
from megatron_rc.analyze.statistics.tail import Tail, TailSums
from megatron_rc.analyze.statistics.timeline import Logged, Timeline, timeline
from megatron_rc.analyze.statistics.token_ids import Persistence, persistence

PLACES = 5
"""Most damaged sequences that are named."""
HEAT_EDGES = -np.geomspace(20, 1e-4, 61)
"""nats, rising: edges of the map of log pi against log mu; values outside are in its first or last row."""

PARTS = {"step": math.inf, "server": math.inf, "task": MOST_PARTS, "temperature": MOST_PARTS}
"""Maps each column by whose values the honesty tests also run to the most values that it may have for that."""

_DAMAGE = {
    "nan": "NaN log-probs",
    "infinite": "infinite log-probs",
    "positive": "log-probs above 0 (are they probabilities, or -log p?)",
}


@dataclass(frozen=True)
class Evidence:
    """What was measured. Sums cover every token; ``sample`` is what fits into memory."""

    sequences: int
    """Sequences with at least one loss token and no damage."""
    damaged: dict[str, int]
    """Sequences left out, by the kind of damage: nan, infinite, positive."""
    damaged_places: list[int]
    """Indices in the dump of the first damaged sequences."""
    columns: frozenset[str]
    """Columns that all files have."""
    sums: Sums
    whole: Honesty
    parts: dict[str, dict[Any, Honesty]]
    """By each column of `PARTS` and its value; empty without the column, and where it has too many values."""
    steps: tuple[Step, ...]
    """Rising; empty without the column step."""
    k3_by_server_and_step: dict[tuple[str, int], float]
    """Mean k3; empty unless the dump has both columns."""
    lag_correlations: dict[int, float]
    best_lag: int
    alignment: Test
    token_tail: Tail
    sequence_tail: Tail
    growth: Growth
    profiles: dict[str, Profile]
    """By the name of the factor, for every factor that the columns allow."""
    factor_tests: dict[str, Test]
    """Tests that |l| does not depend on a factor, by its name."""
    sign_test: Test
    """Test that the sign of l does not depend on the log-prob."""
    heat: Floats
    """[61 + 1, 61 + 1] number of tokens by log mu and log pi."""
    sample: Chunk
    """Loss tokens of a uniform sample of the sequences that have any."""
    outcome_filter: OutcomeFilter
    """Whether the responses were chosen by their rewards; if so, the honesty tests decide nothing."""
    known: Known = field(default_factory=Known)
    """What the user knows about the sides."""
    draws: dict[str, Outside] | None = None
    """Whether the sampler drew from what it logged; None without its top log-probs."""
    worst_id: OneId | None = None
    """The id that the sampler draws otherwise than it logs most surely; None where no listed id is drawn often."""
    course: Timeline | None = None
    """The course over the steps, with p-values before the correction; None with too few steps."""

    @property
    def tests(self) -> list[Test]:
        """Every test of the report."""
        panels = [self.whole, *(panel for part in self.parts.values() if len(part) > 1 for panel in part.values())]
        return [
            self.alignment,
            *(t for panel in panels for t in panel.tests),
            *self.factor_tests.values(),
            self.sign_test,
            *(one.test for one in (self.draws or {}).values() if one.test),
            *([self.worst_id.test] if self.worst_id else []),
            *(self.course.tests if self.course else ()),
        ]

    @cached_property
    def noise(self) -> Noise:
        """The noise of the sample, told from how sure the model is."""
        return Noise(self.sample)

    @cached_property
    def persistence(self) -> Persistence:
        """How much ids err alike in different prompts; needs the column token_id."""
        return persistence(self.sample, self.noise)

    @cached_property
    def lags(self) -> frozenset[int]:
        """Updates between sampling and scoring, as the dump's versions say; empty where it does not say."""
        profile = self.profiles.get("lag")
        return frozenset() if profile is None else frozenset(int(lag) for lag in profile.bins)

    @property
    def older(self) -> bool:
        """True where the dump says that older weights sampled some of the tokens."""
        return any(lag > 0 for lag in self.lags)

    @cached_property
    def adjusted(self) -> dict[str, float]:
        """P-values after Holm's correction over all of them, by the name of the test."""
        return holm(self.tests)

    def significant(self, test: Test | None, level: float = 0.01) -> bool:
        return test is not None and self.adjusted.get(test.name, 1.0) < level

    def excess_share(self, profile: Profile, bins: Flags, floor: float) -> float:
        """Share of all k3 that ``bins`` [B] of a profile have above ``floor``."""
        excess = float((profile.count[bins] * (profile.k3[bins] - floor)).sum())
        return min(1.0, max(0.0, excess / self.sums.k3)) if self.sums.k3 else 0.0

    @property
    def first_order_share(self) -> float:
        """Share of mean l^2 that the means of l by logged log-prob explain."""
        profile = self.profiles["log_mu"]
        systematic = float((profile.count * profile.log_ratio**2).sum())
        return min(1.0, systematic / self.sums.k1_squared) if self.sums.k1_squared else 0.0

    def has(self, *columns: str) -> bool:
        return self.columns.issuperset(columns)


class Gathering:
    """Sums that become an Evidence, added chunk by chunk."""

    def __init__(self, known: Known | None = None) -> None:
        self._known = known or Known()
        self._read = self._masked = 0
        self._damaged: dict[str, int] = {}
        self._places: list[int] = []
        self._columns: frozenset[str] | None = None
        self._sums = np.zeros(len(FIELDS))
        self._parts, self._cells = {column: KeyedSums() for column in PARTS}, KeyedSums()
        self._course = StepSums()
        self._lags, self._growth = LagSums(), GrowthSums()
        self._tokens, self._weights = TailSums(), TailSums()
        self._profiles: dict[str, ProfileSums] = {}
        self._heat = np.zeros((HEAT_EDGES.size + 1, HEAT_EDGES.size + 1))
        self._reservoir = Reservoir()
        self._outcomes, self._draws = OutcomeSums(), DrawSums()

    def add(self, chunk: Chunk) -> None:
        self._outcomes.add(chunk)
        self._masked += int((~chunk.tokens["loss_mask"]).sum()) if "loss_mask" in chunk.tokens else 0
        chunk = self._without_damage(loss_tokens(chunk))
        columns = frozenset({*chunk.tokens, *chunk.sequences})
        if self._columns is None:
            self._columns = columns
            self._profiles = {name: ProfileSums(f) for name, f in FACTORS.items() if columns.issuperset(f.needs)}
        elif not columns >= self._columns:
            self._columns &= columns
            self._profiles = {n: p for n, p in self._profiles.items() if columns.issuperset(p.factor.needs)}
        rows = sequence_sums(chunk)
        self._sums = merged(self._sums, total(rows))
        for column, sums in self._parts.items():
            if column in chunk.sequences:
                sums.add(chunk.sequences[column], rows)
        self._course.add(chunk, rows)
        if "server" in chunk.sequences and "step" in chunk.sequences:
            pairs = np.rec.fromarrays([chunk.sequences["server"], chunk.sequences["step"]])
            self._cells.add(pairs, rows)
        self._lags.add(chunk)
        self._draws.add(chunk)
        # the sums have it all, and it is the widest column
        chunk = replace(chunk, tokens={name: values for name, values in chunk.tokens.items() if name != "draws"})
        self._tokens.add(chunk.log_ratio)
        self._weights.add(self._growth.add(chunk))
        for profile in self._profiles.values():
            profile.add(chunk)
        bins = (np.searchsorted(HEAT_EDGES, values) for values in (chunk.log_mu, chunk.log_pi))
        cells = np.ravel_multi_index(tuple(bins), self._heat.shape)
        self._heat += np.bincount(cells, minlength=self._heat.size).reshape(self._heat.shape)
        self._reservoir.add(chunk.select_sequences(chunk.lengths > 0))

    def evidence(self, logged: Logged = MappingProxyType({})) -> Evidence:
        """What was measured; ``logged``: series of the run's log, which the course compares with k3.

        Raises ValueError where there was no loss token with two log-probs, and says why.
        """
        sums = Sums(self._sums)
        if self._damaged and not sums.tokens:
            kinds = (f"{count:,} with {_DAMAGE[kind]}" for kind, count in self._damaged.items())
            raise ValueError(f"the dump has no loss token left without the damaged responses: {', '.join(kinds)}")
        if self._masked and not sums.tokens:
            where = f"all {self._masked:,} tokens of {self._read:,} responses"
            raise ValueError(f"the dump has no loss token: the loss mask is 0 at {where}")
        whole = honesty(sums)
        assert self._columns is not None, "honesty has refused a dump without tokens"
        best, alignment = self._lags.test()
        sample = self._reservoir.sample()
        profiles = {name: sums.profile() for name, sums in self._profiles.items()}
        permutations = Permutations(sample)
        tests = {
            name: permutations.test(f"|l| by {profile.factor.title}", profile.factor)
            for name, profile in profiles.items()
            if len(profile.bins) > 1
        }
        sign = sign_flip_test("sign of l by log-prob", permutations.chunk)
        evidence = Evidence(
            sequences=int(sums.sequences),
            damaged=self._damaged,
            damaged_places=self._places,
            columns=self._columns & {*TOKEN_COLUMNS, *SEQUENCE_COLUMNS},
            sums=sums,
            whole=whole,
            parts={
                column: {key: honesty(s, f"{column} {key}") for key, s in keyed.items(PARTS[column]) if s.tokens}
                for column, keyed in self._parts.items()
            },
            steps=self._course.steps(),
            k3_by_server_and_step={pair: s.mean("k3") for pair, s in self._cells.items() if s.tokens},
            lag_correlations=self._lags.correlations(),
            best_lag=best,
            alignment=alignment,
            token_tail=self._tokens.tail(),
            sequence_tail=self._weights.tail(),
            growth=self._growth.growth(),
            profiles=profiles,
            factor_tests=tests,
            sign_test=sign,
            heat=self._heat,
            sample=sample,
            outcome_filter=self._outcomes.outcome_filter(self._columns),
            known=self._known,
            draws=self._draws.draws(),
            worst_id=self._draws.worst_id(),
        )
        return replace(evidence, course=timeline(evidence.steps, logged, len(evidence.tests)))

    def _without_damage(self, chunk: Chunk) -> Chunk:
        bad = np.zeros(chunk.num_sequences, dtype=bool)
        for kind, flags in damaged(chunk).items():
            sequences = np.bincount(chunk.sequence_of, weights=flags, minlength=bad.size) > 0
            if sequences.any():
                self._damaged[kind] = self._damaged.get(kind, 0) + int(sequences.sum())
                bad |= sequences
        self._places = (self._places + (self._read + np.flatnonzero(bad)).tolist())[:PLACES]
        self._read += bad.size
        return chunk.select_sequences(~bad) if bad.any() else chunk
