"""The rules in the order in which they decide: counts, alignment, honesty, map, location, benign causes."""

from collections.abc import Collection
from typing import NamedTuple

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules import alignment, benign, counts, honest, location, maps
from megatron_rc.analyze.rules.rule import DOUBTS, Range, Rule, Verdict

TRIED = Range(tokens=2_000, surprisal=(0.1, 4.0))
"""What benchmarks/diagnosis (confusion.py, false_alarms.py) and the simulated dumps cover: vocabularies of 256 and
4,096, temperatures of 0.7 to 1, sampled in bf16, fp8 or int8 by the embedded engine and SGLang. At an entropy of 2.4,
0.9 and 0.3 nats, seeing a hidden top-p of 0.99 takes 14,000 to 17,000 tokens; a hidden temperature of 0.95 takes
2,200, 5,800 and 14,600 (docs/results.md). A smaller dump without a verdict has not excluded them."""

TRIED_RC101 = Range(tokens=10_000, surprisal=(0.3, 4.0))
"""A smaller range than TRIED: temperatures were planted in dumps of 15,000 tokens or more, and in a surer model a few
rare tokens carry the gap."""

RULES = (
    Rule("RC203", 0, counts.dummy_logprobs),
    Rule("RC201", 1, alignment.shifted),
    Rule("RC102", 2, honest.truncated_or_leaking, calibrated=TRIED, unfiltered=True, also=frozenset({"RC106"})),
    Rule("RC104", 2, honest.raw_logs, calibrated=TRIED, unfiltered=True),
    Rule("RC103", 3, honest.hidden_sampling, ("entropy",), TRIED, unfiltered=True),
    Rule("RC101", 4, maps.temperature, calibrated=TRIED_RC101),
    Rule("RC303", 5, location.one_server, ("server",), TRIED),
    Rule("RC301", 5, location.stale_cache, ("cached_tokens", "prompt_length", "syncs"), TRIED),
    Rule("RC205", 6, location.other_prompt, calibrated=TRIED),
    Rule("RC404", 7, benign.shifted_experts, ("routes_shifted",)),
    Rule("RC502", 7, benign.policy_lag, ("version", "trainer_version")),
    Rule("RC501", 8, benign.numerics),
)
"""Every rule that is judged."""

CODES = frozenset().union(*(rule.codes for rule in RULES))


class Judgement(NamedTuple):
    verdicts: list[Verdict]
    """In the order of the rules."""
    not_run: dict[str, list[str]]
    """Columns that are missing, by rule."""
    not_judged: dict[str, str]
    """The rule whose bug must be fixed first, by rule."""


def judge(evidence: Evidence, *, select: Collection[str] = (), ignore: Collection[str] = ()) -> Judgement:
    """What the rules say: all of them or those in ``select``, without those in ``ignore``; ValueError if unknown."""
    for code in (*select, *ignore):
        if code not in CODES:
            raise ValueError(f"unknown rule {code!r}; known: {', '.join(sorted(CODES))}")
    verdicts: list[Verdict] = []
    not_run: dict[str, list[str]] = {}
    not_judged: dict[str, str] = {}
    bug = ""
    wanted = CODES.intersection(select or CODES).difference(ignore)
    rules = [rule for rule in RULES if rule.codes & wanted]
    for index, rule in enumerate(rules):
        if bug:
            not_judged[rule.code] = bug
        elif missing := [name for name in rule.needs if not evidence.has(name)]:
            not_run[rule.code] = missing
        elif (verdict := rule.verdict(evidence)) is not None and verdict.code in wanted:
            verdicts.append(verdict)
        wrong = [v.code for v in verdicts if v.level in DOUBTS]
        last_of_stage = index + 1 == len(rules) or rules[index + 1].stage > rule.stage
        if wrong and last_of_stage:
            bug = wrong[0]
    return Judgement(verdicts, not_run, not_judged)
