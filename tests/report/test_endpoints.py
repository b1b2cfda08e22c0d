"""Collapse, relapse and failure are what the rules say of evaluations that a person read one by one."""

import csv
import math
from pathlib import Path

import pytest
from refusals import refuses

from megatron_rc.report.endpoints import Endpoints, Outcome, failed, outcome, outcome_of

RULES = Endpoints()
CURVES = Path(__file__).parents[1] / "support/data/evaluations_of_stale_and_noisy_runs.csv"
RUNS = list(csv.DictReader(CURVES.open()))
EXACT_FINAL = (0.89 + 0.94 + 0.94) / 3


def judged(*accuracy: float, rules: Endpoints = RULES) -> Outcome:
    return outcome([10 * i for i in range(len(accuracy))], accuracy, rules)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['sampler']}, {run['correction']}, seed {run['seed']}")
def test_measured_runs_have_the_endpoints_that_were_read_from_them(run: dict[str, str]) -> None:
    result = judged(*map(float, run["accuracy"].split()))
    assert result.collapsed_at == (int(run["collapsed_at"]) if run["collapsed_at"] else None)
    assert result.fell_at == (int(run["fell_at"]) if run["fell_at"] else None)
    assert result.relapses == int(run["relapses"])
    if run["failed"]:
        assert failed(result.final, EXACT_FINAL, RULES) == (run["failed"] == "yes")


def test_a_collapse_needs_three_means_to_the_end_and_is_dated_by_the_first() -> None:
    up = [0.9] * 3
    assert judged(*up, 0.3, 0.3, 0.3).collapsed_at is None  # .7 .5 .3: two of three means have fallen
    assert judged(*up, 0.3, 0.3, 0.3, 0.3).collapsed_at == 40  # from the mean .5 of steps 20 to 40
    assert judged(*up, 0.3, 0.3, 0.3, 0.3).reason == "fell"
    recovered = judged(*up, 0.3, 0.3, 0.3, 0.3, 0.9, 0.9, 0.9)
    assert (recovered.collapsed_at, recovered.relapses, recovered.fell_at) == (None, 1, 40)
    again = judged(*up, *[0.3] * 4, *up, *[0.3] * 4)
    assert (again.collapsed_at, again.relapses, again.fell_at) == (110, 1, 40)


def test_a_mean_exactly_the_share_below_the_maximum_has_fallen() -> None:
    # 0.7 * 0.9 = 0.63 up to rounding
    assert judged(*[0.9] * 3, *[0.63] * 5).collapsed_at == 50
    assert judged(*[0.9] * 3, *[0.6301] * 5).collapsed_at is None


def test_the_maximum_is_that_of_means_up_to_the_evaluation_and_one_bad_evaluation_is_no_fall() -> None:
    assert judged(0.9, 0.9, 0.9, 0.3, 0.9, 0.9, 0.9).fell_at is None
    assert judged(*[0.1 * i for i in range(1, 10)]).fell_at is None
    assert judged(0.4, 0.9, 0.4, *[0.4] * 5).fell_at is None  # the best mean is .57, not .9


def test_what_is_not_finite_is_a_collapse_at_its_step() -> None:
    result = judged(0.5, 0.6, math.nan, 0.7)
    assert (result.collapsed_at, result.reason, result.fell_at) == (20, "not finite", 20)
    assert failed(judged(0.5, 0.6, 0.7, math.nan).final, 0.1, RULES)

    records = [{"phase": "rl", "step": i, "eval/accuracy": 0.5, "updates": 1.0, "grad_norm": 1.0} for i in range(8)]
    assert outcome_of(records, RULES).collapsed_at is None
    records[5]["grad_norm"] = None
    assert outcome_of(records, RULES).collapsed_at == 5
    for no_gradient in ({"updates": 0.0}, {"skipped_updates": 1.0}):  # no update, or one that a loss scale skipped
        assert outcome_of([*records[:5], records[5] | no_gradient, *records[6:]], RULES).collapsed_at is None
    records[5]["updates"] = 0.0
    records[6]["eval/accuracy"] = None
    assert outcome_of([{"phase": "warmup", "step": 3, "eval/accuracy": None}, *records], RULES).collapsed_at == 6


def test_a_fall_that_the_run_ends_in_is_neither_collapse_nor_relapse() -> None:
    late = judged(0.9, 0.9, 0.9, 0.9, 0.9, 0.1)
    assert late.fell_at is None
    late = judged(0.9, 0.9, 0.9, 0.9, 0.1, 0.1)
    assert (late.fell_at, late.collapsed_at, late.relapses, late.last_step) == (50, None, 0, 50)


def test_a_run_too_short_for_the_rules_is_refused() -> None:
    refuses("need 6 evaluations or more, got 5", judged, *[0.5] * 5)
    assert judged(*[0.5] * 5, rules=Endpoints(to_end=2)).final == 0.5


@pytest.mark.parametrize("fields", [{"fall": 0.0}, {"failure": 1.0}, {"window": 0}, {"to_end": 0}])
def test_rules_that_cannot_act_are_refused(fields: dict[str, float]) -> None:
    refuses(next(iter(fields)), Endpoints, **fields)


def test_a_run_that_stopped_because_log_probs_were_not_finite_has_collapsed_and_failed() -> None:
    result = outcome_of([{"step": i, "eval/accuracy": 0.5} for i in range(4)], RULES, stopped=True)
    assert (result.collapsed_at, result.reason, result.last_step) == (4, "not finite", 3)
    assert failed(result.final, 0.1, RULES)
