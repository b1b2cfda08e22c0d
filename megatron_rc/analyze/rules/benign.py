"""Gaps with a cause that is not a bug in the logs: shifted experts, older weights, numerics."""

import math
from statistics import NormalDist

import numpy as np

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rule import Level, Verdict

LEAST_EXPLAINED = 0.02
"""Least share of the variance of |l| that the shifted experts must explain."""
LARGEST_TYPICAL = 0.15
"""Noise of the logits at the typical token above which a gap without another cause is suspect: all tokens are off.
Measured (benchmarks/diagnosis/confusion.py, docs/results.md): 0.014 for a bf16 sampler, 0.019 for int8 weights,
0.058 for fp8 weights; with experts up to 0.023, 0.027 and 0.055; 0.24 for one tensor that is converted wrongly."""
LARGEST_SIGMA = 0.5
"""Noise of the logits over all tokens above which a gap is suspect although the typical token is not off. In a mixture
of experts, tokens with shifted experts carry it: 0.033 to 0.056 were measured in bf16, 0.046 to 0.059 with int8 weights
and 0.12 to 0.15 with fp8 weights (docs/results.md), in models of 2 to 4 layers. Deeper models shift more experts, so
the limit is three times the largest. Where the column routes_shifted excludes that cause, the limit is that of the
typical token."""
UNSURE = 0.01
"""Least 1 - p of the tokens at which the typical noise is measured: below it, a log-prob is mostly rounding."""
FEWEST_UNSURE = 100
"""Such tokens that a typical noise needs; with fewer, the noise over all tokens is used."""


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
    """RC501: a gap that no other rule explains; suspect if it is more than any known rounding gives."""
    whole = evidence.whole
    horizon, typical = evidence.growth.horizon, _typical_noise(evidence)
    known = evidence.has("routes_shifted")
    causes = (("routes", shifted_experts), ("lag", policy_lag))
    unexplained = not any(name in evidence.profiles and rule(evidence) is not None for name, rule in causes)
    limit = LARGEST_TYPICAL if known else LARGEST_SIGMA
    reach = f"; weights of whole sequences are useful up to {horizon:,.0f} tokens" if math.isfinite(horizon) else ""
    text = f"the gap of k3 {whole.k3:.1e} nats per token is what a noise of {whole.sigma:.3f} on every logit gives"
    level = Level.NUMERICS
    experts = "" if known else ", or a mixture of experts shifts more than was measured: routes_shifted decides"
    if unexplained and typical > LARGEST_TYPICAL:
        level = Level.SUSPECT
        text += (
            f" ({typical:.3f} at the typical token), and rounding to 16 or 8 bits gives less than {LARGEST_TYPICAL}: a "
            f"tensor may be converted wrongly, or the weights that sampled may be older than the dump says{experts}"
        )
    elif unexplained and whole.sigma > limit:
        level = Level.SUSPECT
        text += (
            f", but of {typical:.3f} at the typical token: few tokens are far off, as after damage to some responses"
            f"{experts}"
        )
    elif unexplained and whole.sigma > LARGEST_TYPICAL:
        text += (
            f", but of {typical:.3f} at the typical token: few tokens carry it, as shifted experts do in a mixture of "
            "experts (the column routes_shifted decides; in a dense model, look at who explains |l|)"
        )
    numbers = {"k3": whole.k3, "sigma": whole.sigma, "sigma_typical": typical, "horizon": horizon}
    return Verdict("RC501", level, text + reach, numbers, share=None)


def _typical_noise(evidence: Evidence) -> float:
    """Median of |l| / (1 - p) over tokens that are not certain, in units of the median of a normal law."""
    chunk = evidence.sample
    doubt = 1 - np.exp(np.minimum(chunk.log_pi, 0.0))
    unsure = doubt > UNSURE
    if unsure.sum() < FEWEST_UNSURE:
        return evidence.whole.sigma
    return float(np.median(np.abs(chunk.log_ratio[unsure]) / doubt[unsure])) / NormalDist().inv_cdf(0.75)
