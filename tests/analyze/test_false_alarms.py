"""Honest batches are called what they are: every test of a report, every rule, and the report as a whole."""

from collections import Counter, defaultdict

import numpy as np
import pytest
from simulated_dumps import evidence_of, small_honest

from megatron_rc.analyze.rules import judge
from megatron_rc.analyze.rules.rule import Level

LEVEL = 0.05
TRUE_EFFECT = "|l| by logged log-prob"
"""|l| does depend on the log-prob in honest dumps; no rule calls that a bug."""
ONE_SIDED = ("mean l", "alignment")
"""Their p-values are uniform at the edge of what is honest and larger inside of it."""
FEWEST = 400
"""Decided batches from which a rate is compared: a test of few tokens is mostly undecided."""


@pytest.mark.parametrize("batches", [500, pytest.param(10_000, marks=pytest.mark.full)])
def test_false_alarms_of_tests_rules_and_reports_are_within_the_binomial_interval(batches: int) -> None:
    decided: dict[str, list[bool]] = defaultdict(list)
    reports: list[float] = []
    answers: Counter[tuple[str, Level]] = Counter()
    for seed in range(batches):
        evidence = evidence_of(small_honest(seed, length=40))
        for test in evidence.tests:
            if test.p is not None:
                decided[test.name].append(test.p < LEVEL)
        reports.append(min(p for name, p in evidence.adjusted.items() if name != TRUE_EFFECT))
        answers.update((verdict.code, verdict.level) for verdict in judge(evidence).verdicts)

    def upper(rate: float, count: int) -> float:
        return rate + 4 * float(np.sqrt(rate * (1 - rate) / count))

    compared = {name: hits for name, hits in decided.items() if len(hits) >= FEWEST * batches / 1000}
    assert {"z_rho of the dump", "z_W of the dump", "|l| by server", "|l| by position in the response"} <= set(compared)
    for name, hits in compared.items():
        rate, most = float(np.mean(hits)), upper(LEVEL, len(hits))
        assert name == TRUE_EFFECT or rate <= most, f"{name}: {rate:.3f} of {len(hits)}"
        if not name.startswith((*ONE_SIDED, TRUE_EFFECT)):
            assert rate >= 2 * LEVEL - most, f"{name}: {rate:.3f} of {len(hits)}"
    assert np.mean(np.array(reports) < LEVEL) <= upper(LEVEL, batches)
    assert answers["RC501", Level.NUMERICS] >= batches * (1 - upper(0.01, batches))
    for (code, level), count in answers.items():
        assert level is Level.NUMERICS or count <= batches * upper(0.01, batches), f"{code} {level}: {count}"
        assert level is not Level.BUG
