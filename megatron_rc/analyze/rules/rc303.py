"""RC303: one server's gap is far above that of the others."""

import numpy as np

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rule import TRIED, Level, Rule, Stage, Verdict

LEAST_EXPLAINED = 0.05
"""Least share of the variance of |l| between the values of the column. benchmarks/diagnosis/confusion.py measured 0.19
for a stale server, 0.10 for another template, and at most 0.0014 in healthy dumps."""
TIMES_OTHERS = 3.0
"""Least k3 of the place, as a multiple of k3 elsewhere: hardware and tasks differ by less."""


def check(evidence: Evidence) -> Verdict | None:
    profile = evidence.profiles["server"]
    if len(profile.bins) < 2 or not evidence.significant(evidence.factor_tests.get("server")):
        return None
    worst = int(profile.k3.argmax())
    elsewhere = np.arange(len(profile.bins)) != worst
    others = profile.mean_k3(elsewhere)
    if profile.k3[worst] < TIMES_OTHERS * others or profile.explained < LEAST_EXPLAINED:
        return None
    share = evidence.excess_share(profile, ~elsewhere, others)
    return Verdict(
        "RC303",
        Level.BUG,
        f"server {profile.label(worst)} has k3 {profile.k3[worst]:.1e}, {profile.k3[worst] / max(others, 1e-12):.0f} "
        f"times that of the others, and {share:.0%} of the gap: it serves other weights",
        {"k3": float(profile.k3[worst]), "k3_of_others": others, "explained": profile.explained},
        evidence.adjusted[evidence.factor_tests["server"].name],
        share,
    )


RULE = Rule("RC303", Stage.LOCATION, check, needs=("server",), tried=TRIED)
