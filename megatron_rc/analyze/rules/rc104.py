"""RC104: the mean ratio and the mean log-ratio are above what any honest log allows."""

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rc102 import RATIO_FLOOR
from megatron_rc.analyze.rules.rule import Level, Rule, Stage, Verdict

SIGN_FLOOR = 1.5
"""A mean ratio above 1 is a bug if it exceeds 1 by this many k3. No filter and no leak can cause it, so the margin over
rounding, which stays below one k3, is smaller than in RC102."""
LEAST_SIGN = 2.0
"""Least z of the mean log-ratio next to a significant mean ratio above 1: it only confirms the sign."""


def check(evidence: Evidence) -> Verdict | None:
    whole = evidence.whole
    excess = whole.mean_ratio - 1
    if excess < max(RATIO_FLOOR, SIGN_FLOOR * whole.k3) or not evidence.significant(whole.z_ratio):
        return None
    if whole.z_log_ratio.z < LEAST_SIGN:
        return None
    return Verdict(
        Level.BUG,
        f"the mean ratio is {whole.mean_ratio:.4f} and the mean log-ratio {whole.mean_log_ratio:+.4f} nats, both above "
        "what honest logs allow: the log-probs were logged before the temperature",
        {"mean_ratio": whole.mean_ratio, "z_rho": whole.z_ratio.z, "mean_log_ratio": whole.mean_log_ratio},
        evidence.adjusted[whole.z_ratio.name],
        evidence.first_order_share,
    )


RULE = Rule("RC104", Stage.HONESTY, check, fitted=True, unfiltered=True)
