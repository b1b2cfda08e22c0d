"""The logged distribution is not the one that drew the tokens, or not the one that the trainer models."""

import numpy as np

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.factors import LOG_MU_EDGES
from megatron_rc.analyze.rules.rule import Level, Verdict

RATIO_FLOOR = 1e-4
"""A mean ratio closer to 1 than this is not a bug, however many tokens prove it."""
FIRST_ORDER = 2.0
"""|mean rho - 1| of a bug is at least this many k3; independent rounding of either side stays below one k3."""
SIGN_FLOOR = 1.5
"""The same for a mean ratio above 1, which no filter and no leak can cause."""
LEAST_SIGN = 2.0
"""Least z of the mean log-ratio next to a significant mean ratio above 1: it only confirms the sign."""
SURPRISE_FLOOR = 0.005
"""nats; a smaller mean surprise is no bug."""
CERTAIN = 1e-3
"""nats; where the sampler logs exactly 0, an unfiltered trainer is nearer to 0 than this."""


def truncated_or_leaking(evidence: Evidence) -> Verdict | None:
    """RC102 or RC106: the trainer spreads probability over ids that the sampler cannot draw."""
    whole = evidence.whole
    missing = 1 - whole.mean_ratio
    if missing < max(RATIO_FLOOR, FIRST_ORDER * whole.k3) or not evidence.significant(whole.z_ratio):
        return None
    numbers = {"mean_ratio": whole.mean_ratio, "z_rho": whole.z_ratio.z, "kappa": whole.kappa}
    p, share = evidence.adjusted[whole.z_ratio.name], _first_order_share(evidence)
    seen = f"the sampler can draw only {whole.mean_ratio:.2%} of the trainer's probability (kappa {whole.kappa:.1f})"
    truncated = _ends_at_certainty(evidence)
    if truncated is None:
        text = (
            f"{seen}: either its log-probs were renormalised by top-p, top-k or min-p, or the trainer's softmax runs "
            "over more ids (padded vocabulary)"
        )
        return Verdict("RC102", Level.SUSPECT, text, numbers, p, share, one_of=("RC102", "RC106"))
    if truncated:
        text = (
            f"{seen}, and logs exactly 0 where the trainer is not certain: its log-probs were renormalised by top-p, "
            "top-k or min-p, the trainer's were not"
        )
        return Verdict("RC102", Level.BUG, text, numbers, p, share)
    leaked = 1 / whole.mean_ratio - 1
    text = (
        f"{seen}, most where the trainer is unsure and nowhere where it is certain: its softmax runs over ids that do "
        f"not exist (padded vocabulary), which take {leaked:.2%} as much as the real ones"
    )
    return Verdict("RC106", Level.BUG, text, {**numbers, "leaked_mass": leaked}, p, share)


def raw_logs(evidence: Evidence) -> Verdict | None:
    """RC104: the mean ratio and the mean log-ratio are above what any honest log allows."""
    whole = evidence.whole
    excess = whole.mean_ratio - 1
    if excess < max(RATIO_FLOOR, SIGN_FLOOR * whole.k3) or not evidence.significant(whole.z_ratio):
        return None
    if whole.z_log_ratio.z < LEAST_SIGN:
        return None
    return Verdict(
        "RC104",
        Level.BUG,
        f"the mean ratio is {whole.mean_ratio:.4f} and the mean log-ratio {whole.mean_log_ratio:+.4f} nats, both above "
        "what honest logs allow: the log-probs were logged before the temperature",
        {"mean_ratio": whole.mean_ratio, "z_rho": whole.z_ratio.z, "mean_log_ratio": whole.mean_log_ratio},
        evidence.adjusted[whole.z_ratio.name],
        _first_order_share(evidence),
    )


def hidden_sampling(evidence: Evidence) -> Verdict | None:
    """RC103: the tokens surprise the trainer less, or more, than its own entropy says they should."""
    whole = evidence.whole
    if whole.surprise is None or whole.z_surprise is None:
        return None
    if abs(whole.surprise) < SURPRISE_FLOOR or not evidence.significant(whole.z_surprise):
        return None
    kind = (
        "less surprising, as under a hidden top-p, top-k, min-p or a temperature below the trainer's"
        if whole.surprise < 0
        else "more surprising, as under a hidden penalty or a temperature above the trainer's"
    )
    return Verdict(
        "RC103",
        Level.BUG,
        f"the log-probs agree, but the tokens are {abs(whole.surprise):.3f} nats per token {kind}: something that "
        "is not in the logs decided which tokens came",
        {"surprise": whole.surprise, "z_W": whole.z_surprise.z},
        evidence.adjusted[whole.z_surprise.name],
        share=0.0,
    )


def _first_order_share(evidence: Evidence) -> float:
    """Share of mean l^2 that the means of l by logged log-prob explain."""
    profile = evidence.profiles["log_mu"]
    systematic = float((profile.count * profile.log_ratio**2).sum())
    return min(1.0, systematic / evidence.sums.k1_squared) if evidence.sums.k1_squared else 0.0


def _ends_at_certainty(evidence: Evidence) -> bool | None:
    """True where log mu is exactly 0 while the trainer is not certain; None without enough certain tokens."""
    profile = evidence.profiles["log_mu"]
    if profile.bins[-1] > LOG_MU_EDGES.size and profile.count[-1] >= 10:
        return bool(-profile.log_ratio[-1] > max(CERTAIN, 0.02 * -evidence.whole.mean_log_ratio))
    certain = np.asarray(profile.bins) > np.searchsorted(LOG_MU_EDGES, -0.02)
    return None if profile.count[certain].sum() < 10 else False
