"""Sufficient statistics that metrics are made of: sums, maxima and minima over tokens and over sequences."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rc.collectives import Group, all_reduced, pool_units
from megatron_rc.correction.reference.log_ratio import LogRatio
from megatron_rc.correction.reference.segments import unit_sums
from megatron_rc.correction.sums import Key, Sum, square_of

_LARGEST_LOG = 80.0
"""Log-perplexities are clamped to this before exp; no vocabulary has a perplexity near e^80."""


class Statistics(NamedTuple):
    """Sufficient statistics of the metrics of one call."""

    sums: tuple[Key, ...]
    maxima: tuple[Key, ...]
    minima: tuple[Key, ...]
    vector: Tensor
    """[K] fp64: these sums, then the maxima, then the minima."""


class Computed(NamedTuple):
    """What a backend returns of a correction."""

    weights: Tensor
    """[N]."""
    mask: Tensor
    """[N] bool."""
    bad_sequences: Tensor
    """[S] bool."""
    statistics: Statistics
    mean_k3: Tensor | None
    """0-d fp64; None unless a gate needs it."""


class Parts(NamedTuple):
    """Statistics under construction: 0-d tensors of any dtype."""

    sums: dict[Key, Tensor]
    maxima: dict[Key, Tensor]
    minima: dict[Key, Tensor]

    def __or__(self, other: "Parts") -> "Parts":
        return Parts(*(mine | theirs for mine, theirs in zip(self, other, strict=True)))

    def joined(self) -> Statistics:
        vector = torch.stack([value for part in self for value in part.values()]).double()
        return Statistics(tuple(self.sums), tuple(self.maxima), tuple(self.minima), vector)


def token_statistics(ratio: LogRatio, bound: float) -> Parts:
    """Over valid tokens: sums of rho, p = pi, q = mu, dev = rho - 1, l, |l|, squares and products; extremes of rho.

    The sum "positive" counts what is not valid because a log-prob is above 0.
    """
    far = ratio.value.abs()
    sums: dict[Key, Tensor] = {"beyond_2": (far > math.log(2)).count_nonzero()}
    sums |= {"clamped": (far > bound).count_nonzero(), "positive": ratio.positive.count_nonzero()}
    # one large table, changed in place: on a CPU most of the time goes into memory traffic
    table = ratio.pair[:, None].expand(-1, 2, -1).to(torch.float64).flatten(0, 1)
    table[3].add_(table[0])
    ell = table[:2].clamp_(-bound, bound)[0]
    exponentials = table[1:].exp_()
    # rows that are not valid have log 0: dividing by False gives inf, and the product is 0
    smallest = least(exponentials[0] / ratio.valid)
    rho, q, p = exponentials.mul_(ratio.valid)
    sums |= {"log_ratio": ell.sum(), "rho_log_ratio": (rho * ell).sum(), "p_q": (p * q).sum()}
    sums["log_ratio_abs"] = torch.linalg.vector_norm(ell, 1)
    dev = ell.expm1_()
    sums |= {"dev_abs": torch.linalg.vector_norm(dev, 1), "prob_gap": torch.dist(p, q, 1)}
    names = ("dev", "rho", "q", "p")
    sums |= zip(names, table.sum(1), strict=True)
    maximum = largest(rho)
    sums |= zip(map(square_of, names), table.square_().sum(1), strict=True)
    return Parts(sums, {"rho_max": maximum}, {"rho_min": smallest})


def token_counts(ratio: LogRatio) -> Parts:
    """Token counts for a call without sequences; otherwise `sequence_statistics` counts them."""
    return Parts({"tokens": ratio.valid.sum(), "loss_tokens": ratio.loss_mask.sum()}, {}, {})


class Units(NamedTuple):
    """Sequences or segments, complete over context-parallel ranks. Every tensor is [U], fp64."""

    total: Tensor
    """sum l."""
    mean: Tensor
    """mean l; 0 without valid tokens."""
    mean_rollout: Tensor
    tokens: Tensor
    """Number of valid tokens."""
    loss_tokens: Tensor
    divisor: Tensor
    """tokens, but at least 1."""
    corrupt: Tensor
    """bool: at least one loss token is not valid."""

    @classmethod
    def of(cls, sums: Tensor) -> "Units":
        """From [4, U] as log_ratio_sums returns it."""
        divisor = sums[2].clamp(min=1)
        mean, mean_rollout = (sums[:2] / divisor).unbind()
        return cls(sums[0], mean, mean_rollout, sums[2], sums[3], divisor, sums[2] < sums[3])


class TokenOutcome(NamedTuple):
    """Sums of the final weights per sequence, complete over context-parallel ranks. [S], fp64."""

    weight: Tensor
    """Sum of weights."""
    square: Tensor
    """Sum of squared weights."""
    kept: Tensor
    """Number of kept tokens."""
    any_kept: Tensor
    judged: dict[str, Tensor]
    """name of a bound -> number of tokens beyond it; bounds on whole sequences are not among them."""
    smallest: Tensor
    """0-d, smallest weight of a kept token; inf without any."""
    largest: Tensor

    @classmethod
    def of_sequences(cls, value: Tensor | None, keep: Tensor | None, sequences: Units) -> "TokenOutcome":
        """If all tokens of a sequence share its weight [S] (None: 1) and fate [S] bool (None: kept)."""
        kept = sequences.tokens if keep is None else sequences.tokens * keep
        each = torch.ones_like(kept) if value is None else value
        weight, any_kept = each * kept, kept > 0
        smallest = least(torch.where(any_kept, each, each.new_full((), torch.inf)))
        return cls(weight, weight * each, kept, any_kept, {}, smallest, largest(each * any_kept))

    @classmethod
    def of_tokens(
        cls, weights: Tensor, mask: Tensor, judged: Mapping[str, Tensor], offsets: Tensor, cp_group: Group
    ) -> "TokenOutcome":
        """From weights and mask [N], and the tokens [N] beyond each bound."""
        exact = weights.double()
        table = torch.stack([exact, exact.square(), mask, *judged.values()])
        ((weight, square, kept, *outside),), _ = pool_units([unit_sums(table, offsets)], [], cp_group)
        smallest = least(torch.where(mask, weights, weights.new_full((), torch.inf)))
        judged_tokens = dict(zip(judged, outside, strict=True))
        return cls(weight, square, kept, kept > 0, judged_tokens, smallest, largest(weights))

    def scale_to_mean_one(self, dp_group: Group) -> Tensor:
        """0-d: kept tokens / sum of weights over all data-parallel ranks; 1 if no weight is left."""
        total, kept = all_reduced(torch.stack([self.weight, self.kept]).sum(1), dp_group).unbind()
        return torch.where(total > 0, kept / total, torch.ones_like(total))

    def scaled(self, scale: Tensor) -> "TokenOutcome":
        weight, square = self.weight * scale, self.square * scale.square()
        return self._replace(weight=weight, square=square, smallest=self.smallest * scale, largest=self.largest * scale)


def gap_rows(sequences: Units, bound: float) -> dict[Key, Tensor]:
    """Distances of the policies per sequence, [S], which metrics average."""
    mean, rollout_log_ppl = sequences.mean.clamp(-bound, bound), -sequences.mean_rollout
    capped = sequences.total.clamp(-bound, bound)
    logs = torch.stack([capped, rollout_log_ppl, rollout_log_ppl - mean])
    rho, rollout_ppl, train_ppl = logs.clamp(max=_LARGEST_LOG).exp()
    distance = mean.abs()
    return {
        "seq_rho": rho,
        "seq_dev": capped.expm1(),
        "rollout_log_ppl": rollout_log_ppl,
        "train_log_ppl": logs[2],
        "rollout_ppl": rollout_ppl,
        "train_ppl": train_ppl,
        "mean_abs": distance,
        "sum_abs": distance * sequences.tokens,
        "seq_clamped": capped != sequences.total,
    }


def sequence_statistics(
    sequences: Units, outcome: TokenOutcome | None, judged: Mapping[str, Tensor], bound: float, counts: bool
) -> Parts:
    """Sums and sums of squares over whole sequences, token counts over all of them, extremes of rho(y).

    Args:
        sequences: a sequence counts as whole if it has a loss token and no corrupt one.
        outcome: None where there are no weights.
        judged: name of a bound on whole sequences -> [S] bool, the sequences beyond it.
        counts: True on one context-parallel rank only; the others then add nothing.
    """
    rows = gap_rows(sequences, bound)
    totals: dict[Key, Tensor] = {"tokens": sequences.tokens, "loss_tokens": sequences.loss_tokens}
    totals["bad_sequences"] = sequences.corrupt
    extremes: list[dict[Key, Tensor]] = [{}, {}]
    if outcome is not None:
        totals |= {"weight": outcome.weight, square_of("weight"): outcome.square, "kept": outcome.kept}
        rows |= {"kept_sequences": outcome.any_kept, "all_weight": outcome.weight / sequences.divisor}
        extremes = [{"weight_max": outcome.largest}, {"weight_min": outcome.smallest}]
        for name, tokens in outcome.judged.items():
            totals[Sum(name, part="token")], rows[Sum(name, part="sequence")] = tokens, tokens > 0
        for name, outside in judged.items():
            totals[Sum(name, part="token")] = outside * sequences.tokens
            rows[Sum(name, part="sequence")] = outside
    # at least one token, and none corrupt
    whole = (sequences.tokens > 0) > sequences.corrupt
    everything = torch.stack([*totals.values()])
    if not counts:
        whole, everything = torch.zeros_like(whole), torch.zeros_like(everything)
    table = torch.stack([*rows.values(), whole]) * whole
    sums = dict(zip(totals, everything.sum(1), strict=True))
    sums |= zip((*rows, "sequences"), table.sum(1), strict=True)
    # dividing by False gives inf
    extremes[0]["seq_rho_max"], extremes[1]["seq_rho_min"] = largest(table[0]), least(rows["seq_rho"] / whole)
    sums |= zip((square_of(name) for name in (*rows, "sequences")), table.square_().sum(1), strict=True)
    return Parts(sums, *extremes)


def largest(values: Tensor) -> Tensor:
    """max of values >= 0; 0 if there are none."""
    return values.amax() if values.numel() else values.new_zeros(())


def least(values: Tensor) -> Tensor:
    """min; inf if there are none."""
    return values.amin() if values.numel() else values.new_full((), torch.inf)
