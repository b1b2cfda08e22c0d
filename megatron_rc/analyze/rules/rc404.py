"""RC404: tokens whose experts differ carry the gap."""

import numpy as np

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rule import Level, Rule, Stage, Verdict

LEAST_EXPLAINED = 0.02
"""Least share of the variance of |l| that the shifted experts must explain. It is smaller than in RC303, because the
verdict blames nobody."""


def check(evidence: Evidence) -> Verdict | None:
    profile = evidence.profiles["routes"]
    if len(profile.bins) < 2 or not evidence.significant(evidence.factor_tests.get("routes")):
        return None
    same, moved = np.asarray(profile.bins) == 0, np.asarray(profile.bins) > 0
    if not same.any() or profile.explained < LEAST_EXPLAINED:
        return None
    k3_moved, k3_same = profile.mean_k3(moved), float(profile.k3[same][0])
    share = evidence.excess_share(profile, moved, k3_same)
    return Verdict(
        Level.NUMERICS,
        f"tokens with shifted experts have k3 {k3_moved:.1e}, the others {k3_same:.1e}: expert choice carries "
        f"{share:.0%} of the gap, which route replay removes",
        {"k3_shifted": k3_moved, "k3_same": k3_same, "explained": profile.explained},
        evidence.adjusted[evidence.factor_tests["routes"].name],
        share,
    )


RULE = Rule("RC404", Stage.KNOWN_CAUSE, check, needs=("routes_shifted",))
