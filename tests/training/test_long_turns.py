"""Responses of many turns of the calculator: what the learning-rate rule measures of them."""

import re
from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean
from typing import Any

import pytest

from megatron_rc.batch import TokenBatch
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.engine import Sample, SamplingParams
from megatron_rc.learning_rate.length_decay import LengthDecayLR
from megatron_rc.tasks.calculator import LABELS, CalculatorOptions, CalculatorTask
from megatron_rc.training.step.learning_rate import StepRate
from megatron_rc.training.step.metrics import response_lengths, rollout_metrics
from megatron_rc.training.step.turns import respond

TERMS = 26


class Teacher:
    """Writes the calls of a sum, one per turn, and after ``calls`` of them the total so far as the answer."""

    weight_version = 3

    def __init__(self, task: CalculatorTask, calls: int) -> None:
        self.task, self.calls = task, calls

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, n: int, **_: Any) -> list[Sample]:
        return [self._turn(list(ids)) for ids in prompts for _ in range(n)]

    def _turn(self, ids: list[int]) -> Sample:
        problem, _, written = self.task.decode(ids).partition(":")
        terms = [int(term) for term in re.findall(r"[a-z]([+-]?\d+)", problem)]
        totals, made = list(accumulate(terms)), written.count(";")
        call = f"{LABELS[made + 1]}{totals[made]}{terms[made + 1]:+d}=" if made < self.calls else f"{totals[made]}."
        drawn = self.task.alphabet.encode(call)
        return Sample(ids, drawn, [-0.1 * (1 + token % 7) for token in drawn], "stop", [(3, 0, len(drawn))])


def test_a_surge_of_turns_halves_the_learning_rate() -> None:
    task = CalculatorTask(CalculatorOptions(fewest_terms=TERMS, most_terms=TERMS, max_turns=32))
    params = SamplingParams(max_new_tokens=500, stop_token_ids=task.stop_token_ids)
    measured: list[dict[str, Any]] = []
    per_turn = []
    for calls in (2, TERMS - 1):
        samples = respond(Teacher(task, calls), task, task.prompts(0, 2), params, n=2, seeds=range(4))
        batch = TokenBatch.from_samples(samples, params, rewards=[0.0] * 4, groups=[0, 0, 1, 1])
        measured.append(rollout_metrics(batch, response_lengths(batch), [False] * len(samples)))
        drawn = [sum(sample.output_mask or []) for sample in samples]
        assert measured[-1]["response_length/mean"] == fmean(drawn) < fmean(len(s.output_ids) for s in samples)
        per_turn.append(fmean(drawn) / (calls + 1))
    assert per_turn[1] == pytest.approx(per_turn[0], rel=0.25), "turns do not become longer: responses do"

    rule, by_turn = LengthDecayLR(1e-3), LengthDecayLR(1e-3)
    rates = []
    for rollout in range(1, 66):
        surged = rollout > 30
        StepRate(rule, RolloutCorrection(), measured[surged]).begin({}, "")
        by_turn.step(per_turn[surged])
        rates.append(rule.lr)
    # the fast mean is above the threshold from the second long rollout on
    assert rule.detector.surge_step == 32 and by_turn.detector.surge_step is None
    assert rates == [1e-3] * 56 + [5e-4] * 9, "the period is 1.8 x 32 rollouts, rounded down"
