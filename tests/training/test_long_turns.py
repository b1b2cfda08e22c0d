"""Responses of many turns of the calculator: what is trained on, weighted and measured of them."""

import re
from collections.abc import Sequence
from itertools import accumulate, groupby
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
from megatron_rc.training.step.turns import respond, turns_of

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


def task_of(digits: int) -> CalculatorTask:
    return CalculatorTask(CalculatorOptions(fewest_terms=TERMS, most_terms=TERMS, max_turns=32, digits=digits))


def answered(task: CalculatorTask, calls: int = TERMS - 1) -> tuple[list[Sample], TokenBatch]:
    """Two responses to each of two prompts, and their batch."""
    params = SamplingParams(max_new_tokens=500, stop_token_ids=task.stop_token_ids)
    prompts = task.prompts(0, 2)
    samples = respond(Teacher(task, calls), task, prompts, params, n=2, seeds=range(4))
    rewards = task.rewards([prompt for prompt in prompts for _ in range(2)], [s.output_ids for s in samples])
    return samples, TokenBatch.from_samples(samples, params, rewards=rewards, groups=[0, 0, 1, 1])


def mask_of(sample: Sample) -> list[bool]:
    assert sample.output_mask is not None
    return sample.output_mask


@pytest.mark.parametrize(("digits", "least"), [(4, 300), (5, 375)])
def test_a_long_response_keeps_its_tokens_and_the_mask_of_the_calculators(digits: int, least: int) -> None:
    task = task_of(digits)
    samples, batch = answered(task)
    most = (TERMS - 1) * (3 * digits + 4) + digits + 1
    assert batch.rewards is not None and batch.rewards.tolist() == [1.0] * 4
    for sample in samples:
        assert least <= len(sample.output_ids) <= most <= 500 and turns_of(sample) == TERMS
        written = "".join(
            task.decode([token for _, token in part]).join("[]" if not drawn else ("", ""))
            for drawn, part in groupby(zip(mask_of(sample), sample.output_ids, strict=True), key=lambda pair: pair[0])
        )
        assert re.fullmatch(rf"([a-z]\d+[+-]\d+=\[\d+;\]){{{TERMS - 1}}}\d+\.", written), written
    assert int(batch.loss_mask.sum()) == sum(sum(mask_of(sample)) for sample in samples)


def test_a_surge_of_turns_halves_the_learning_rate() -> None:
    task = task_of(2)
    measured: list[dict[str, Any]] = []
    per_turn = []
    for calls in (2, TERMS - 1):
        samples, batch = answered(task, calls)
        measured.append(rollout_metrics(batch, response_lengths(batch), [False] * len(samples)))
        drawn = [sum(mask_of(sample)) for sample in samples]
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
