"""RC108: the logs are log-probs of another base, or rounded so coarsely that the rounding is the gap."""

import math

import numpy as np

from megatron_rc.analyze.chunk import k3
from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rule import Level, Rule, Stage, Verdict
from megatron_rc.analyze.statistics.grid import grid

BASES = {"base 2": math.log(2), "base 10": math.log(10)}
"""What logarithms of another base are multiplied by to become natural ones."""
CLOSER = 5.0
"""Factor by which k3 falls at least if log mu is converted. No temperature is undone by a constant factor: the
normaliser changes with every token."""
LEAST_K3 = 1e-3
"""nats; a smaller gap is no other base."""
SAME = 0.1
"""Largest |mean ratio - 1| of the converted logs."""
FEWEST = 200
"""Tokens that are needed."""
PROVES = 0.3
"""Share of mean l^2 that the rounding explains at least."""


def check(evidence: Evidence) -> Verdict | None:
    sample = evidence.sample
    if sample.log_pi.size < FEWEST:
        return None
    for base, factor in BASES.items():
        converted = np.clip(sample.log_pi - factor * sample.log_mu, -50, 50)
        gap = float(k3(converted).mean())
        if max(CLOSER * gap, LEAST_K3) < evidence.whole.k3 and abs(float(np.expm1(converted).mean())) < SAME:
            return Verdict(
                Level.BUG,
                f"read as logarithms of {base}, log mu has a k3 of {gap:.1e} instead of {evidence.whole.k3:.1e}: the "
                "sampler's logs are not natural ones",
                {"k3_converted": gap},
                share=1 - gap / evidence.whole.k3,
            )
    found = grid(sample)
    if found is None or not found.decimals or found.share < PROVES:
        return None
    return Verdict(
        Level.BUG,
        f"log mu is rounded to {found.name}, which makes {found.share:.0%} of the gap: nothing smaller can be measured "
        "with these logs",
        {"decimals": float(found.decimals)},
        share=found.share,
    )


RULE = Rule("RC108", Stage.COUNTS, check)
