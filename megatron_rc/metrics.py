"""Every metric of a pair of policies: name, formula, pooled sufficient statistics, report values.

A call leaves sums and maxima on the device (`MetricSums`); they are merged over micro-batches and reduced over DP x CP,
and only `values` divides. So no metric depends on how the batch was cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.collectives import all_reduced
from megatron_rc.reference.sums import Parts, Statistics, square_of

Sums = Mapping[str, float]


class Metric(NamedTuple):
    formula: str
    value: Callable[[Sums], float]
    needs: str
    """A sum or maximum without which the metric does not exist."""


def _per(total: float, count: float) -> float:
    return total / count if count > 0 else math.nan


def _mean(total: str, count: str, formula: str) -> Metric:
    return Metric(formula, lambda s: _per(s[total], s[count]), total)


def _nonnegative(total: Callable[[Sums], float], formula: str) -> Metric:
    # an exact 0 may come out as -1e-18 in the difference of two sums
    return Metric(formula, lambda s: _per(max(0.0, total(s)), s["tokens"]), "rho_log_ratio")


def _std(total: str, square: str, count: str, formula: str) -> Metric:
    def variance(s: Sums) -> float:
        return _per(s[square], s[count]) - _per(s[total], s[count]) ** 2

    return Metric(formula, lambda s: math.sqrt(max(0.0, variance(s))) if s[count] > 0 else math.nan, square)


def _extreme(name: str, count: str, formula: str) -> Metric:
    return Metric(formula, lambda s: s[name] if s[count] > 0 else math.nan, name)


def _ess(total: str, square: str, count: str, formula: str) -> Metric:
    return Metric(formula, lambda s: _per(s[total] ** 2, s[count] * s[square]), square)


def _correlation(s: Sums) -> float:
    n = s["tokens"]
    spreads = [n * s[square_of(x)] - s[x] ** 2 for x in "pq"]
    # what is left of equal probabilities is rounding
    if any(spread <= 1e-14 * n * s[square_of(x)] for spread, x in zip(spreads, "pq", strict=True)):
        return math.nan
    return (n * s["p_q"] - s["p"] * s["q"]) / math.sqrt(spreads[0] * spreads[1])


METRICS: dict[str, Metric] = {
    "k1": Metric("mean(-l), KL(mu||pi)", lambda s: _per(-s["log_ratio"], s["tokens"]), "log_ratio"),
    "k3": _nonnegative(lambda s: s["dev"] - s["log_ratio"], "mean(e^l - 1 - l), KL(mu||pi)"),
    "k3_pi_mu": _nonnegative(lambda s: s["rho_log_ratio"] - s["dev"], "mean(rho l - (rho - 1)), KL(pi||mu)"),
    "tv": Metric("mean|rho - 1| / 2, total variation", lambda s: _per(s["dev_abs"] / 2, s["tokens"]), "dev_abs"),
    "binary_tv": _mean("prob_gap", "tokens", "mean|p - q|"),
    "chi2_token": _mean("square:dev", "tokens", "mean (rho - 1)^2, chi2(pi||mu) of a token"),
    "chi2_seq": _mean("square:seq_dev", "sequences", "mean (rho(y) - 1)^2, chi2(pi||mu) of a sequence"),
    "ess_token": _ess("rho", "square:rho", "tokens", "(sum rho)^2 / (n sum rho^2)"),
    "ess_seq": _ess("seq_rho", "square:seq_rho", "sequences", "(sum rho(y))^2 / (S sum rho(y)^2)"),
    "rho_mean": _mean("rho", "tokens", "mean rho"),
    "rho_std": _std("dev", "square:dev", "tokens", "sqrt(mean rho^2 - (mean rho)^2)"),
    "rho_min": _extreme("rho_min", "tokens", "min rho"),
    "rho_max": _extreme("rho_max", "tokens", "max rho"),
    "seq_rho_mean": _mean("seq_rho", "sequences", "mean rho(y)"),
    "seq_rho_std": _std("seq_dev", "square:seq_dev", "sequences", "sqrt(mean rho(y)^2 - (mean rho(y))^2)"),
    "seq_rho_min": _extreme("seq_rho_min", "sequences", "min rho(y)"),
    "seq_rho_max": _extreme("seq_rho_max", "sequences", "max rho(y)"),
    "suggested_seq_cap": Metric(
        "sqrt(2 (1 + chi2_seq)), the truncation bound of least mean squared error",
        lambda s: math.sqrt(2 * (1 + _per(s["square:seq_dev"], s["sequences"]))),
        "square:seq_dev",
    ),
    "train_log_ppl": _mean("train_log_ppl", "sequences", "mean_i(-mean_t log pi)"),
    "rollout_log_ppl": _mean("rollout_log_ppl", "sequences", "mean_i(-mean_t log mu)"),
    "train_ppl": _mean("train_ppl", "sequences", "mean_i exp(-mean_t log pi)"),
    "rollout_ppl": _mean("rollout_ppl", "sequences", "mean_i exp(-mean_t log mu)"),
    "log_ppl_diff": Metric(
        "mean_i(-mean_t l) = train_log_ppl - rollout_log_ppl",
        lambda s: _per(s["train_log_ppl"] - s["rollout_log_ppl"], s["sequences"]),
        "train_log_ppl",
    ),
    "log_ppl_abs_diff": _mean("mean_abs", "sequences", "mean_i |mean_t l|"),
    "log_ppl_abs_diff_sum": _mean("sum_abs", "sequences", "mean_i |sum_t l|, arXiv 2602.01826 eq. 7-8"),
    "f2": _mean("beyond_2", "tokens", "share of tokens with max(rho, 1 / rho) > 2"),
    "prob_correlation": Metric("Pearson correlation of p and q over tokens", _correlation, "p_q"),
    "clamped_token": _mean("clamped", "tokens", "share of tokens with |l| > log_ratio_bound"),
    "clamped_seq": _mean("seq_clamped", "sequences", "share of sequences with |sum_t l| > log_ratio_bound"),
    "nonfinite_count": Metric(
        "loss tokens with a corrupt log-prob", lambda s: s["loss_tokens"] - s["tokens"], "loss_tokens"
    ),
    "nonfinite_share": Metric(
        "corrupt loss tokens / loss tokens",
        lambda s: _per(s["loss_tokens"] - s["tokens"], s["loss_tokens"]),
        "loss_tokens",
    ),
    "bad_sequences": Metric("sequences with a corrupt token", lambda s: s["bad_sequences"], "bad_sequences"),
    "response_length": Metric(
        "loss tokens / sequences with a loss token",
        lambda s: _per(s["loss_tokens"], s["sequences"] + s["bad_sequences"]),
        "bad_sequences",
    ),
    "weight_mean": _mean("weight", "kept", "mean of the final weights over kept tokens"),
    "weight_std": _std("weight", "square:weight", "kept", "their standard deviation"),
    "weight_min": _extreme("weight_min", "kept", "their minimum"),
    "weight_max": _extreme("weight_max", "kept", "their maximum"),
    "ess_token_final": _ess(
        "weight", "square:weight", "tokens", "(sum w)^2 / (n sum w^2), n all tokens, w = 0 if masked"
    ),
    "ess_seq_final": _ess(
        "all_weight", "square:all_weight", "sequences", "(sum v_i)^2 / (S sum v_i^2), v_i = mean_t w"
    ),
    "masked_token": Metric("share of tokens that no longer count", lambda s: 1 - _per(s["kept"], s["tokens"]), "kept"),
    "masked_seq": Metric(
        "share of sequences without a kept token", lambda s: 1 - _per(s["kept_sequences"], s["sequences"]), "kept"
    ),
}
"""Metrics of fixed name. l = log pi - log mu, rho = e^l, rho(y) = exp sum_t l; logs are clamped before exp."""

SHARES = {
    "truncated": "rho of the weight's level > upper, mode truncate",
    "clipped_low": "rho of the weight's level < lower, mode clip",
    "clipped_high": "rho of the weight's level > upper, mode clip",
    "outside_low": "rho of the weight's level < lower, mode mask",
    "outside_high": "rho of the weight's level > upper, mode mask",
    "rejected_<gate>": "dropped by the Rejection of that name, whatever other gates say",
}
"""`<name>_token`: share of tokens; `<name>_seq`: share of sequences with at least one such token."""


class MetricSums:
    """Sufficient statistics of metrics: fp64 sums and maxima on the device.

    `check` and `values` are the only calls that wait for the device.
    """

    def __init__(self, statistics: Statistics | None = None) -> None:
        """
        Args:
            statistics: what one call computed; its vector is not copied. None: nothing yet.
        """
        if statistics is None:
            statistics = Statistics((), (), (), torch.empty(0, dtype=torch.float64))
        assert statistics.vector.dtype == torch.float64
        counts = [len(names) for names in statistics[:3]]
        self._sums, self._maxima, self._minima = (
            _Named([("", name) for name in names], part)
            for names, part in zip(statistics[:3], statistics.vector.split(counts), strict=True)
        )

    @classmethod
    def of_means(cls, means: Mapping[str, tuple[Tensor, Tensor]]) -> MetricSums:
        """Metrics that are a total divided by a count once both are pooled: {name: (total, count)}, 0-d tensors."""
        totals = {f"total:{name}": total for name, (total, _) in means.items()}
        return cls(Parts(totals | {f"count:{name}": count for name, (_, count) in means.items()}, {}, {}).joined())

    def prefixed(self, prefix: str) -> MetricSums:
        """The same statistics, named with `prefix` in front by `values`: "current/", "old/", "current_old/"."""
        renamed = MetricSums()
        renamed._sums = self._sums.prefixed(prefix)
        renamed._maxima = self._maxima.prefixed(prefix)
        renamed._minima = self._minima.prefixed(prefix)
        return renamed

    def merge(self, other: MetricSums) -> MetricSums:
        """Take in the statistics of other tokens, or of another prefix. Returns self."""
        self._sums = self._sums.join(other._sums, torch.add)
        self._maxima = self._maxima.join(other._maxima, torch.maximum)
        self._minima = self._minima.join(other._minima, torch.minimum)
        return self

    def all_reduce(self, group: dist.ProcessGroup | None) -> MetricSums:
        """Pool over a process group (DP x CP, or one after the other) in two collectives. Returns self.

        None means no communication; the whole world is `torch.distributed.group.WORLD`. Every rank must hold the same
        metrics. Call it once: a second call on the same group counts everything twice.
        """
        if self._sums.names:
            self._sums = self._sums._replace(tensor=all_reduced(self._sums.tensor, group))
        if self._maxima.names or self._minima.names:
            extremes = torch.cat([self._maxima.tensor, -self._minima.tensor])
            extremes = all_reduced(extremes, group, dist.ReduceOp.MAX)
            self._maxima = self._maxima._replace(tensor=extremes[: len(self._maxima.names)])
            self._minima = self._minima._replace(tensor=-extremes[len(self._maxima.names) :])
        return self

    def check(self, max_nonfinite_share: float = 0.01) -> None:
        """Call on all ranks after `all_reduce` and before the optimizer step.

        Raises:
            ValueError: a larger share of the loss tokens has a NaN or infinite log-prob.
        """
        for prefix, s in self._fetch().items():
            total = s.get("loss_tokens", 0.0)
            corrupt = total - s.get("tokens", 0.0)
            if corrupt > max_nonfinite_share * total:
                raise ValueError(
                    f"{prefix}nonfinite_share must be <= {max_nonfinite_share!r}, got {corrupt:.0f} of "
                    f"{total:.0f} loss tokens with NaN or infinite log-probs, in "
                    f"{s.get('bad_sequences', math.nan):.0f} sequences (bad_sequences names them)"
                )

    def values(self) -> dict[str, float]:
        """Name -> value by the formulas of `METRICS` and `SHARES`; NaN where there is nothing to divide by."""
        out = {}
        for prefix, s in self._fetch().items():
            out.update({prefix + name: metric.value(s) for name, metric in METRICS.items() if metric.needs in s})
            for name, total in s.items():
                kind, _, metric_name = name.partition(":")
                if kind == "token":
                    out[f"{prefix}{metric_name}_token"] = _per(total, s["tokens"])
                elif kind == "seq":
                    out[f"{prefix}{metric_name}_seq"] = _per(total, s["sequences"])
                elif kind == "total":
                    out[prefix + metric_name] = _per(total, s[f"count:{metric_name}"])
        return out

    def _fetch(self) -> dict[str, dict[str, float]]:
        """prefix -> name -> number."""
        parts = [part for part in (self._sums, self._maxima, self._minima) if part.names]
        numbers = torch.cat([part.tensor for part in parts]).tolist() if parts else []
        by_prefix: dict[str, dict[str, float]] = {}
        for (prefix, name), number in zip((name for part in parts for name in part.names), numbers, strict=True):
            by_prefix.setdefault(prefix, {})[name] = number
        return by_prefix


class _Named(NamedTuple):
    names: list[tuple[str, str]]
    """(prefix, name) of every element."""
    tensor: Tensor
    """[K] fp64."""

    def prefixed(self, prefix: str) -> _Named:
        return _Named([(prefix + old, name) for old, name in self.names], self.tensor)

    def join(self, other: _Named, combine: Callable[[Tensor, Tensor], Tensor]) -> _Named:
        if not self.names or not other.names:
            return self if self.names else other
        if self.names == other.names:
            return _Named(self.names, combine(self.tensor, other.tensor))
        mine = dict(zip(self.names, self.tensor.unbind(), strict=True))
        for name, value in zip(other.names, other.tensor.unbind(), strict=True):
            mine[name] = combine(mine[name], value) if name in mine else value
        return _Named(list(mine), torch.stack(list(mine.values())))
