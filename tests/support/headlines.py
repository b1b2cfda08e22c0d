"""Whether the headline of a report contradicts the numbers below it."""

from megatron_rc.analyze.diagnosis import Diagnosis
from megatron_rc.analyze.headline import HEADLINES, headline
from megatron_rc.analyze.report_text import size_lines
from megatron_rc.analyze.rules.rule import DOUBTS, Level


def contradictions(found: Diagnosis) -> list[str]:
    """What the report says that its headline or recommendation denies; empty if nothing."""
    evidence, said, large = found.evidence, headline(found), found.evidence.whole.k3 >= 1e-3
    experts = any(verdict.code == "RC404" for verdict in found.verdicts)
    adds_up = evidence.growth.exponent >= 0.8 and "later tokens are noisier" not in dict(size_lines(evidence))["growth"]
    all_clear = said == HEADLINES[Level.NUMERICS]
    denied = {
        "a rule doubts": all_clear and any(verdict.level in DOUBTS for verdict in found.verdicts),
        # both are NaN where there are too few responses
        "the gap adds up": all_clear and large and not experts and adds_up,
        "few tokens carry it": all_clear and large and not experts and evidence.token_tail.k > 0.7,
        "too few tokens": all_clear and evidence.whole.tokens < 1_000,
        "a bug comes first": ("bug" in found.recommendation.headline) != (found.level is Level.BUG),
        "none at a gap at which runs failed": found.recommendation.method == "none" and evidence.whole.k3 >= 0.012,
    }
    return [what for what, holds in denied.items() if holds]
