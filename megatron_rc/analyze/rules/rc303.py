"""RC303: the logits of one server, or of some, are far noisier than those of the others."""

import numpy as np

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rule import Level, Rule, Stage, Verdict

LEAST_RATIO = 2.5
"""Least noise of the place over that elsewhere. A stale server had 3.5 (a real model, eight updates) to 15, two kinds
of cards 1.96, and the loudest of eight healthy servers at most 1.3."""
LEAST_Z = 2.5
"""Least standard errors of the difference, with the responses of a prompt as one unit."""


def check(evidence: Evidence) -> Verdict | None:
    profile = evidence.profiles["server"]
    if len(profile.bins) < 2 or not evidence.significant(evidence.factor_tests.get("server")):
        return None
    servers = evidence.sample.per_token("server")
    found, loud = evidence.noise.loudest(servers)
    if not found.above(LEAST_RATIO, LEAST_Z):
        return None
    names = np.unique(servers[loud]).tolist()
    bins = np.isin(np.asarray(profile.bins), names)
    k3, others = profile.mean_k3(bins), profile.mean_k3(~bins)
    share = evidence.excess_share(profile, bins, others)
    listed = ", ".join(map(str, names))
    who = f"server {listed} has" if len(names) == 1 else f"servers {listed} have"
    return Verdict(
        Level.BUG,
        f"{who} {found.ratio:.1f} times the noise of the others at equal confidence, a k3 of {k3:.1e} against "
        f"{others:.1e}, and {share:.0%} of the gap: other weights are served there",
        {"noise_ratio": found.ratio, "k3": k3, "k3_of_others": others},
        evidence.adjusted[evidence.factor_tests["server"].name],
        share,
    )


RULE = Rule("RC303", Stage.LOCATION, check, needs=("server",), fitted=True)
