"""The answer of a report in one line, and what a report without a bug excludes."""

from megatron_rc.analyze.diagnosis import Diagnosis
from megatron_rc.analyze.power import CHANCE, FEWEST_TOKENS
from megatron_rc.analyze.rules import rc404, rc501
from megatron_rc.analyze.rules.rule import DOUBTS, Level
from megatron_rc.analyze.statistics.tail import LIMIT

HEADLINES = {
    Level.BUG: "BUG: the two sides do not compute the same thing",
    Level.SUSPECT: "SUSPECT: a bug fits, and an experiment must decide",
    Level.UNDECIDED: "UNDECIDED: a bug fits, and so does the filter of the responses",
    Level.LAG: "LAG: older weights sampled",
    Level.NUMERICS: "NUMERICS: no sign of a bug",
}
OTHER = "NUMERICS: no sign of a bug other than those accepted"
TOO_FEW = "TOO FEW TOKENS TO SAY: no rule found a bug in {tokens:,}, and {fewest:,} are needed"
CANNOT_TELL = "CANNOT TELL: no rule found a bug, but {reason}"
LARGE_K3 = 1e-3
"""nats; from this k3 on, a gap that adds up along the responses or has a heavy tail is not called harmless."""
OFFSET = 0.8
"""Exponent of the growth of the sum of l from which it adds up; noise has 0.5."""
COHERENT = 2.0
"""Coherence along a response that this needs, too: 20 steps of a healthy run had an exponent of 1.5 and a coherence of
1.0, because the later tokens of its answers are less certain."""


def headline(diagnosis: Diagnosis) -> str:
    """The answer in one line, which the numbers below it do not contradict."""
    evidence, level = diagnosis.evidence, diagnosis.level
    if level is not Level.NUMERICS:
        return HEADLINES[level]
    if evidence.whole.tokens < FEWEST_TOKENS:
        return TOO_FEW.format(tokens=evidence.whole.tokens, fewest=FEWEST_TOKENS)
    if any(verdict.code == rc404.RULE.code for verdict in diagnosis.verdicts):
        return HEADLINES[level]
    growth, tail = evidence.growth.exponent, evidence.token_tail.k
    if evidence.whole.k3 > LARGE_K3 and growth >= OFFSET and evidence.growth.coherence > COHERENT:
        return CANNOT_TELL.format(reason=f"the gap adds up along the responses, as t^{growth:.2f}")
    if evidence.whole.k3 > LARGE_K3 and tail > LIMIT and evidence.known.kind != "moe":
        return CANNOT_TELL.format(
            reason=f"a few tokens carry the gap (k-hat {tail:.1f}; --model-kind moe expects that)"
        )
    if rc501.size_doubt(evidence):
        if evidence.known.usual is not None:
            return CANNOT_TELL.format(reason="the gap is larger than what you named explains")
        return CANNOT_TELL.format(reason="a gap of this size needs --precision, --model-kind or --floor")
    return OTHER if diagnosis.judgement.accepted else HEADLINES[level]


def excluded(diagnosis: Diagnosis) -> str:
    """What a report without a bug would have shown; empty where there is a bug."""
    if diagnosis.level in DOUBTS:
        return ""
    found = diagnosis.power
    parts = []
    if found.missing_mass is not None:
        parts.append(f"{found.missing_mass:.2g} of the probability that cannot be drawn")
    if found.surprise is not None and found.temperature is not None:
        parts.append(f"hidden sampling of {found.surprise:.2g} nats (a temperature off by {found.temperature:.1%})")
    if found.server is not None:
        parts.append(f"another set of weights on a server with {found.server:.1%} of the tokens")
    tests = sum(test.p is not None for test in diagnosis.evidence.tests)
    ran = f"{tests} tests ran on {diagnosis.evidence.whole.tokens:,} tokens."
    if not parts:
        return f"{ran} A few large ratios decide them, so they exclude neither filters nor a hidden temperature."
    shown = "; ".join(parts)
    return f"{ran} With a chance of {CHANCE:.0%} they would have shown {shown}. Smaller faults are not excluded."
