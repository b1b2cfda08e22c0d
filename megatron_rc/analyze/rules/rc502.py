"""RC502: the gap grows with the number of updates since sampling."""

import numpy as np

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rule import Level, Rule, Stage, Verdict


def check(evidence: Evidence) -> Verdict | None:
    profile = evidence.profiles["lag"]
    lags = np.asarray(profile.bins, dtype=float)
    if lags.size < 2 or not evidence.significant(evidence.factor_tests.get("lag")):
        return None
    if float(np.corrcoef(lags, profile.k3)[0, 1]) < 0.3:
        return None
    fresh = float(profile.k3[0])
    share = evidence.excess_share(profile, lags >= 0, fresh)
    return Verdict(
        "RC502",
        Level.LAG,
        f"the gap grows from k3 {fresh:.1e} at {lags[0]:.0f} updates since sampling to "
        f"{profile.k3[-1]:.1e} at {lags[-1]:.0f}: the lag of the policy explains {share:.0%} of the gap",
        {"k3_fresh": fresh, "k3_oldest": float(profile.k3[-1]), "largest_lag": float(lags[-1])},
        evidence.adjusted[evidence.factor_tests["lag"].name],
        share,
    )


RULE = Rule("RC502", Stage.KNOWN_CAUSE, check, needs=("version", "trainer_version"))
