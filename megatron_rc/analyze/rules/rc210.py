"""RC210: log mu is never below log pi, and often far above: it belongs to another token than the drawn one."""

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rc102 import RATIO_FLOOR, undrawable
from megatron_rc.analyze.rules.rule import Level, Rule, Stage, Verdict

FAR = 0.5
"""nats that count as far."""
LEAST_SHARE = 0.01
"""Least share of the tokens with l below -FAR."""
ONE_SIDED = 20
"""Tokens with l below -FAR per token with l above FAR. Honest noise has 2 (16 to 8 bits) to 3 (4 bits) of them."""


def check(evidence: Evidence) -> Verdict | None:
    whole, log_ratio = evidence.whole, evidence.sample.log_ratio
    below, above = float((log_ratio < -FAR).mean()), float((log_ratio > FAR).mean())
    if below < LEAST_SHARE or below < ONE_SIDED * above:
        return None
    if 1 - whole.mean_ratio < RATIO_FLOOR or not evidence.significant(whole.z_ratio) or undrawable(evidence)[0]:
        return None
    return Verdict(
        Level.BUG,
        f"log mu is more than {FAR:g} nats above log pi at {below:.1%} of the tokens and below it at {above:.2%}, and "
        f"the mean ratio is {whole.mean_ratio:.3f}: the logged values are not those of the drawn tokens, perhaps those "
        "of the likeliest ones",
        {"share_above": below, "share_below": above, "mean_ratio": whole.mean_ratio},
        evidence.adjusted[whole.z_ratio.name],
        share=1.0,
    )


RULE = Rule("RC210", Stage.HONESTY, check, fitted=True, unfiltered=True)
