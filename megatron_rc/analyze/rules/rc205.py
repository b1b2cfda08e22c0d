"""RC205: the gap is large at the start of a response and decays."""

import numpy as np

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rc303 import LEAST_EXPLAINED, TIMES_OTHERS
from megatron_rc.analyze.rules.rule import TRIED, Level, Rule, Stage, Verdict


def check(evidence: Evidence) -> Verdict | None:
    profile = evidence.profiles["position"]
    if not evidence.significant(evidence.factor_tests.get("position")) or profile.explained < LEAST_EXPLAINED:
        return None
    half = np.cumsum(profile.count) > profile.count.sum() / 2
    start, rest = ~half & (np.cumsum(profile.count) < profile.count.sum() / 8), half
    if not start.any():
        return None
    first, later = (profile.mean_k3(part) for part in (start, rest))
    if first < TIMES_OTHERS * later:
        return None
    return Verdict(
        "RC205",
        Level.BUG,
        f"the gap is k3 {first:.1e} in the first eighth of the tokens by position and {later:.1e} in the last half: "
        "the two sides see different prompts, and the shared response slowly outweighs them",
        {"k3_start": first, "k3_rest": later, "explained": profile.explained},
        evidence.adjusted[evidence.factor_tests["position"].name],
        evidence.excess_share(profile, ~half, later),
    )


RULE = Rule("RC205", Stage.PROMPT, check, tried=TRIED)
