"""Sums per training step, and the products that errors of their ratios need: the course of a run in little memory."""

import math
from typing import NamedTuple

import numpy as np

from megatron_rc.analyze.chunk import Chunk, Floats
from megatron_rc.analyze.statistics.sums import FIELDS, WeightSums

MOMENTS = ("sequences", "tokens", "k3", "k1_squared", "uncertainty")
"""Sums whose products over sequences are kept, too: "k1_squared" is sum l^2, "uncertainty" sum (1 - pi)^2."""
_PLAIN = ("excess", "excess_squared")


class Moments(NamedTuple):
    """Sums over the sequences of some steps."""

    total: Floats
    """[5] sum of v_i, where v_i holds the MOMENTS of sequence i."""
    products: Floats
    """[5, 5] sum of v_i v_i^T."""

    def __getattr__(self, name: str) -> float:
        if name not in MOMENTS:
            raise AttributeError(name)
        return float(self.total[MOMENTS.index(name)])

    def plus(self, other: "Moments") -> "Moments":
        return Moments(self.total + other.total, self.products + other.products)


class Step(NamedTuple):
    """What the responses of one step show."""

    step: int
    k3: float
    """Mean, nats per token."""
    sigma: float
    """sqrt(mean l^2 / mean (1 - pi)^2): noise of a logit that gives this gap."""
    mean_length: float
    """Loss tokens per response."""
    ess: float
    """Effective number of sequences as a share of them: (sum W)^2 / (S sum W^2) with W = e^(sum of l)."""
    z_rho: float
    entropy: float
    """Mean of the column entropy, nats; NaN without it."""
    reward: float
    """Mean of the column reward; NaN without it."""
    moments: Moments


class _Row:
    """Sums of one step."""

    def __init__(self) -> None:
        self.moments = Moments(np.zeros(len(MOMENTS)), np.zeros((len(MOMENTS), len(MOMENTS))))
        self.plain = np.zeros(len(_PLAIN))
        self.entropy = self.reward = 0.0
        self.rewards = 0
        self.weights = WeightSums()

    def step(self, name: int) -> Step:
        sums = self.moments
        excess, squared = self.plain.tolist()
        return Step(
            step=name,
            k3=sums.k3 / sums.tokens,
            sigma=math.sqrt(sums.k1_squared / sums.uncertainty) if sums.uncertainty else 0.0,
            mean_length=sums.tokens / sums.sequences,
            ess=self.weights.ess(sums.sequences),
            z_rho=excess / math.sqrt(squared) if squared else 0.0,
            entropy=self.entropy / sums.tokens,
            reward=self.reward / self.rewards if self.rewards else math.nan,
            moments=sums,
        )


class StepSums:
    """Sums of each step, added chunk by chunk."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    def add(self, chunk: Chunk, sums: Floats) -> None:
        """Add the loss tokens of a chunk, whose sums per sequence are ``sums`` [S, len(FIELDS)]."""
        steps = chunk.sequences.get("step")
        if steps is None or steps.dtype.kind not in "iuf":
            return
        filled = (chunk.lengths > 0) & np.isfinite(steps)
        if not filled.any():
            return
        order = np.flatnonzero(filled)[np.argsort(steps[filled], kind="stable")]
        names, starts = np.unique(steps[order], return_index=True)
        entropy = (
            np.bincount(chunk.sequence_of, weights=chunk.tokens["entropy"], minlength=filled.size)
            if "entropy" in chunk.tokens
            else np.full(filled.size, math.nan)
        )
        reward = chunk.sequences.get("reward", np.full(filled.size, math.nan)).astype(np.float64)
        columns, plain = ([FIELDS.index(name) for name in group] for group in (MOMENTS, _PLAIN))
        for name, members in zip(names.tolist(), np.split(order, starts[1:]), strict=True):
            row, values = self._rows.setdefault(int(name), _Row()), sums[members]
            moments = values[:, columns]
            row.moments = row.moments.plus(Moments(moments.sum(axis=0), moments.T @ moments))
            row.plain += values[:, plain].sum(axis=0)
            row.entropy += float(entropy[members].sum())
            known = reward[members][np.isfinite(reward[members])]
            row.reward, row.rewards = row.reward + float(known.sum()), row.rewards + known.size
            row.weights.add(values[:, FIELDS.index("log_ratio")])

    def steps(self) -> tuple[Step, ...]:
        """The steps that have loss tokens, rising."""
        return tuple(row.step(name) for name, row in sorted(self._rows.items()))
