"""Rollout correction by the words of its definition: Python floats and loops, nothing shared with the library."""

import itertools
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from correction_cases import Case

from megatron_rc.correction.settings import Rejection, RolloutCorrection

INF = math.inf
LAG_BINS = {
    "0": range(1), "1": range(1, 2), "2_3": range(2, 4), "4_7": range(4, 8), "8_15": range(8, 16),
    "16_up": range(16, 10**9),
}  # fmt: skip


@dataclass
class Book:
    weights: list[float]
    mask: list[bool]
    bad: list[bool]
    metrics: dict[str, float]


def by_the_book(batch: Case, correction: RolloutCorrection, mean_k3: float | None = None) -> Book:
    """``mean_k3``: K of the gate standardized; None: that of this batch."""
    starts = batch.cu_seqlens.tolist()
    sequences = [[t for t in range(a, b) if batch.mask[t]] for a, b in itertools.pairwise(starts)]
    pi, mu = batch.train.double().tolist(), batch.rollout.double().tolist()
    corrupt = {t for tokens in sequences for t in tokens if not (pi[t] <= 1e-3 and -INF < mu[t] <= 1e-3)}
    bad = [any(t in corrupt for t in tokens) for tokens in sequences]
    logs = {t: (batch.train[t] - batch.rollout[t]).item() for tokens in sequences for t in tokens if t not in corrupt}
    sequence_of = {t: i for i, tokens in enumerate(sequences) for t in tokens}
    units = {
        "token": [[t] for tokens in sequences for t in tokens],
        "sequence": sequences,
        "segment": [run for tokens in sequences for run in runs(tokens)],
    }
    units = {level: [[t for t in unit if t in logs] for unit in those] for level, those in units.items()}

    dropped: dict[str, set[int]] = {}
    weights = dict.fromkeys(logs, 1.0)
    gone = set(corrupt)
    larger = any(gate.level != "token" for gate in correction.reject)
    if correction.weight is not None:
        weight = correction.weight
        larger |= weight.level != "token"
        kind = {"clip": "clipped", "mask": "outside"}.get(weight.mode)
        names = (f"{kind}_low", f"{kind}_high") if kind else ("", "truncated")
        for name, bound in zip(names, (weight.lower, weight.upper), strict=True):
            if bound is not None:
                dropped[name] = set()
        shared = "sequence" if weight.level == "geometric" else "token" if weight.level == "prefix" else weight.level
        for unit in units[shared]:
            if not unit:
                continue
            before = [t for t in sequences[sequence_of[unit[0]]] if t <= unit[0]]
            summed = [t for t in before if t in logs] if weight.level == "prefix" else unit
            log = sum(logs[t] for t in summed) / (len(unit) if weight.level in ("geometric", "segment") else 1)
            low, high, top = -INF if weight.lower is None else math.log(weight.lower), INF, weight.upper
            if weight.reads_lags:
                lag = max(batch.lags[t].item() for t in unit)
                for least, upper in weight.upper_by_lag:
                    top = upper if lag >= least else top
            high = INF if top is None else math.log(top)
            if weight.growth == "sqrt_position":
                low, high = (log_bound * math.sqrt(len(before)) for log_bound in (low, high))
            if weight.growth == "sqrt_lag":
                low, high = (log_bound * math.sqrt(max(lag, 1)) for log_bound in (low, high))
            if weight.growth == "confidence":
                (t,) = unit
                high = math.log(1 + (top - 1) * max(1 - math.exp(pi[t]), weight.confidence_floor))
            rho = 0.0 if log == -INF else math.exp(clamp(log, correction))
            rho = min(max(rho, math.exp(low)), math.exp(high))
            for t in unit:
                weights[t] = rho
                if log < low:
                    dropped[names[0]].add(t)
                if log > high:
                    dropped[names[1]].add(t)
        if weight.mode == "mask":
            gone |= set().union(*dropped.values())
    if larger:
        gone |= {t for tokens, is_bad in zip(sequences, bad, strict=True) if is_bad for t in tokens}
    capped = [min(math.expm1(log) - log if log < 700 else INF, 0.5) for log in logs.values()]
    mean_k3 = mean(capped) if mean_k3 is None else mean_k3
    masses = []
    for index, gate in enumerate(correction.reject):
        values = {} if gate.statistic == "standardized" else statistic(batch, gate, logs)
        outside = set()
        for unit in units[gate.level]:
            if not unit:
                continue
            if gate.statistic == "standardized":
                total, mass = standardized(gate, [logs[t] for t in unit], mean_k3)
                masses.append(mass)
            else:
                total = reduce(gate, [values[t] for t in unit])
            scale = math.log if gate.statistic == "ratio" else float
            inside = gate.lower is None or total >= scale(gate.lower)
            inside &= gate.upper is None or total <= scale(gate.upper)
            advantage = batch.advantages[sequence_of[unit[0]]]
            looks = {"always": True, "negative_advantage": advantage < 0, "positive_advantage": advantage > 0}
            if not inside and looks[gate.when]:
                outside |= set(unit)
        repeats = sum(earlier.name == gate.name for earlier in correction.reject[:index])
        dropped[f"rejected_{gate.name}" + (f"#{repeats + 1}" if repeats else "")] = outside
        gone |= outside

    kept = [t for t in logs if t not in gone]
    if correction.normalize == "batch" and sum(weights[t] for t in kept) > 0:
        mean_weight = sum(weights[t] for t in kept) / len(kept)
        weights = {t: w / mean_weight for t, w in weights.items()}
    final = {t: weights[t] if t in set(kept) else 0.0 for t in logs}
    count = len(batch.mask)
    metrics = metrics_by_the_book(logs, pi, mu, sequences, bad, correction)
    metrics |= outcome_by_the_book(final, set(kept), sequences, bad, dropped)
    if batch.lags is not None:
        metrics |= by_lag(logs, batch.lags.tolist(), set(kept), correction)
    if any(gate.statistic == "standardized" for gate in correction.reject):
        metrics |= {"mean_k3": mean(capped), "pi_mass_kept": mean(masses)}
    return Book([final.get(t, 0.0) for t in range(count)], [t in set(kept) for t in range(count)], bad, metrics)


