"""RC206: turns after the first have far noisier logits."""

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rule import Level, Rule, Stage, Verdict

LEAST_RATIO = 2.5
"""Least noise of later turns over that of the first. Positions that were off by 24 from the second turn on had 3.4 on a
real model and about 10 on a small one, healthy turns 1.0."""
LEAST_Z = 4.0
"""Least standard errors of the difference, with the responses of a prompt as one unit."""


def check(evidence: Evidence) -> Verdict | None:
    chunk = evidence.sample
    turn = chunk.tokens["turn"]
    first = turn == turn.min(initial=0)
    found = evidence.noise.contrast(~first, first)
    if not found.above(LEAST_RATIO, LEAST_Z):
        return None
    k3, k3_first = float(chunk.k3[~first].mean()), float(chunk.k3[first].mean())
    return Verdict(
        Level.BUG,
        f"at equal confidence, turns after the first have {found.ratio:.1f} times the noise of the first (k3 {k3:.1e} "
        f"against {k3_first:.1e}): their positions differ between the sides, or the earlier turns were encoded again "
        "into other ids (RC204)",
        {"noise_ratio": found.ratio, "k3": k3, "k3_first": k3_first},
        share=float(chunk.k3[~first].sum() / chunk.k3.sum()),
        one_of=("RC206", "RC204"),
    )


RULE = Rule("RC206", Stage.LOCATION, check, needs=("turn",), fitted=True)
