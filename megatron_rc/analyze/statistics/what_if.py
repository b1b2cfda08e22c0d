"""What would each correction do to these responses? Computed by `correct` itself; the only part that needs torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_rc import versions
from megatron_rc.analyze.chunk import Chunk, Flags, Floats
from megatron_rc.analyze.statistics.bound import advantages, sequence_ratio
from megatron_rc.analyze.statistics.drift import Drift
from megatron_rc.analyze.statistics.factors import FACTORS, lag
from megatron_rc.analyze.statistics.reservoir import Reservoir
from megatron_rc.analyze.statistics.residual import residual_drift
from megatron_rc.correction.plan import Plan
from megatron_rc.correction.settings import RolloutCorrection

MAX_TOKENS = 100_000
"""Tokens that the methods are computed on: whole sequences of the sample, so that all methods together take 2 s."""
CORRECT_FROM = 0.0
"""An answer is correct when its reward is above this."""
MOST_CORRECT_LOST = 0.2
"""A method that drops a larger share of the correct answers, or of their tokens, gets a warning."""
MOST_QUARTER_LOST = 0.5
"""The same for a quarter of the responses by length."""
QUARTERS = ("shortest", "second shortest", "second longest", "longest")
REFERENCE_SHARE = 0.5
"""The cosine is given when sequences shorter than T* hold at least this share of the tokens."""


@dataclass(frozen=True)
class Kept:
    """What a method keeps of a group of tokens; NaN where the group is empty."""

    tokens: float
    """Share of the tokens."""
    sequences: float
    """Share of the sequences with such tokens that keep at least one of them."""

    @classmethod
    def of(cls, mask: Flags, group: Flags, chunk: Chunk) -> "Kept":
        """What ``mask`` [N] keeps of the tokens with ``group`` [N]."""
        if not group.any():
            return cls(math.nan, math.nan)
        sequences, kept = (
            np.count_nonzero(np.bincount(chunk.sequence_of[tokens], minlength=chunk.num_sequences))
            for tokens in (group, group & mask)
        )
        return cls(float(mask[group].mean()), kept / sequences)


@dataclass(frozen=True)
class WhatIf:
    """What one method does."""

    name: str
    """A preset, or the recommended method."""
    kept_tokens: float
    """Share of all tokens."""
    kept_sequences: float
    """Share of the sequences that keep at least one token."""
    by_length: list[Kept]
    """Shares in each quarter of the sequences by length, the shortest first."""
    by_sign: dict[str, Kept] | None
    """Shares of the tokens with a "positive" and a "negative" advantage; None without the column advantage."""
    by_correct: dict[str, Kept] | None
    """Shares of "correct" and "wrong" answers (reward above 0 or not); None without the column reward."""
    advantage_removed: float | None
    """Share of sum |advantage| on dropped tokens; None without the column advantage, or where all are 0."""
    ess: float
    """Effective share of the tokens: (sum w)^2 / (n sum w^2), n all tokens, w = 0 where dropped."""
    bias: float
    """Mean |w - rho|, with the rho that the weight approximates: of the sequence for a sequence weight, else of the
    token. For a truncated weight this is 1 - E[min(rho, C)], because E[rho] = 1 under honest logs."""
    cosine: float | None
    """Cosine of w A with W A, W the exact weight of the sequence, over the tokens of sequences shorter than T*; None
    where T* is so short that W is noise, or where nothing is kept there."""
    drift_left: float | None
    """`residual_drift`; None for weights and gates of sequences, and without the columns of the top ids."""
    warnings: list[str]
    """What speaks against the method."""


@dataclass(frozen=True)
class WhatIfTable:
    rows: list[WhatIf]
    """Methods without warnings first, then by cosine, or by bias if there is no cosine."""
    not_run: dict[str, list[str]]
    """What is missing, by method: names of columns, and text for what no dump holds."""
    tokens: int
    sequences: int
    """Size of the sample that the methods were computed on."""
    length_edges: list[float]
    """[3] largest length of each quarter but the last."""
    has_advantages: bool
    """False: every advantage counts as 1 in the cosine."""
    drift: Drift
    """What weights of tokens leave, by length."""


@dataclass(frozen=True)
class Missing:
    """Why there is no table."""

    sentence: str


def what_if(sample: Chunk, horizon: float, methods: Mapping[str, RolloutCorrection]) -> WhatIfTable | Missing:
    """What each method does to some of the sequences; the same sample always gives the same table."""
    limited = Reservoir(MAX_TOKENS)
    limited.add(sample)
    measures = _Measures(limited.sample(), horizon)
    not_run = {name: lacking for name, method in methods.items() if (lacking := _lacking(method, measures.chunk))}
    try:
        with versions.needed_by("what-if"):
            computed = {n: _correct(m, measures.chunk) for n, m in methods.items() if n not in not_run}
    except versions.MissingExtra as missing:
        return Missing(f"{missing}")
    rows = [measures.row(name, methods[name], *weights) for name, weights in computed.items()]
    return WhatIfTable(
        rows=sorted(rows, key=lambda row: (bool(row.warnings), row.bias if row.cosine is None else -row.cosine)),
        not_run=not_run,
        tokens=measures.chunk.log_pi.size,
        sequences=measures.chunk.num_sequences,
        length_edges=measures.length_edges.tolist(),
        has_advantages=measures.chunk.has("advantage"),
        drift=Drift.of(measures.chunk),
    )


def _lacking(method: RolloutCorrection, chunk: Chunk) -> list[str]:
    """What ``method`` needs and ``chunk`` lacks: names of columns, and words for what no dump holds."""
    plan = Plan.of(method)
    needed = list(plan.statistics)
    if any(gate.reads_advantages for gate in method.reject):
        needed.append("advantage")
    if "segment" in plan.units:
        needed.append("turn")
    if plan.reads_lags:
        needed += FACTORS["lag"].needs
    lacking = [name for name in dict.fromkeys(needed) if not chunk.has(name)]
    if plan.has_two_factors:
        lacking.append("log-probs by the weights that sampled, which no dump holds")
    if method.weight is not None and method.weight.upper == "measured":
        lacking.append("a number for upper, because a measured one comes from the rollout before")
    return lacking


def _correct(method: RolloutCorrection, chunk: Chunk) -> tuple[Floats, Flags]:
    """Weights and mask [N] of `megatron_rc.correct`."""
    import torch

    from megatron_rc.correction.correct import correct
    from megatron_rc.correction.inputs import Extras

    segments, lags, plan = None, None, Plan.of(method)
    if plan.reads_lags:
        lags = torch.from_numpy(np.maximum(lag(chunk), 0))
    if "turn" in chunk.tokens:
        segments = torch.from_numpy(np.cumsum(chunk.begins(chunk.tokens["turn"])) - 1)
    statistics = {name: torch.from_numpy(chunk.per_token(name).astype(np.float64)) for name in plan.statistics}
    corrected = correct(
        torch.from_numpy(chunk.log_pi),
        torch.from_numpy(chunk.log_mu),
        torch.ones(chunk.log_pi.size, dtype=torch.bool),
        correction=method,
        cu_seqlens=torch.from_numpy(chunk.cu_seqlens.astype(np.int32)),
        segment_ids=segments,
        num_segments=None if segments is None else int(segments[-1]) + 1,
        advantages=None if (advantage := advantages(chunk)) is None else torch.from_numpy(advantage),
        extras=Extras(statistics, lags=lags),
        backend="torch",
    )
    return corrected.weights.numpy(), corrected.mask.numpy()


class _Measures:
    """What does not depend on the method, and the row of each method."""

    def __init__(self, chunk: Chunk, horizon: float) -> None:
        self.chunk = chunk
        self.length_edges = np.quantile(chunk.lengths, (0.25, 0.5, 0.75), method="inverted_cdf")
        quarter = np.searchsorted(self.length_edges, chunk.lengths)[chunk.sequence_of]
        self._quarters = [quarter == index for index in range(len(QUARTERS))]
        advantage = advantages(chunk)
        self._advantage = np.ones(chunk.log_pi.size) if advantage is None else advantage
        short = (chunk.lengths < horizon)[chunk.sequence_of]
        self._compared = short if short.mean() >= REFERENCE_SHARE else None
        self._of_sequence = sequence_ratio(chunk)[chunk.sequence_of]

    def row(self, name: str, method: RolloutCorrection, weights: Floats, mask: Flags) -> WhatIf:
        def kept(group: Flags) -> Kept:
            return Kept.of(mask, group, self.chunk)

        every, by_length = kept(np.ones_like(mask)), [kept(quarter) for quarter in self._quarters]
        by_correct = by_sign = removed = None
        if self.chunk.has("reward"):
            correct = self.chunk.per_token("reward") > CORRECT_FROM
            by_correct = {"correct": kept(correct), "wrong": kept(~correct)}
        if self.chunk.has("advantage"):
            by_sign = {"positive": kept(self._advantage > 0), "negative": kept(self._advantage < 0)}
            size = np.abs(self._advantage)
            removed = float(size[~mask].sum() / size.sum()) if size.any() else None
        squares = np.square(weights).sum()
        return WhatIf(
            name=name,
            kept_tokens=every.tokens,
            kept_sequences=every.sequences,
            by_length=by_length,
            by_sign=by_sign,
            by_correct=by_correct,
            advantage_removed=removed,
            ess=float(weights.sum() ** 2 / (weights.size * squares)) if squares else 0.0,
            bias=self._bias(method, weights),
            cosine=self._cosine(weights),
            drift_left=residual_drift(self.chunk.tokens["top"], method) if "top" in self.chunk.tokens else None,
            warnings=_warnings(by_length, by_correct),
        )

    def _bias(self, method: RolloutCorrection, weights: Floats) -> float:
        if method.weight is None or method.weight.level != "sequence":
            return float(np.abs(weights - self.chunk.ratio).mean())
        # every sequence counts once, however long it is
        length = self.chunk.lengths[self.chunk.sequence_of]
        return float((np.abs(weights - self._of_sequence) / length).sum() / self.chunk.num_sequences)

    def _cosine(self, weights: Floats) -> float | None:
        if self._compared is None:
            return None
        method = (weights * self._advantage)[self._compared]
        exact = (self._of_sequence * self._advantage)[self._compared]
        norms = float(np.linalg.norm(method) * np.linalg.norm(exact))
        return float(method @ exact) / norms if norms else None


def _warnings(by_length: list[Kept], by_correct: dict[str, Kept] | None) -> list[str]:
    groups = [] if by_correct is None else [("correct answers", by_correct["correct"], MOST_CORRECT_LOST)]
    filled = [(name, kept) for name, kept in zip(QUARTERS, by_length, strict=True) if not math.isnan(kept.tokens)]
    # where all lengths are equal, one quarter holds all responses
    names = [f"{name} quarter of the responses" for name, _ in filled] if len(filled) > 1 else ["responses"]
    groups += [(name, kept, MOST_QUARTER_LOST) for name, (_, kept) in zip(names, filled, strict=True)]
    warnings = []
    for name, kept, most in groups:
        if 1 - kept.sequences > most:
            warnings.append(f"drops {1 - kept.sequences:.0%} of the {name}")
        elif 1 - kept.tokens > most:
            warnings.append(f"drops {1 - kept.tokens:.0%} of the tokens of the {name}")
    return warnings
