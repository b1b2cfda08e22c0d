"""RC109: the sampler's top log-probs say that its draws follow another distribution than the one that it logged."""

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rule import Level, Rule, Stage, Verdict
from megatron_rc.analyze.statistics.draws import NOTHING, SEEN

NEVER = 0.02
"""Share of the expected draws up to which a filter drops a set: rounding at its edge lets few through."""
TEMPERATURE = 0.02
"""Distance of a temperature from 1 that counts; no sampler rounds logits as coarsely."""
FAR = 1.3
"""Beta from which one step of Newton ends short of it."""
BIAS = 0.1
"""nats; least bias on the logit of one id: 16-bit log-probs promise up to 2 % too many or too few of its draws."""
SAME = 0.05
"""Distance of beta from 1 up to which the draws that a filter keeps follow the logs."""


def check(evidence: Evidence) -> Verdict | None:
    found, one = _of_sets(evidence), evidence.worst_id
    if one is None or abs(one.bias) < BIAS or not evidence.significant(one.test):
        return found
    # of the causes, the score of the true one is furthest from 0 (Cauchy and Schwarz)
    if found is not None and abs(one.test.z) <= found.numbers["z"]:
        return found
    others = f", and so {one.others:,} other ids" if one.others else ""
    return Verdict(
        Level.BUG,
        f"token id {one.token_id} was drawn {one.drawn:,.0f} times where the sampler's own logs promise "
        f"{one.expected:,.0f}{others}: a bias on its logit came after it had logged its log-probs",
        {"token_id": one.token_id, "drawn": one.drawn, "expected": one.expected, "bias": one.bias},
        evidence.adjusted[one.test.name],
    )


def _of_sets(evidence: Evidence) -> Verdict | None:
    """A temperature, a filter or a penalty."""
    if (draws := evidence.draws) is None:
        return None
    significant = {name: one for name, one in draws.items() if evidence.significant(one.test)}
    follow = {name: one for name, one in significant.items() if abs(one.beta - 1) <= max(SAME, 4 * one.beta_error)}
    filters = [name for name, one in follow.items() if name not in (NOTHING, SEEN) and one.share <= NEVER]
    # the filter that drops most ids
    name = max(filters, key=lambda each: draws[each].expected) if filters else SEEN if SEEN in follow else NOTHING
    found = draws[name]
    if name == NOTHING:
        if name not in significant or found.beta <= 0 or abs(1 / found.beta - 1) < TEMPERATURE:
            return None
        error = 2 * found.beta_error / found.beta**2
        times = f"about {1 / found.beta:.2f} (+- {error:.2f})" if found.beta < FAR else f"{1 / found.beta:.2f} or less"
        said, numbers = f"tokens were drawn at {times} times the temperature of the logs", {"beta": found.beta}
    else:
        what = "of ids that came before" if name == SEEN else f"beyond {name}"
        why = "a penalty on repetitions came after" if name == SEEN else "the sampler filtered ids after"
        said = (
            f"{found.drawn:,.0f} tokens {what} were drawn where the sampler's own logs promise {found.expected:,.0f}: "
            f"{why} it had logged its log-probs"
        )
        numbers = {"drawn": found.drawn, "expected": found.expected}
    assert found.test is not None, "a significant set has a test"
    return Verdict(Level.BUG, said, {**numbers, "z": abs(found.test.z)}, evidence.adjusted[found.test.name])


RULE = Rule("RC109", Stage.HONESTY, check, needs=("draws",), unfiltered=True)