def by_lag(logs: dict[int, float], lags: list[int], kept: set[int], correction: RolloutCorrection) -> dict[str, float]:
    metrics = {}
    for name, lags_of_bin in LAG_BINS.items():
        tokens = [t for t in logs if lags[t] in lags_of_bin]
        if not tokens:
            continue
        ell = [clamp(logs[t], correction) for t in tokens]
        metrics |= {
            f"tokens_lag_{name}": share(len(tokens), len(logs)),
            f"k3_lag_{name}": mean([math.expm1(log) - log for log in ell]),
            f"ess_token_lag_{name}": ess([math.exp(log) for log in ell]),
            f"masked_token_lag_{name}": 1 - share(len(kept & set(tokens)), len(tokens)),
        }
    return metrics


def clamp(log: float, correction: RolloutCorrection) -> float:
    return max(-correction.log_ratio_bound, min(correction.log_ratio_bound, log))


def statistic(batch: Case, gate: Rejection, logs: dict[int, float]) -> dict[int, float]:
    if gate.statistic in batch.statistics:
        return {t: batch.statistics[gate.statistic][t].item() for t in logs}
    if gate.statistic == "lag":
        return {t: float(batch.lags[t]) for t in logs}
    q = {t: math.exp(batch.rollout[t].item()) for t in logs}
    p = {t: math.exp(batch.train[t].item()) for t in logs}
    rho = {t: math.exp(log) for t, log in logs.items()}
    return {
        "ratio": lambda: logs,
        "k2": lambda: {t: log**2 / 2 for t, log in logs.items()},
        "k3": lambda: {t: rho[t] - 1 - log for t, log in logs.items()},
        "abs_log_ratio": lambda: {t: abs(log) for t, log in logs.items()},
        "prob_diff": lambda: {t: p[t] - q[t] for t in logs},
    }[gate.statistic]()


def standardized(gate: Rejection, logs: list[float], mean_k3: float) -> tuple[float, float]:
    """(|z|, share of pi's probability that the gate keeps) of one unit."""
    variance = 2 * len(logs) * mean_k3
    if variance / 2 < 1e-6:
        return 0.0, 1.0
    spread, normal = math.sqrt(variance), NormalDist()
    return abs(sum(logs) + variance / 2) / spread, normal.cdf(gate.upper - spread) - normal.cdf(-gate.upper - spread)


def reduce(gate: Rejection, values: list[float]) -> float:
    if gate.level == "token":
        return values[0]
    return {"sum": sum, "mean": lambda v: sum(v) / len(v), "max": max, "min": min}[gate.reduce](values)


