"""Formulas of the metrics of a pair of policies: each from pooled sums, so no metric depends on how a batch was cut."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from megatron_rc.correction.measured_upper import UNITS, least_error
from megatron_rc.correction.sums import FACTORS, LAG_BINS, Key, Sum, part_of, square_of
from megatron_rc.correction.weight import MODES

Sums = Mapping[Key, Any]
"""Key -> pooled number, or fp64 tensor on the CPU where a sum is a list."""


class Metric(NamedTuple):
    formula: str
    value: Callable[[Sums], Any]
    needs: Key
    """The sum or maximum without which the metric does not exist."""
    absent_at_zero: bool = False
    """Whether it does not exist either where that sum is 0."""

    def exists(self, s: Sums) -> bool:
        return self.needs in s and not (self.absent_at_zero and s[self.needs] == 0)


def quotient(total: float, count: float) -> float:
    """total / count, NaN where there is nothing to divide by."""
    return total / count if count > 0 else math.nan


def mean(total: Key, *, over: Key, formula: str) -> Metric:
    return Metric(formula, lambda s: quotient(s[total], s[over]), needs=total)


def std(total: str, *, over: str, formula: str) -> Metric:
    square = square_of(total)

    def value(s: Sums) -> float:
        if s[over] > 0 and s.get(f"{total}_min", -math.inf) == s.get(f"{total}_max", math.inf):
            # for equal values the difference below is pure rounding error
            return 0.0
        variance = quotient(s[square], s[over]) - quotient(s[total], s[over]) ** 2
        return math.sqrt(max(0.0, variance)) if s[over] > 0 else math.nan

    return Metric(formula, value, needs=square)


def total(key: Key) -> Metric:
    return Metric("total", lambda s: s[key], needs=key)


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
    "chi2_token": mean(square_of("dev"), over="tokens", formula="mean (rho - 1)^2, chi2(pi||mu) of a token"),
    "chi2_seq": mean(square_of("seq_dev"), over="sequences", formula="mean (rho(y) - 1)^2, chi2(pi||mu) of a sequence"),
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
        lambda s: math.sqrt(2 * (1 + quotient(s[square_of("seq_dev")], s["sequences"]))),
        needs=square_of("seq_dev"),
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


@lru_cache
def beyond(bounds: tuple[str, ...]) -> dict[str, Metric]:
    """The two metrics of each bound: the shares of tokens and of sequences beyond it."""
    units = (("token", "token", "tokens"), ("seq", "sequence", "sequences"))
    return {
        f"{name}_{ending}": mean(Sum(name, part=unit), over=all_of_them, formula=f"share of {all_of_them} beyond it")
        for name in bounds
        for ending, unit, all_of_them in units
    }


@lru_cache
def totals_and_means(totals: Sequence[str], means: Sequence[str]) -> dict[str, Metric]:
    """Metrics that are a total, and metrics that are a total divided by a count."""
    of_total = {name: Sum(name, part="total") for name in (*totals, *means)}
    means_of = {name: mean(of_total[name], over=Sum(name, part="count"), formula="total / count") for name in means}
    return {name: total(of_total[name]) for name in totals} | means_of


BY_LAG: dict[str, tuple[str, Callable[[Sums, str], float]]] = {
    "tokens": ("share of tokens of these lags", lambda s, b: quotient(s[part_of("tokens", b)], s["tokens"])),
    "k3": ("k3 over them", lambda s, b: quotient(s[part_of("k3", b)], s[part_of("tokens", b)])),
    "ess_token": (
        "ess_token over them",
        lambda s, b: quotient(s[part_of("rho", b)] ** 2, s[part_of("tokens", b)] * s[part_of(square_of("rho"), b)]),
    ),
    "masked_token": (
        "share of them that no longer counts",
        lambda s, b: 1 - quotient(s[part_of("kept", b)], s[part_of("tokens", b)]),
    ),
}
"""`<name>_lag_<lags>`: formula and value over the tokens of one bin of lags, where lags are given."""
OF_FACTORS: dict[str, Metric] = {}
for _name, _ratio in FACTORS.items():
    OF_FACTORS |= {
        f"{_name}_mean": mean(f"{_name}_rho", over="tokens", formula=f"mean of {_ratio}, before its bound"),
        f"{_name}_ess": ess(f"{_name}_rho", over="tokens", formula=f"ess_token with {_ratio} in place of rho"),
        f"{_name}_k3": mean(f"{_name}_k3", over="tokens", formula=f"k3 of {_ratio}"),
    }
"""Metrics of the two factors, where log-probs by the version that sampled are given."""


def _of_bin(name: str, lags: str) -> Metric:
    formula, value = BY_LAG[name]
    return Metric(formula, lambda s: value(s, lags), needs=part_of("tokens", lags), absent_at_zero=True)


PART_METRICS = OF_FACTORS | {f"{name}_lag_{b}": _of_bin(name, b) for name in BY_LAG for b in LAG_BINS}
