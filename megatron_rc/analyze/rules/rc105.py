"""RC105: ids that came before in the response have a higher log-ratio than new ones, and it adds up."""

import math

import numpy as np

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rule import Level, Rule, Stage, Verdict
from megatron_rc.analyze.statistics.factors import repeated

LEAST = 0.35
"""Least difference of the mean l of repeated and new ids over the root mean square of l, where it also adds up along
the response. Repetition penalties of 1.1 and 1.2 had 1.7 and 2.2, healthy dumps at most 0.35 (weights in 4 bits), whose
sums grow as t^0.66 at most."""
ALONE = 0.7
"""The same where it does not add up."""
GROWTH = 0.8
"""Exponent of the sd of the sum of l from which it adds up: 1.1 under a penalty, at most 0.75 in healthy dumps."""
LEAST_Z = 6.0
"""Least standard errors of the difference, with the responses of a prompt as one unit."""
FEWEST = 50
"""Repeated ids, and new ones, that are needed: a penalty makes repeated ids rare."""


def check(evidence: Evidence) -> Verdict | None:
    seen, log_ratio = repeated(evidence.sample) == 1, evidence.sample.log_ratio
    size = math.sqrt(float(np.square(log_ratio).mean())) if log_ratio.size else 0.0
    if not size or min(int(seen.sum()), int((~seen).sum())) < FEWEST:
        return None
    means, error = evidence.noise.means(log_ratio, seen, ~seen)
    difference = means[0] - means[1]
    z = difference / max(error, 1e-300)
    adds_up = evidence.growth.exponent >= GROWTH
    if z < LEAST_Z or difference < (LEAST if adds_up else ALONE) * size:
        return None
    return Verdict(
        Level.BUG,
        f"the mean log-ratio is {means[0]:+.3f} nats for ids that came before in the response and {means[1]:+.3f} for "
        "new ones: the sampler's logs contain a repetition, presence or frequency penalty, which the trainer does not "
        "apply",
        {"mean_log_ratio_repeated": means[0], "mean_log_ratio_new": means[1], "z": z},
        share=min(1.0, float(seen.mean() * means[0] ** 2 + (~seen).mean() * means[1] ** 2) / size**2),
    )


RULE = Rule("RC105", Stage.PENALTY, check, needs=("token_id",), fitted=True)
