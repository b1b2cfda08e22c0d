"""RC108: the logs are log-probs of another base, or rounded so coarsely that the rounding is the gap."""

import math

import numpy as np

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rule import TRIED, Level, Rule, Stage, Verdict
from megatron_rc.analyze.statistics.noise import UNSURE

BASES = {"base 2": 1 / math.log(2), "base 10": 1 / math.log(10)}
"""log mu over log pi under logarithms of another base."""
SAME = 0.02
"""Relative distance of the median of log mu / log pi from such a factor: a temperature makes no constant factor."""
DECIMALS = (1, 2, 3)
"""Decimals of logs whose rounding can be as large as the gap of a 16-bit sampler."""
ON_GRID = 0.999
"""Share of the logged values that lie on the grid."""
VALUES = 20
"""Different values of the grid that are needed: a filler has one."""
PROVES = 0.3
"""Share of mean l^2 that the rounding explains at least."""


def check(evidence: Evidence) -> Verdict | None:
    sample = evidence.sample
    doubtful = (1 - np.exp(np.minimum(sample.log_pi, 0)) > UNSURE) & np.isfinite(sample.log_pi)
    if doubtful.sum() < TRIED.tokens // 10:
        return None
    log_mu, log_pi = sample.log_mu[doubtful], sample.log_pi[doubtful]
    ratios = log_mu / log_pi
    middle, low, high = (float(np.quantile(ratios, q)) for q in (0.5, 0.05, 0.95))
    for base, factor in BASES.items():
        if abs(middle / factor - 1) < SAME and 0.8 * factor < low and high < 1.25 * factor:
            return Verdict(
                "RC108",
                Level.BUG,
                f"log mu is {middle:.4f} times log pi at nearly every token: the sampler's logs are in {base}",
                {"factor": middle},
            )
    return _rounded(log_mu, sample.log_ratio[doubtful])


def _rounded(log_mu: np.ndarray, log_ratio: np.ndarray) -> Verdict | None:
    for decimals in DECIMALS:
        step = 10.0**-decimals
        on_grid = np.abs(log_mu / step - np.round(log_mu / step)) < 1e-3
        if on_grid.mean() < ON_GRID or np.unique(np.round(log_mu / step)).size < VALUES:
            continue
        share = step**2 / 12 / max(float(np.square(log_ratio).mean()), 1e-300)
        if share < PROVES:
            return None
        return Verdict(
            "RC108",
            Level.BUG,
            f"log mu is rounded to {decimals} decimal{'s' * (decimals > 1)}, which makes {min(share, 1):.0%} of the "
            "gap: nothing smaller can be measured with these logs",
            {"decimals": float(decimals)},
            share=min(share, 1.0),
        )
    return None


RULE = Rule("RC108", Stage.COUNTS, check)
