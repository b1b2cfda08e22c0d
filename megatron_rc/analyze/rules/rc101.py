"""RC101: sampler and trainer divide the logits by different temperatures, and the logs say so."""

import numpy as np

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rule import Level, Rule, Stage, Verdict
from megatron_rc.analyze.statistics.decomposition import decompose
from megatron_rc.analyze.statistics.factors import LOG_MU_EDGES

LEAST_EXPLAINED = 0.1
"""Least share of the variance of l that the logged log-prob must explain. Healthy dumps of a real model had at most
0.03."""
PROVES = 0.3
"""Share from which it is a bug. Training makes a policy surer, which is a map as well: of 10 to 18 % at 16 updates.
Temperatures that were off by 0.02 to 0.1 explained 36 to 86 %, and 23 % next to noise as of 4-bit weights."""
TIMES_REGRESSION = 2.0
"""The same in units of mean l^2 / Var(log mu): log mu contains the sampler's noise, so l depends on it anyway."""
LEAST_SIZE = 5e-3
"""nats; least root mean square, over tokens, of mean l by logged log-prob. A temperature wrong by 2 % gives 0.034
(benchmarks/diagnosis/confusion.py); two sides that agree, with logs of 4 decimals, give at most 0.00003, and the
quickstart's 16 ids, whose bf16 rounding is the same at every occurrence, give 0.0018."""
GREW = 3.0
"""Growth of k3 over the steps from which a map that does not prove a bug is that of older weights: a temperature is
there from the first step on. Under a sync that fails k3 grows 11x within 15 steps."""
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
    proved = profile.explained_sign >= PROVES
    grown = decompose(evidence.steps)
    came_later = grown is not None and grown.changed and grown.factor > GREW
    if (evidence.older or came_later) and not proved:
        return None
    edges = np.searchsorted(LOG_MU_EDGES, CONFIDENT, side="right")
    bins = np.asarray(profile.bins)
    likely, rare = (bins >= edges[0]) & (bins < edges[1]), bins < edges[0]
    lean, other = (
        float(np.average(profile.log_ratio[part], weights=profile.count[part])) if part.any() else 0.0
        for part in (likely, rare)
    )
    colder = "below" if lean < 0 else "above"
    sides = f" and {other:+.4f} for rare ones" if lean * other < 0 else ""
    text = (
        f"the logged log-prob alone explains {profile.explained_sign:.0%} of the variance of the log-ratio, which is "
        f"{lean:+.4f} nats for likely tokens{sides}"
    )
    temperature = f"the sampler's temperature is {colder} the trainer's"
    level = Level.BUG if proved and not evidence.older else Level.SUSPECT
    if level is Level.SUSPECT:
        temperature += ", or older weights sampled, which training has made surer since"
    return Verdict(
        level,
        f"{text}: {temperature}",
        {"explained": profile.explained_sign, "mean_log_ratio_of_likely_tokens": lean},
        evidence.adjusted[evidence.sign_test.name],
        profile.explained_sign,
        one_of=() if level is Level.BUG else ("RC101", "RC502"),
    )


RULE = Rule("RC101", Stage.MAP, check, fitted=True)
