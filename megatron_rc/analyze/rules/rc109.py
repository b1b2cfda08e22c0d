"""RC109: the sampler's top log-probs say that its draws follow another distribution than the one that it logged."""

from collections.abc import Mapping

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rule import Level, Rule, Stage, Verdict
from megatron_rc.analyze.statistics.draws import NOTHING, SEEN, Outside

NEVER = 0.02
"""Share of the expected draws up to which a filter drops a set: rounding at its edge lets few through."""
TEMPERATURE = 0.02
"""Distance of a temperature from 1 that counts; no sampler rounds logits as coarsely."""
FAR = 1.3
"""Beta from which one step of Newton ends short of it."""
SAME = 0.05
"""Distance of beta from 1 up to which the draws that a filter keeps follow the logs."""


def check(evidence: Evidence) -> Verdict | None:
    if (draws := evidence.draws) is None:
        return None
    significant = {name: one for name, one in draws.items() if evidence.significant(one.test)}
    name = _filter(significant) or (SEEN if _penalised(significant) else "")
    if name:
        found = draws[name]
        what = "beyond " + name if name != SEEN else "of ids that came before"
        why = "the sampler filtered ids after" if name != SEEN else "a penalty on repetitions came after"
        said = (
            f"{found.drawn:,.0f} tokens {what} were drawn where the sampler's own logs promise {found.expected:,.0f}: "
            f"{why} it had logged its log-probs"
        )
        return _verdict(evidence, name, said, {"drawn": found.drawn, "expected": found.expected})
    found = draws[NOTHING]
    if NOTHING not in significant or found.beta <= 0 or abs(1 / found.beta - 1) < TEMPERATURE:
        return None
    error = 2 * found.beta_error / found.beta**2
    times = f"about {1 / found.beta:.2f} (+- {error:.2f})" if found.beta < FAR else f"{1 / found.beta:.2f} or less"
    said = f"tokens were drawn at {times} times the temperature of the logs"
    return _verdict(evidence, NOTHING, said, {"beta": found.beta})


def _filter(significant: Mapping[str, Outside]) -> str:
    """The filter that drops most ids, of those that nothing has passed and whose other draws follow the logs."""
    dropped = {
        name: one.expected
        for name, one in significant.items()
        if name not in (NOTHING, SEEN) and one.share <= NEVER and abs(one.beta - 1) <= max(SAME, 4 * one.beta_error)
    }
    return max(dropped, key=dropped.__getitem__, default="")


def _penalised(significant: Mapping[str, Outside]) -> bool:
    """Whether ids that came before are rarer than the logs say, and the others follow the logs."""
    seen = significant.get(SEEN)
    return seen is not None and abs(seen.beta - 1) <= max(SAME, 4 * seen.beta_error)


def _verdict(evidence: Evidence, name: str, said: str, numbers: dict[str, float]) -> Verdict:
    assert evidence.draws is not None
    test = evidence.draws[name].test
    return Verdict("RC109", Level.BUG, said, numbers, evidence.adjusted[test.name] if test else None)


RULE = Rule("RC109", Stage.HONESTY, check, needs=("draws",), unfiltered=True)
