"""RC501: a gap that no other rule explains; suspect if it is more than any known rounding gives."""

import math
from statistics import NormalDist

import numpy as np

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules import rc404, rc502
from megatron_rc.analyze.rules.rule import Level, Rule, Stage, Verdict

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


def check(evidence: Evidence) -> Verdict | None:
    whole = evidence.whole
    horizon, typical = evidence.growth.horizon, _typical_noise(evidence)
    known = evidence.has("routes_shifted")
    causes = (("routes", rc404), ("lag", rc502))
    unexplained = not any(name in evidence.profiles and rule.check(evidence) is not None for name, rule in causes)
    limit = LARGEST_TYPICAL if known else LARGEST_SIGMA
    reach = f"; weights of whole sequences are useful up to {evidence.growth.reach}" if math.isfinite(horizon) else ""
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


RULE = Rule("RC501", Stage.NUMERICS, check)
