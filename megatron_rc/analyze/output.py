"""A diagnosis as JSON with a stable schema, and as JUnit or GitHub annotations."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from megatron_rc.analyze.accepted import FOR_GOOD, Accepted
from megatron_rc.analyze.conditions import Outcome
from megatron_rc.analyze.diagnosis import Diagnosis
from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.headline import headline
from megatron_rc.analyze.report_text import named
from megatron_rc.analyze.rules.rule import DOUBTS
from megatron_rc.analyze.statistics.decomposition import Decomposition
from megatron_rc.analyze.statistics.honesty import Honesty
from megatron_rc.analyze.statistics.significance import Test
from megatron_rc.analyze.statistics.timeline import Timeline

SCHEMA_VERSION = 2
"""Rises when a key or one of its values changes its meaning or is removed; keys may be added at any time."""
GROWTH = ("exponent", "coherence", "horizon", "ess", "ess_predicted")


def to_dict(diagnosis: Diagnosis, *, share: bool = False, what_if: bool = False) -> dict[str, Any]:
    """The diagnosis in numbers; docs/analyze_json.md says what each key means.

    ``share`` leaves out what may name people, machines or text: path, names of servers, groups, token ids. ``what_if``
    computes what each correction would do; else the key what_if is null.
    """
    evidence = diagnosis.evidence
    return {
        "schema_version": SCHEMA_VERSION,
        "source": "" if share else diagnosis.source,
        "only": [] if share else diagnosis.only,
        "format": diagnosis.format,
        "level": diagnosis.level,
        "headline": headline(diagnosis),
        "power": dataclasses.asdict(diagnosis.power),
        "tokens": evidence.whole.tokens,
        "sequences": evidence.sequences,
        "columns": sorted(evidence.columns),
        "damaged_sequences": evidence.damaged,
        "corrupt_rows": diagnosis.corrupt.count,
        "unreadable_files": diagnosis.corrupt.files,
        "ignored": [] if share else diagnosis.ignored,
        "sampled_tokens": int(evidence.sample.log_pi.size),
        "verdicts": [
            {**dataclasses.asdict(v), **({"sentence": ""} if share else {}), "title": v.page.title}
            for v in diagnosis.verdicts
        ],
        "accepted": [verdict.code for verdict in diagnosis.judgement.accepted],
        "not_run": diagnosis.judgement.not_run,
        "not_judged": diagnosis.judgement.not_judged,
        "outcome_filter": {**dataclasses.asdict(evidence.outcome_filter), "filtered": evidence.outcome_filter.filtered},
        "honesty": _panel(evidence, evidence.whole),
        **{
            f"by_{column}": {name: _panel(evidence, panel) for name, panel in named(column, part, share).items()}
            for column, part in evidence.parts.items()
        },
        "growth": {name: getattr(evidence.growth, name) for name in GROWTH},
        "k_hat": {"tokens": evidence.token_tail.k, "sequences": evidence.sequence_tail.k},
        "decomposition": _decomposition(diagnosis.decomposition),
        "timeline": _timeline(diagnosis.timeline),
        "explained": {
            name: {"explained": profile.explained, **_test(evidence, evidence.factor_tests.get(name))}
            for name, profile in evidence.profiles.items()
        },
        "recommendation": diagnosis.recommendation.to_dict(),
        "what_if": dataclasses.asdict(diagnosis.what_if) if what_if else None,
    }


def to_json(diagnosis: Diagnosis, *, share: bool = False, what_if: bool = False) -> str:
    """``to_dict`` as JSON; a number that is not finite is null."""
    return as_json(to_dict(diagnosis, share=share, what_if=what_if))


def read_baseline(path: Path) -> tuple[Accepted, ...]:
    """The bugs, suspects and undecided answers in the output of an earlier ``--json``, accepted for good.

    Raises ValueError where the file holds no such output.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["verdicts"]
        codes = [verdict["code"] for verdict in found if verdict["level"] in DOUBTS]
        return tuple(Accepted(code, f"it is in {path.name}", FOR_GOOD) for code in codes)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--baseline: {path} is not what `megatron-rc analyze --json` prints ({error!r})") from None


def as_json(values: Any) -> str:
    """Plain values as JSON; a number that is not finite is null."""
    return json.dumps(_finite(values), indent=2)


def junit(outcomes: list[Outcome]) -> str:
    """The conditions as a JUnit test suite."""
    failed, tests = str(sum(not outcome.holds for outcome in outcomes)), str(len(outcomes))
    suite = ElementTree.Element("testsuite", name="megatron-rc analyze", tests=tests, failures=failed)
    for outcome in outcomes:
        case = ElementTree.SubElement(suite, "testcase", name=outcome.condition, classname="megatron_rc.analyze")
        if not outcome.holds:
            # without the control characters that XML forbids
            ElementTree.SubElement(case, "failure", message="".join(filter(str.isprintable, outcome.sentence)))
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


def github(outcomes: list[Outcome]) -> str:
    """The failed conditions as workflow commands of GitHub Actions, one per line."""
    escapes = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
    failed = (outcome.sentence.translate(escapes) for outcome in outcomes if not outcome.holds)
    return "".join(f"::error title=megatron-rc analyze::{text}\n" for text in failed)


def _panel(evidence: Evidence, panel: Honesty) -> dict[str, Any]:
    numbers = {
        field.name: value
        for field in dataclasses.fields(panel)
        if not isinstance(value := getattr(panel, field.name), Test)
    }
    tests = {"z_rho": panel.z_ratio, "z_W": panel.z_surprise, "z_mean_l": panel.z_log_ratio}
    shown = {name: _test(evidence, test) for name, test in tests.items()}
    if evidence.outcome_filter.filtered:
        shown = {name: {**values, "p": None, "undecided": "filtered by outcome"} for name, values in shown.items()}
    return numbers | shown


def _test(evidence: Evidence, test: Test | None) -> dict[str, Any]:
    if test is None:
        return {"z": None, "p": None, "undecided": "not run"}
    return {"z": test.z, "p": evidence.adjusted.get(test.name), "undecided": test.undecided}


def _decomposition(found: Decomposition | None) -> dict[str, Any] | None:
    if found is None:
        return None
    parts = {part.name: {k: v for k, v in part._asdict().items() if k != "name"} for part in found.parts}
    return {**found._asdict(), "before": found.before._asdict(), "after": found.after._asdict(), "parts": parts}


def _timeline(course: Timeline | None) -> dict[str, Any] | None:
    if course is None:
        return None
    return {
        "step": [step.step for step in course.steps],
        "series": course.series,
        "missing": course.missing,
        "jumps": [jump._asdict() for jump in course.jumps],
        "drift": course.drift,
        "lead_lag": [found._asdict() for found in course.lead_lag],
        "surge": course.surge._asdict(),
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
