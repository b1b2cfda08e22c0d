"""RC205: the noise of the logits is large at the start of a response and decays."""

import numpy as np

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rule import Level, Rule, Stage, Verdict

LEAST_RATIO = 2.2
"""Least noise in the first eighth of the tokens by position, over that in the last half. Another prompt had 2.8 on a
real model and 6.9 on a small one. Healthy dumps had at most 1.45, with 4-bit weights, and a policy that was eight
updates older 1.7, so a prompt without its system message (1.5) cannot be told from those."""
LEAST_Z = 4.0
"""Least standard errors of the difference, with the responses of a prompt as one unit."""


def check(evidence: Evidence) -> Verdict | None:
    chunk = evidence.sample
    position = chunk.tokens["position"]
    ordered = np.sort(position)
    # the first token of all responses of a prompt has one context: one rounding there is seen once per response
    start = (position > 0) & (position <= ordered[ordered.size // 8])
    rest = position > ordered[ordered.size // 2]
    found = evidence.noise.contrast(start, rest)
    if not evidence.significant(evidence.factor_tests.get("position")) or not found.above(LEAST_RATIO, LEAST_Z):
        return None
    first, later = float(chunk.k3[start].mean()), float(chunk.k3[rest].mean())
    return Verdict(
        Level.BUG,
        f"at equal confidence the noise in the first eighth of the tokens by position is {found.ratio:.1f} times that "
        f"in the last half (k3 {first:.1e} against {later:.1e}): the two sides see different prompts, and the shared "
        "response slowly outweighs them",
        {"noise_ratio": found.ratio, "k3_start": first, "k3_rest": later},
        evidence.adjusted[evidence.factor_tests["position"].name],
    )


RULE = Rule("RC205", Stage.PROMPT, check, fitted=True)
