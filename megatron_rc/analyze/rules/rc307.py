"""RC307: the sides differ as weights do that training has moved: an adapter, older weights, a tensor of its own."""

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rule import Level, Rule, Stage, Verdict

PERSISTENCE, SPREAD = 0.2, 1.45
"""From 16 bits on both sides: share of the variance of the noise that the id explains across prompts, and its root mean
square over its typical size. Healthy 16-bit dumps of real models had at most 0.19 and 1.41, a mixture of experts a
spread of 5; weights that were eight updates old 0.23 to 0.64 and 1.7 to 2.1."""
CERTAIN_PERSISTENCE = 0.45
"""Where the precision is not known: weights in 4 bits reach 0.38, a bias on every 16th id 0.78."""
LEAST_K3 = 1e-3
"""nats; a smaller gap harms nobody."""
LEAST_ERRORS = 4.0
"""Standard errors by which the persistence exceeds 0."""


def check(evidence: Evidence) -> Verdict | None:
    if evidence.older or evidence.whole.k3 < LEAST_K3:
        return None
    noise, found, known = evidence.noise, evidence.persistence, evidence.known
    if found.share < LEAST_ERRORS * found.error:
        return None
    # the noise of logits is known up to the temperature that divided them
    usual = known.usual if evidence.has("temperature") else None
    signs = [
        (
            found.share - found.error >= PERSISTENCE,
            f"ids err alike in different prompts ({found.share:.0%} of the variance)",
        ),
        (noise.spread >= SPREAD, f"few logits are far off (spread {noise.spread:.1f})"),
        (usual is not None and noise.typical > usual, f"every logit is off by {noise.typical:.2f}"),
    ]
    seen = [text for holds, text in signs if holds]
    certain = found.share >= CERTAIN_PERSISTENCE and noise.spread >= SPREAD
    if not certain and not (known.fine and len(seen) >= 2):
        return None
    return Verdict(
        Level.SUSPECT,
        f"{' and '.join(seen)}, as rounding does not: one side lacks what the other has learned (an adapter, a tensor, "
        "the last updates) or a part of the prompt, or adds a bias to some ids",
        {"persistence": found.share, "spread": noise.spread, "noise": noise.typical},
        one_of=("RC307", "RC205", "RC305", "RC105"),
    )


RULE = Rule("RC307", Stage.WEIGHTS, check, needs=("token_id",), fitted=True)