def metrics_by_the_book(
    logs: dict[int, float], pi: list[float], mu: list[float], sequences: list[list[int]], bad: list[bool],
    correction: RolloutCorrection,
) -> dict[str, float]:  # fmt: skip
    ell = {t: clamp(log, correction) for t, log in logs.items()}
    rho = [math.exp(log) for log in ell.values()]
    p, q = [math.exp(pi[t]) for t in logs], [math.exp(mu[t]) for t in logs]
    whole = [tokens for tokens, is_bad in zip(sequences, bad, strict=True) if tokens and not is_bad]
    totals = [sum(logs[t] for t in tokens) for tokens in whole]
    rho_y = [math.exp(clamp(total, correction)) for total in totals]
    means = [clamp(total / len(tokens), correction) for total, tokens in zip(totals, whole, strict=True)]
    rollout_nll = [-mean([mu[t] for t in tokens]) for tokens in whole]
    train_nll = [nll - m for nll, m in zip(rollout_nll, means, strict=True)]
    loss_tokens = sum(len(tokens) for tokens in sequences)
    chi2_seq = mean([(r - 1) ** 2 for r in rho_y])
    spread = std(p) * std(q)
    covariance = mean([(a - mean(p)) * (b - mean(q)) for a, b in zip(p, q, strict=True)])
    return {
        "k1": -mean(list(ell.values())),
        "k3": mean([math.expm1(log) - log for log in ell.values()]),
        "k3_pi_mu": mean([math.exp(log) * log - math.expm1(log) for log in ell.values()]),
        "log_ratio_abs": mean([abs(log) for log in ell.values()]),
        "log_ratio_abs_max": extreme(max, [abs(log) for log in ell.values()]),
        "tv": mean([abs(r - 1) / 2 for r in rho]),
        "binary_tv": mean([abs(a - b) for a, b in zip(p, q, strict=True)]),
        "chi2_token": mean([(r - 1) ** 2 for r in rho]),
        "chi2_seq": chi2_seq,
        "ess_token": ess(rho),
        "ess_seq": ess(rho_y),
        "rho_mean": mean(rho),
        "rho_std": std(rho),
        "rho_min": extreme(min, rho),
        "rho_max": extreme(max, rho),
        "seq_rho_mean": mean(rho_y),
        "seq_rho_std": std(rho_y),
        "seq_rho_min": extreme(min, rho_y),
        "seq_rho_max": extreme(max, rho_y),
        "suggested_seq_cap": math.sqrt(2 * (1 + chi2_seq)),
        "train_log_ppl": mean(train_nll),
        "rollout_log_ppl": mean(rollout_nll),
        "train_ppl": mean([math.exp(nll) for nll in train_nll]),
        "rollout_ppl": mean([math.exp(nll) for nll in rollout_nll]),
        "log_ppl_diff": -mean(means),
        "log_ppl_abs_diff": mean([abs(m) for m in means]),
        "log_ppl_abs_diff_sum": mean([abs(m) * len(tokens) for m, tokens in zip(means, whole, strict=True)]),
        "f2": mean([float(max(r, 1 / r) > 2) for r in rho]),
        "prob_correlation": covariance / spread if spread else math.nan,
        "clamped_token": mean([float(abs(log) > correction.log_ratio_bound) for log in logs.values()]),
        "clamped_seq": mean([float(abs(total) > correction.log_ratio_bound) for total in totals]),
        "nonfinite_count": loss_tokens - len(logs),
        "nonfinite_share": share(loss_tokens - len(logs), loss_tokens),
        "bad_sequences": sum(bad),
        "response_length": share(loss_tokens, sum(bool(tokens) for tokens in sequences)),
    }


def outcome_by_the_book(
    final: dict[int, float], kept: set[int], sequences: list[list[int]], bad: list[bool], dropped: dict[str, set[int]]
) -> dict[str, float]:
    weights = [final[t] for t in final if t in kept]
    whole = [tokens for tokens, is_bad in zip(sequences, bad, strict=True) if tokens and not is_bad]
    metrics = {
        "weight_mean": mean(weights),
        "weight_std": std(weights),
        "weight_min": extreme(min, weights),
        "weight_max": extreme(max, weights),
        "ess_token_final": ess(list(final.values())),
        "ess_seq_final": ess([mean([final[t] for t in tokens]) for tokens in whole]),
        "masked_token": 1 - share(len(kept), len(final)),
        "masked_seq": share(sum(not kept & set(tokens) for tokens in whole), len(whole)),
    }
    for name, tokens in dropped.items():
        metrics[f"{name}_token"] = share(len(tokens), len(final))
        metrics[f"{name}_seq"] = share(sum(bool(tokens & set(one)) for one in whole), len(whole))
    return metrics


def runs(tokens: list[int]) -> list[list[int]]:
    found: list[list[int]] = []
    for t in tokens:
        if found and found[-1][-1] == t - 1:
            found[-1].append(t)
        else:
            found.append([t])
    return found


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def std(values: list[float]) -> float:
    return math.sqrt(mean([(v - mean(values)) ** 2 for v in values])) if values else math.nan


def ess(values: list[float]) -> float:
    squares = sum(v**2 for v in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else math.nan


def extreme(pick: Any, values: list[float]) -> float:
    return pick(values) if values else math.nan


def share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan
