"""RC101: sampler and trainer divide the logits by different temperatures, and the logs say so."""

import numpy as np

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rule import Level, Range, Rule, Stage, Verdict
from megatron_rc.analyze.statistics.factors import LOG_MU_EDGES

TRIED = Range(tokens=10_000, surprisal=(0.3, 4.0))
"""A smaller range than that of other rules: temperatures were planted in dumps of 15,000 tokens or more, and in a surer
model a few rare tokens carry the gap."""
LEAST_EXPLAINED = 0.1
"""Least share of the variance of l that the logged log-prob must explain. In a simulation a temperature that is off by
0.02 explains 0.36, noise on logits nothing."""
TIMES_REGRESSION = 2.0
"""The same in units of mean l^2 / Var(log mu): log mu contains the sampler's noise, so l depends on it anyway."""
LEAST_SIZE = 5e-3
"""nats; least root mean square, over tokens, of mean l by logged log-prob. A temperature wrong by 2 % gives 0.034
(benchmarks/diagnosis/confusion.py); two sides that agree, with logs of 4 decimals, give at most 0.00003, and the
quickstart's 16 ids, whose bf16 rounding is the same at every occurrence, give 0.0018."""
CONFIDENT = (-0.7, -0.01)
"""nats; log mu of tokens that are likely but not certain."""


def check(evidence: Evidence) -> Verdict | None:
    profile = evidence.profiles["log_mu"]
    regression = evidence.sums.mean("k1_squared") / max(float(evidence.sample.log_mu.var()), 1e-12)
    if profile.explained_sign < max(LEAST_EXPLAINED, TIMES_REGRESSION * regression) or not evidence.significant(
        evidence.sign_test
    ):
        return None
    if np.sqrt(np.average(profile.log_ratio**2, weights=profile.count)) < LEAST_SIZE:
        return None
    edges = np.searchsorted(LOG_MU_EDGES, CONFIDENT, side="right")
    bins = np.asarray(profile.bins)
    likely = (bins >= edges[0]) & (bins < edges[1])
    lean = float(np.average(profile.log_ratio[likely], weights=profile.count[likely])) if likely.any() else 0.0
    colder = "below" if lean < 0 else "above"
    return Verdict(
        "RC101",
        Level.BUG,
        f"the logged log-prob alone explains {profile.explained_sign:.0%} of the variance of the log-ratio, which is "
        f"{lean:+.4f} nats for likely tokens and has the other sign for rare ones: the sampler's temperature is "
        f"{colder} the trainer's",
        {"explained": profile.explained_sign, "mean_log_ratio_of_likely_tokens": lean},
        evidence.adjusted[evidence.sign_test.name],
        profile.explained_sign,
    )


RULE = Rule("RC101", Stage.MAP, check, tried=TRIED)
