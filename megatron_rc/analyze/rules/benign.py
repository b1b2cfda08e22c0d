"""Gaps that have a cause, but none to mend in the logs: shifted experts, older weights, numerics."""

from __future__ import annotations

import math

import numpy as np

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rule import Level, Verdict

LEAST_EXPLAINED = 0.02
LARGEST_SIGMA = 0.15
"""Noise of the logits above which a gap without another cause is suspect. Measured (benchmarks/confusion.py): 0.012 of
a bf16 sampler, 0.019 of int8 weights, 0.061 of fp8 weights; 0.28 of one tensor that is converted wrongly."""


def shifted_experts(evidence: Evidence) -> Verdict | None:
    """RC404: tokens whose experts differ carry the gap."""
    profile = evidence.profiles["routes"]
    if len(profile.bins) < 2 or not evidence.significant(evidence.factor_tests.get("routes")):
        return None
    same, moved = np.asarray(profile.bins) == 0, np.asarray(profile.bins) > 0
    if not same.any() or profile.explained < LEAST_EXPLAINED:
        return None
    k3_moved = float(np.average(profile.k3[moved], weights=profile.count[moved]))
    k3_same = float(profile.k3[same][0])
    share = float((profile.count[moved] * (profile.k3[moved] - k3_same)).sum() / evidence.sums.k3)
    return Verdict(
        "RC404",
        Level.NUMERICS,
        f"tokens with shifted experts have k3 {k3_moved:.1e}, the others {k3_same:.1e}: expert choice carries "
        f"{share:.0%} of the gap, which route replay removes",
        {"k3_shifted": k3_moved, "k3_same": k3_same, "explained": profile.explained},
        evidence.adjusted[evidence.factor_tests["routes"].name],
        min(1.0, max(0.0, share)),
    )


def policy_lag(evidence: Evidence) -> Verdict | None:
    """RC502: the gap grows with the number of updates since sampling."""
    profile = evidence.profiles["lag"]
    lags = np.asarray(profile.bins, dtype=float)
    if lags.size < 2 or not evidence.significant(evidence.factor_tests.get("lag")):
        return None
    if float(np.corrcoef(lags, profile.k3)[0, 1]) < 0.3:
        return None
    fresh = float(profile.k3[0])
    share = float((profile.count * (profile.k3 - fresh)).sum() / evidence.sums.k3)
    return Verdict(
        "RC502",
        Level.STALENESS,
        f"the gap grows from k3 {fresh:.1e} at {lags[0]:.0f} updates since sampling to "
        f"{profile.k3[-1]:.1e} at {lags[-1]:.0f}: the lag of the policy explains {max(0.0, share):.0%} of the gap",
        {"k3_fresh": fresh, "k3_oldest": float(profile.k3[-1]), "largest_lag": float(lags[-1])},
        evidence.adjusted[evidence.factor_tests["lag"].name],
        min(1.0, max(0.0, share)),
    )


def numerics(evidence: Evidence) -> Verdict | None:
    """RC501: what no other rule explains; suspect where no rounding is known to give so much."""
    whole = evidence.whole
    horizon = evidence.growth.horizon
    reach = f"; weights of whole sequences are useful up to {horizon:,.0f} tokens" if math.isfinite(horizon) else ""
    seen = f"the gap of k3 {whole.k3:.1e} nats per token is what a noise of {whole.sigma:.3f} on every logit gives"
    large = whole.sigma > LARGEST_SIGMA and not _explained(evidence)
    return Verdict(
        "RC501",
        Level.SUSPECT if large else Level.NUMERICS,
        f"{seen}, and rounding to 16 or 8 bits gives less than {LARGEST_SIGMA}: a tensor may be converted wrongly, or "
        f"the weights that sampled may be older than the dump says{reach}"
        if large
        else f"{seen}{reach}",
        {"k3": whole.k3, "sigma": whole.sigma, "horizon": horizon},
        share=None,
    )


def _explained(evidence: Evidence) -> bool:
    """True where shifted experts or the lag of the policy explain the gap."""
    causes = (("routes", shifted_experts), ("lag", policy_lag))
    return any(name in evidence.profiles and rule(evidence) is not None for name, rule in causes)
