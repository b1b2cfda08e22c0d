"""The rules: one file per code, with its thresholds and its check, next to its page. RULES has all of them."""

import pkgutil
from collections.abc import Collection, Iterator
from importlib import import_module
from typing import NamedTuple

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rule import DOUBTS, Rule, Verdict


def _found() -> Iterator[Rule]:
    for file in pkgutil.iter_modules(__path__, f"{__name__}."):
        if hasattr(module := import_module(file.name), "RULE"):
            yield module.RULE


RULES = {rule.code: rule for rule in sorted(_found(), key=lambda rule: (rule.stage, len(rule.needs), rule.code))}
"""Every rule that is judged, by its code, in the order of judging: by stage, within one those that need fewest columns
first."""


class Judgement(NamedTuple):
    verdicts: list[Verdict]
    """In the order of the rules."""
    not_run: dict[str, list[str]]
    """Columns that are missing, by rule."""
    not_judged: dict[str, str]
    """The rule whose bug must be fixed first, by rule."""
    accepted: list[Verdict]
    """Bugs, suspects and undecided answers that the user has accepted: they decide nothing."""


def judge(evidence: Evidence, *, select: Collection[str] = (), ignore: Collection[str] = ()) -> Judgement:
    """What the rules say: all of them or those in ``select``, without those in ``ignore``; ValueError if unknown."""
    for code in (*select, *ignore):
        check_code(code)
    verdicts: list[Verdict] = []
    accepted: list[Verdict] = []
    agreed = {each.code: each for each in evidence.known.accepted if each.holds}
    not_run: dict[str, list[str]] = {}
    not_judged: dict[str, str] = {}
    bug = ""
    rules = [rule for code, rule in RULES.items() if code in (select or RULES) and code not in ignore]
    for index, rule in enumerate(rules):
        if bug:
            not_judged[rule.code] = bug
        elif missing := [name for name in rule.needs if not evidence.has(name)]:
            not_run[rule.code] = missing
        elif (verdict := rule.verdict(evidence)) is not None:
            (accepted if rule.code in agreed and verdict.level in DOUBTS else verdicts).append(verdict)
        wrong = [v.code for v in verdicts if v.level in DOUBTS]
        wrong += [v.code for v in accepted if agreed[v.code].is_baseline]
        last_of_stage = index + 1 == len(rules) or rules[index + 1].stage > rule.stage
        if wrong and last_of_stage:
            bug = wrong[0]
    return Judgement(verdicts, not_run, not_judged, accepted)


def check_code(code: str) -> None:
    """ValueError unless a rule has this code."""
    if code not in RULES:
        raise ValueError(f"unknown rule {code!r}; known: {', '.join(sorted(RULES))}")
