"""RC501: a gap that no other rule explains, and what it would be usual for. Its size alone accuses nobody."""

import math

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.known import TRAINED, USUAL
from megatron_rc.analyze.rules import rc404, rc502
from megatron_rc.analyze.rules.rule import Level, Rule, Stage, Verdict


def check(evidence: Evidence) -> Verdict | None:
    lag = rc502.check(evidence) if evidence.older else None
    # where the lag of the policy is the gap, or half of it, its noise is not that of the engines
    if lag is not None and (lag.share is None or lag.share >= 0.5):
        return None
    whole = evidence.whole
    horizon, typical = evidence.growth.horizon, typical_noise(evidence)
    reach = f"; whole-sequence weights work up to {evidence.growth.reach}" if math.isfinite(horizon) else ""
    text = f"the gap (k3 {whole.k3:.1e} nats per token) is what logit noise of {whole.sigma:.3f} would cause"
    if typical < whole.sigma / 2:
        text += f", but of {typical:.3f} at the typical token: few tokens carry it"
        if not evidence.has("routes_shifted"):
            text += ", as shifted experts do in a mixture of experts (the column routes_shifted decides)"
    if doubt := size_doubt(evidence):
        text += f"; {doubt}"
    numbers = {"k3": whole.k3, "sigma": whole.sigma, "sigma_typical": typical, "horizon": horizon}
    return Verdict(Level.NUMERICS, text + reach, numbers, share=None)


def typical_noise(evidence: Evidence) -> float:
    """Noise of a logit at the typical token; over all tokens where too few are unsure."""
    noise = evidence.noise.typical
    return evidence.whole.sigma if math.isnan(noise) else noise


def size_doubt(evidence: Evidence) -> str:
    """What must be known before the size of the gap says anything; empty where it is usual or has a known cause."""
    known, typical = evidence.known, typical_noise(evidence)
    causes = (("routes", rc404), ("lag", rc502))
    if any(name in evidence.profiles and rule.check(evidence) is not None for name, rule in causes):
        return ""
    if known.usual is None:
        if typical <= USUAL["bf16"] or known.kind == "moe":
            return ""
        return (
            "that is large for a dense 16-bit model and usual for experts or 8 bits: --precision, --model-kind, "
            "--floor or the column routes_shifted decides"
        )
    if typical <= known.usual:
        return ""
    against = f"what {known.precision} usually gives"
    if known.usual != TRAINED.get(known.precision):
        against = "three times the measured floor, or the rounding of fp32 (--precision allows for other kernels)"
    return f"that is above {against}, {known.usual:.3g}: compare the weights of both sides tensor by tensor"


RULE = Rule("RC501", Stage.NUMERICS, check)
