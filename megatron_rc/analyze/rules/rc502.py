"""RC502: the dump says that older weights sampled some or all of its tokens."""

import numpy as np

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rule import Level, Rule, Stage, Verdict


def check(evidence: Evidence) -> Verdict | None:
    profile = evidence.profiles["lag"]
    lags = np.asarray(profile.bins, dtype=float)
    if lags.size == 1 and lags[0] > 0:
        updates = "1 update" if lags[0] == 1 else f"{lags[0]:.0f} updates"
        return Verdict(
            Level.LAG,
            f"every token was sampled by weights that were {updates} older, so the gap of k3 {profile.k3[0]:.1e} is "
            "the staleness of the policy together with the noise of the engines; only a fresh dump tells them apart",
            {"k3_oldest": float(profile.k3[0]), "largest_lag": float(lags[0])},
        )
    if lags.size < 2 or not evidence.significant(evidence.factor_tests.get("lag")):
        return None
    if float(np.corrcoef(lags, profile.k3)[0, 1]) < 0.3:
        return None
    fresh = float(profile.k3[0])
    share = evidence.excess_share(profile, lags >= 0, fresh)
    return Verdict(
        Level.LAG,
        f"the gap grows from k3 {fresh:.1e} at {lags[0]:.0f} updates since sampling to "
        f"{profile.k3[-1]:.1e} at {lags[-1]:.0f}: the lag of the policy explains {share:.0%} of the gap",
        {"k3_fresh": fresh, "k3_oldest": float(profile.k3[-1]), "largest_lag": float(lags[-1])},
        evidence.adjusted[evidence.factor_tests["lag"].name],
        share,
    )


RULE = Rule("RC502", Stage.KNOWN_CAUSE, check, needs=("version", "trainer_version"))
