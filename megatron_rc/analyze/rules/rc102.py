"""RC102: the log-probs of one side were renormalised over the ids that a filter kept."""

from dataclasses import replace

import numpy as np

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rule import Level, Rule, Stage, Verdict
from megatron_rc.analyze.statistics.factors import LOG_MU_EDGES

RATIO_FLOOR = 1e-4
"""A mean ratio closer to 1 than this is harmless, however many tokens prove it: filters and padding that matter move it
by more."""
FIRST_ORDER = 2.0
"""|mean rho - 1| of a bug is at least this many k3. Independent rounding of either side stays below one k3, and a cause
of first order moves it by many."""
LARGEST_PADDING = 3e-3
"""Largest missing mass that padded ids are blamed for: they have the logits of untrained rows, and training pushes them
down."""
CERTAIN = 1e-3
"""nats; where the sampler logs exactly 0, an unfiltered trainer is nearer to 0 than this."""


def undrawable(evidence: Evidence) -> tuple[Verdict | None, bool | None]:
    """The verdict that the sampler cannot draw all of the trainer's probability, which RC102 or RC106 causes, and
    whether its logs were truncated; None where these data do not say."""
    whole = evidence.whole
    missing = 1 - whole.mean_ratio
    if missing < max(RATIO_FLOOR, FIRST_ORDER * whole.k3) or not evidence.significant(whole.z_ratio):
        return None, None
    text = f"the sampler can draw only {whole.mean_ratio:.2%} of the trainer's probability (kappa {whole.kappa:.1f})"
    numbers = {"mean_ratio": whole.mean_ratio, "z_rho": whole.z_ratio.z, "kappa": whole.kappa}
    p, share = evidence.adjusted[whole.z_ratio.name], evidence.first_order_share
    truncated = _ends_at_certainty(evidence)
    if truncated is False and missing > LARGEST_PADDING:
        # a top-k or a grammar leaves certain tokens alone, too
        truncated = None
    return Verdict(Level.BUG, text, numbers, p, share), truncated


def _ends_at_certainty(evidence: Evidence) -> bool | None:
    """Whether log mu is exactly 0 where the trainer is not certain; None without enough certain tokens."""
    profile = evidence.profiles["log_mu"]
    if profile.bins[-1] > LOG_MU_EDGES.size and profile.count[-1] >= 10:
        return bool(-profile.log_ratio[-1] > max(CERTAIN, 0.02 * -evidence.whole.mean_log_ratio))
    certain = np.asarray(profile.bins) > np.searchsorted(LOG_MU_EDGES, -0.02)
    return None if profile.count[certain].sum() < 10 else False


def check(evidence: Evidence) -> Verdict | None:
    verdict, truncated = undrawable(evidence)
    if verdict is None or truncated is False:
        return None
    if truncated is None:
        cause = (
            "either its log-probs were renormalised by top-p, top-k, min-p or a grammar, or the trainer's softmax runs "
            "over more ids (padded vocabulary)"
        )
        return replace(verdict, sentence=f"{verdict.sentence}: {cause}", one_of=("RC102", "RC106"))
    cause = "its log-probs were renormalised by top-p, top-k or min-p, the trainer's were not"
    sentence = f"{verdict.sentence}, and logs exactly 0 where the trainer is not certain: {cause}"
    return replace(verdict, sentence=sentence)


RULE = Rule("RC102", Stage.HONESTY, check, fitted=True, unfiltered=True)
