"""Metrics of a pair of policies: names, formulas, and the pooled sums that they are computed from.

A call leaves sums and maxima on the device (`MetricSums`). They are merged over micro-batches and reduced over DP x CP,
and only `values` divides, so no metric depends on how the batch was cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.collectives import Group, all_reduced
from megatron_rc.correction.measured_upper import UNITS, least_error
from megatron_rc.correction.reference.sums import Parts, Statistics, square_of
from megatron_rc.correction.warnings import check_k3
from megatron_rc.correction.weight import MODES

Sums = Mapping[str, Any]
"""Name -> pooled number, or fp64 tensor on the CPU where a sum is a list."""


class Metric(NamedTuple):
    formula: str
    value: Callable[[Sums], Any]
    needs: str
    """The sum or maximum without which the metric does not exist."""

    def exists(self, s: Sums) -> bool:
        """Whether there is what the metric needs; a bin of lags needs a token."""
        return self.needs in s and not (self.needs.startswith("lag_tokens:") and s[self.needs] == 0)


def quotient(total: float, count: float) -> float:
    """total / count, NaN where there is nothing to divide by."""
    return total / count if count > 0 else math.nan


def mean(total: str, *, over: str, formula: str) -> Metric:
    return Metric(formula, lambda s: quotient(s[total], s[over]), needs=total)


def std(total: str, *, over: str, formula: str) -> Metric:
    square = square_of(total)

    def value(s: Sums) -> float:
        if s[over] > 0 and s.get(f"{total}_min", -math.inf) == s.get(f"{total}_max", math.inf):
            # of equal numbers the difference below has only rounding left
            return 0.0
        variance = quotient(s[square], s[over]) - quotient(s[total], s[over]) ** 2
        return math.sqrt(max(0.0, variance)) if s[over] > 0 else math.nan

    return Metric(formula, value, needs=square)


def extreme(name: str, *, over: str, formula: str) -> Metric:
    return Metric(formula, lambda s: s[name] if s[over] > 0 else math.nan, needs=name)


def ess(weight: str, *, over: str, formula: str) -> Metric:
    """Effective sample size, as a share of the number of samples."""
    square = square_of(weight)
    return Metric(formula, lambda s: quotient(s[weight] ** 2, s[over] * s[square]), needs=square)


def divergence(total: Callable[[Sums], float], *, formula: str) -> Metric:
    """A mean over tokens of something that is never negative."""
    # an exact 0 may come out as -1e-18 in the difference of two sums
    return Metric(formula, lambda s: quotient(max(0.0, total(s)), s["tokens"]), needs="rho_log_ratio")


def _corrupt(s: Sums) -> float:
    return float(s["loss_tokens"] - s["tokens"])


def _correlation(s: Sums) -> float:
    n = s["tokens"]
    spreads = [n * s[square_of(x)] - s[x] ** 2 for x in "pq"]
    # for equal probabilities only rounding is left
    if any(spread <= 1e-14 * n * s[square_of(x)] for spread, x in zip(spreads, "pq", strict=True)):
        return math.nan
    return (n * s["p_q"] - s["p"] * s["q"]) / math.sqrt(spreads[0] * spreads[1])


def _largest_distance(s: Sums) -> float:
    """max |l|: that of the smallest or of the largest rho, whose logs are clamped as all others are."""
    if not s["tokens"] > 0:
        return math.nan
    return max(math.log(s["rho_max"]), -math.log(s["rho_min"])) if s["rho_min"] > 0 else math.inf


METRICS: dict[str, Metric] = {
    "k1": Metric("mean(-l), KL(mu||pi)", lambda s: quotient(-s["log_ratio"], s["tokens"]), needs="log_ratio"),
    "k3": divergence(lambda s: s["dev"] - s["log_ratio"], formula="mean(e^l - 1 - l), KL(mu||pi)"),
    "k3_pi_mu": divergence(lambda s: s["rho_log_ratio"] - s["dev"], formula="mean(rho l - (rho - 1)), KL(pi||mu)"),
    "log_ratio_abs": mean("log_ratio_abs", over="tokens", formula="mean |l|"),
    "log_ratio_abs_max": Metric("max |l|", _largest_distance, needs="rho_max"),
    "tv": Metric("mean|rho - 1| / 2, total variation", lambda s: quotient(s["dev_abs"] / 2, s["tokens"]), "dev_abs"),
    "binary_tv": mean("prob_gap", over="tokens", formula="mean|p - q|"),
    "chi2_token": mean("square:dev", over="tokens", formula="mean (rho - 1)^2, chi2(pi||mu) of a token"),
    "chi2_seq": mean("square:seq_dev", over="sequences", formula="mean (rho(y) - 1)^2, chi2(pi||mu) of a sequence"),
    "ess_token": ess("rho", over="tokens", formula="(sum rho)^2 / (n sum rho^2)"),
    "ess_seq": ess("seq_rho", over="sequences", formula="(sum rho(y))^2 / (S sum rho(y)^2)"),
    "rho_mean": mean("rho", over="tokens", formula="mean rho"),
    "rho_std": std("dev", over="tokens", formula="sqrt(mean rho^2 - (mean rho)^2)"),
    "rho_min": extreme("rho_min", over="tokens", formula="min rho"),
    "rho_max": extreme("rho_max", over="tokens", formula="max rho"),
    "seq_rho_mean": mean("seq_rho", over="sequences", formula="mean rho(y)"),
    "seq_rho_std": std("seq_dev", over="sequences", formula="sqrt(mean rho(y)^2 - (mean rho(y))^2)"),
    "seq_rho_min": extreme("seq_rho_min", over="sequences", formula="min rho(y)"),
    "seq_rho_max": extreme("seq_rho_max", over="sequences", formula="max rho(y)"),
    "suggested_seq_cap": Metric(
        "sqrt(2 (1 + chi2_seq)), the truncation bound of least mean squared error",
        lambda s: math.sqrt(2 * (1 + quotient(s["square:seq_dev"], s["sequences"]))),
        needs="square:seq_dev",
    ),
    "train_log_ppl": mean("train_log_ppl", over="sequences", formula="mean_i(-mean_t log pi)"),
    "rollout_log_ppl": mean("rollout_log_ppl", over="sequences", formula="mean_i(-mean_t log mu)"),
    "train_ppl": mean("train_ppl", over="sequences", formula="mean_i exp(-mean_t log pi)"),
    "rollout_ppl": mean("rollout_ppl", over="sequences", formula="mean_i exp(-mean_t log mu)"),
    "log_ppl_diff": Metric(
        "mean_i(-mean_t l) = train_log_ppl - rollout_log_ppl",
        lambda s: quotient(s["train_log_ppl"] - s["rollout_log_ppl"], s["sequences"]),
        needs="train_log_ppl",
    ),
    "log_ppl_abs_diff": mean("mean_abs", over="sequences", formula="mean_i |mean_t l|"),
    "log_ppl_abs_diff_sum": mean("sum_abs", over="sequences", formula="mean_i |sum_t l|, arXiv 2602.01826 eq. 7-8"),
    "f2": mean("beyond_2", over="tokens", formula="share of tokens with max(rho, 1 / rho) > 2"),
    "prob_correlation": Metric("Pearson correlation of p and q over tokens", _correlation, needs="p_q"),
    "clamped_token": mean("clamped", over="tokens", formula="share of tokens with |l| > log_ratio_bound"),
    "clamped_seq": mean("seq_clamped", over="sequences", formula="share of sequences with |sum_t l| > log_ratio_bound"),
    "nonfinite_count": Metric("loss tokens with a corrupt log-prob", _corrupt, needs="loss_tokens"),
    "nonfinite_share": Metric(
        "corrupt loss tokens / loss tokens", lambda s: quotient(_corrupt(s), s["loss_tokens"]), needs="loss_tokens"
    ),
    "bad_sequences": Metric("sequences with a corrupt token", lambda s: s["bad_sequences"], needs="bad_sequences"),
    "response_length": Metric(
        "loss tokens / sequences with a loss token",
        lambda s: quotient(s["loss_tokens"], s["sequences"] + s["bad_sequences"]),
        needs="bad_sequences",
    ),
    "weight_mean": mean("weight", over="kept", formula="mean of the final weights over kept tokens"),
    "weight_std": std("weight", over="kept", formula="their standard deviation"),
    "weight_min": extreme("weight_min", over="kept", formula="their minimum"),
    "weight_max": extreme("weight_max", over="kept", formula="their maximum"),
    "ess_token_final": ess("weight", over="tokens", formula="(sum w)^2 / (n sum w^2), n all tokens, w = 0 if masked"),
    "ess_seq_final": ess("all_weight", over="sequences", formula="(sum v_i)^2 / (S sum v_i^2), v_i = mean_t w"),
    "mean_k3": mean("capped_k3", over="tokens", formula="mean min(e^l - 1 - l, 0.5), the K of the gate standardized"),
    "pi_mass_kept": mean("pi_mass_kept", over="judged", formula="Phi(c - m) - Phi(-c - m), m = sqrt(2 T K), by unit"),
    "measured_upper": Metric("C of least error; Weight(upper='measured')", least_error, needs=UNITS),
    "masked_token": Metric(
        "share of tokens that no longer count", lambda s: 1 - quotient(s["kept"], s["tokens"]), needs="kept"
    ),
    "masked_seq": Metric(
        "share of sequences without a kept token", lambda s: 1 - quotient(s["kept_sequences"], s["sequences"]), "kept"
    ),
}
"""Metrics of fixed name. l = log pi - log mu, rho = e^l, rho(y) = exp sum_t l; logs are clamped before exp."""

SHARES = {
    **{
        name: f"rho of the weight's level {side}, mode {mode}"
        for mode, names in MODES.items()
        for name, side in ((names.lower, "< lower"), (names.upper, "> upper"))
        if name
    },
    "staleness_truncated": "train / sampling > staleness_upper",
    "rejected_<gate>": "dropped by the Rejection of that name, whatever other gates decide",
}
"""`<name>_token`: share of tokens; `<name>_seq`: share of sequences with at least one such token."""


class MetricSums:
    """Sufficient statistics of metrics: fp64 sums and maxima on the device.

    `check` and `values` are the only calls that wait for the device.
    """

    def __init__(self, statistics: Statistics | None = None, metrics: Mapping[str, Metric] | None = None) -> None:
        """
        Args:
            statistics: what one call computed; its vector is not copied. None: nothing yet.
            metrics: name -> what is made of them besides METRICS.
        """
        if statistics is None:
            statistics = Statistics((), (), (), torch.empty(0, dtype=torch.float64))
        assert statistics.vector.dtype == torch.float64
        counts = [len(names) for names in statistics[:3]]
        self._sums, self._maxima, self._minima = (
            _Named([_Entry("", name) for name in names], part)
            for names, part in zip(statistics[:3], statistics.vector.split(counts), strict=True)
        )
        self._metrics: Mapping[str, Metric] = METRICS if metrics is None else {**METRICS, **metrics}

    @classmethod
    def of_sums(cls, sums: Mapping[str, Tensor], metrics: Mapping[str, Metric]) -> MetricSums:
        """Sums of any shape, by names that `METRICS` has not, and the metrics made of them once they are pooled."""
        self = cls()
        entries = [_Entry("", name, tuple(value.shape)) for name, value in sums.items()]
        self._sums = _Named(entries, torch.cat([value.reshape(-1).double() for value in sums.values()]))
        self._metrics = {**METRICS, **metrics}
        return self

    @classmethod
    def of_means(cls, means: Mapping[str, tuple[Tensor, Tensor]]) -> MetricSums:
        """Metrics that are a total divided by a count once both are pooled: {name: (total, count)}, 0-d tensors."""
        totals = {f"total:{name}": total for name, (total, _) in means.items()}
        return cls(Parts(totals | {f"count:{name}": count for name, (_, count) in means.items()}, {}, {}).joined())

    def prefixed(self, prefix: str) -> MetricSums:
        """The same statistics under names that start with `prefix`, such as "current/" or "old/"."""
        renamed = MetricSums()
        renamed._metrics = self._metrics
        renamed._sums = self._sums.prefixed(prefix)
        renamed._maxima = self._maxima.prefixed(prefix)
        renamed._minima = self._minima.prefixed(prefix)
        return renamed

    def merge(self, other: MetricSums) -> MetricSums:
        """Add the statistics of other tokens, or of another prefix. Returns self."""
        self._metrics = {**self._metrics, **other._metrics}
        self._sums = self._sums.join(other._sums, torch.add)
        self._maxima = self._maxima.join(other._maxima, torch.maximum)
        self._minima = self._minima.join(other._minima, torch.minimum)
        return self

    def all_reduce(self, group: Group) -> MetricSums:
        """Pool over a process group (DP x CP, or one after the other) in two collectives. Returns self.

        None means no communication; the whole world is `torch.distributed.group.WORLD`. Every rank must hold the same
        metrics. Call it once: a second call on the same group counts everything twice.
        """
        if self._sums.entries:
            self._sums = self._sums._replace(tensor=all_reduced(self._sums.tensor, group))
        if self._maxima.entries or self._minima.entries:
            extremes = torch.cat([self._maxima.tensor, -self._minima.tensor])
            extremes = all_reduced(extremes, group, dist.ReduceOp.MAX)
            self._maxima = self._maxima._replace(tensor=extremes[: len(self._maxima.tensor)])
            self._minima = self._minima._replace(tensor=-extremes[len(self._maxima.tensor) :])
        return self

    def check(self, max_nonfinite_share: float = 0.01, max_k3: float | None = None) -> None:
        """Refuse too many corrupt log-probs, and policies too far apart; the k3 of current_old/ does not count.

        Call it on all ranks after `all_reduce` and before the optimizer step.

        Args:
            max_nonfinite_share: largest share of loss tokens with a NaN or infinite log-prob.
            max_k3: largest mean k3, nats. None: a k3 above 0.1 is logged as a warning, once per process.

        Raises:
            ValueError: a share or a k3 is larger.
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
            if METRICS["k3"].needs in s and not prefix.startswith("current_old/"):
                check_k3(f"{prefix}k3", METRICS["k3"].value(s), max_k3)

    def values(self) -> dict[str, Any]:
        """Name -> number or list by the formulas of `METRICS` and `SHARES`; NaN where nothing can be divided by."""
        out = {}
        for prefix, s in self._fetch().items():
            out.update({prefix + name: metric.value(s) for name, metric in self._metrics.items() if metric.exists(s)})
            for name, total in s.items():
                kind, _, metric_name = name.partition(":")
                if kind == "token":
                    out[f"{prefix}{metric_name}_token"] = quotient(total, s["tokens"])
                elif kind == "seq":
                    out[f"{prefix}{metric_name}_seq"] = quotient(total, s["sequences"])
                elif kind == "sum":
                    out[prefix + metric_name] = total
                elif kind == "total":
                    out[prefix + metric_name] = quotient(total, s[f"count:{metric_name}"])
        return out

    def _fetch(self) -> dict[str, dict[str, Any]]:
        """prefix -> name -> number, or tensor where it is a list."""
        by_prefix: dict[str, dict[str, Any]] = {}
        parts = [part for part in (self._sums, self._maxima, self._minima) if part.entries]
        if not parts:
            return by_prefix
        fetched = _Named(
            [entry for part in parts for entry in part.entries], torch.cat([p.tensor for p in parts]).cpu()
        )
        for entry, value in zip(fetched.entries, fetched.split(), strict=True):
            number = value.view(entry.shape) if entry.shape else value.item()
            by_prefix.setdefault(entry.prefix, {})[entry.name] = number
        return by_prefix


class _Entry(NamedTuple):
    prefix: str
    name: str
    shape: tuple[int, ...] = ()


class _Named(NamedTuple):
    """Statistics that are pooled in one way."""

    entries: list[_Entry]
    tensor: Tensor
    """[K] fp64, the entries one after the other."""

    def split(self) -> tuple[Tensor, ...]:
        """One tensor [n] per entry."""
        return self.tensor.split([math.prod(entry.shape) for entry in self.entries])

    def prefixed(self, prefix: str) -> _Named:
        return _Named([entry._replace(prefix=prefix + entry.prefix) for entry in self.entries], self.tensor)

    def join(self, other: _Named, combine: Callable[[Tensor, Tensor], Tensor]) -> _Named:
        if not self.entries or not other.entries:
            return self if self.entries else other
        if self.entries == other.entries:
            return _Named(self.entries, combine(self.tensor, other.tensor))
        mine = dict(zip(self.entries, self.split(), strict=True))
        for entry, value in zip(other.entries, other.split(), strict=True):
            mine[entry] = combine(mine[entry], value) if entry in mine else value
        return _Named(list(mine), torch.cat(list(mine.values())))
