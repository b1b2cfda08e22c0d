"""Responses of several turns: every token is counted once, by the policy that drew it or by the environment."""

from itertools import groupby, pairwise
from typing import Any

import pytest
import torch
from sglang_server import MODELS, Truth, checkpoint_weights
from turn_tasks import CALLS, CountingTask, NotingEngine

from megatron_rc.batch import TokenBatch
from megatron_rc.engine import Sample, SamplingParams
from megatron_rc.rollout.embedded.engine import EmbeddedEngine
from megatron_rc.training.step.turns import joined, respond, turns_of

PARAMS = SamplingParams(max_new_tokens=40, temperature=0.8, stop_token_ids=CountingTask.stop_token_ids)
N = 4


def engine_of(kind: str = "dense") -> tuple[EmbeddedEngine, Truth]:
    """An engine, and what the model says whose weights it has."""
    engine, truth = EmbeddedEngine(MODELS[kind], dtype="fp32", device="cpu", return_routes=kind == "moe"), Truth(kind)
    serve(engine, truth, 7)
    return engine, truth


def serve(engine: EmbeddedEngine, truth: Truth, version: int) -> None:
    known = set(engine._slots)
    engine.update_weights(((k, v) for k, v in checkpoint_weights(truth.model) if k in known), version)


def sampled(engine: Any, task: CountingTask | None = None, *, count: int = 12, **changes: Any) -> list[Sample]:
    task = task or CountingTask()
    params = SamplingParams(**(vars(PARAMS) | changes))
    return respond(engine, task, task.prompts(0, count), params, n=N, seeds=range(100, 100 + count * N))


def masks(samples: list[Sample]) -> list[list[bool]]:
    return [sample.output_mask or [True] * len(sample.output_ids) for sample in samples]


def test_the_loss_mask_covers_exactly_the_tokens_that_the_sampler_drew() -> None:
    task, engine = CountingTask(), NotingEngine(engine_of()[0])
    samples = sampled(engine, task)
    drawn: dict[tuple[int, ...], list[int]] = {}
    for prompts, _, answers in engine.calls:
        size = len(answers) // len(prompts)
        for i, answer in enumerate(answers):
            assert answer.prompt_ids == prompts[i // size]
            drawn.setdefault((*answer.prompt_ids, *answer.output_ids), []).extend(answer.output_ids)
    assert {turns_of(sample) for sample in samples} == {1, 2, 3, 4}
    for sample, mask in zip(samples, masks(samples), strict=True):
        place, so_far = 0, list(sample.prompt_ids)
        for by_policy, group in groupby(mask):
            part = sample.output_ids[place : place + len(list(group))]
            if by_policy:
                assert drawn[(*so_far, *part)][: len(part)] == part
            else:
                before = sample.output_ids[:place]
                assert before[-1] in CALLS and part == task.reply(task.prompts(0, 1)[0], before)
            place, so_far = place + len(part), so_far + part
        # a turn ends with its first stop token
        ends = [i for i, token in enumerate(sample.output_ids) if mask[i] and token in task.stop_token_ids]
        assert all(i + 1 == len(mask) or not mask[i + 1] for i in ends)
        assert mask[0] and mask[-1]


@pytest.mark.parametrize("changes", [{}, {"top_k": 9}, {"top_p": 0.7, "top_k": 20}])
@pytest.mark.parametrize("kind", MODELS)
def test_logprobs_and_routes_are_those_of_one_forward_of_the_whole_response(kind: str, changes: dict[str, Any]) -> None:
    engine, truth = engine_of(kind)
    samples = sampled(engine, **changes)
    assert max(map(turns_of, samples)) >= 3
    for sample, mask in zip(samples, masks(samples), strict=True):
        gaps = torch.tensor(sample.logprobs) - truth.logprobs(sample, 0.8)
        assert gaps[torch.tensor(mask)].abs().max() < 1e-5
        assert (sample.support is None) == (not changes)
        if kind == "moe":
            assert torch.equal(sample.routes.sort(-1).values, truth.routes(sample).sort(-1).values)


def test_a_response_depends_on_its_seed_and_prompt_not_on_the_others() -> None:
    engine, _ = engine_of()
    task, whole = CountingTask(), sampled(engine)
    assert [s.output_ids for s in sampled(engine)] == [s.output_ids for s in whole]
    part = respond(engine, task, task.prompts(5, 3), PARAMS, n=N, seeds=range(100 + 5 * N, 100 + 8 * N))
    assert [s.output_ids for s in part] == [s.output_ids for s in whole[5 * N : 8 * N]]


def test_no_turn_repeats_the_random_numbers_of_another() -> None:
    noting = NotingEngine(engine_of()[0])
    seeds: list[int] = []
    generate = noting.engine.generate
    noting.engine.generate = lambda *a, **k: (seeds.extend(k["seeds"]), generate(*a, **k))[1]  # type: ignore[method-assign]
    sampled(noting)
    assert len(noting.calls) == 4 and len(set(seeds)) == len(seeds)


@pytest.mark.parametrize(("max_turns", "max_turn_tokens", "total"), [(2, 8, 40), (4, 3, 40), (9, 8, 20), (9, 8, 8)])
def test_what_is_cut_off_at_a_limit_counts_as_truncated(max_turns: int, max_turn_tokens: int, total: int) -> None:
    task = CountingTask(max_turns, max_turn_tokens)
    samples = sampled(engine_of()[0], task, max_new_tokens=total)
    fates = set()
    for sample, mask in zip(samples, masks(samples), strict=True):
        runs = [len(list(group)) for drawn, group in groupby(mask) if drawn]
        assert len(runs) <= max_turns and max(runs) <= max_turn_tokens and len(mask) <= total
        wants_more = sample.output_ids[-1] in CALLS
        if sample.finish_reason == "stop":
            assert not wants_more
            fates.add("stop")
        elif wants_more:
            reply = len(task.reply(task.prompts(0, 1)[0], sample.output_ids))
            assert len(runs) == max_turns or len(mask) + reply + max_turn_tokens > total
            fates.add("no further turn")
        else:
            assert runs[-1] == max_turn_tokens
            fates.add("long turn")
    assert fates == {"stop", "no further turn", "long turn"}
    batch = TokenBatch.from_samples(samples, PARAMS)
    assert batch.truncated.tolist() == [sample.finish_reason == "length" for sample in samples]


def test_less_room_than_a_turn_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rollout.max_new_tokens must be >= the 8 tokens of a turn .*, got 7"):
        sampled(engine_of()[0], max_new_tokens=7)


def test_every_turn_is_a_segment_and_replies_have_no_version() -> None:
    samples = sampled(engine_of()[0])
    batch = TokenBatch.from_samples(samples, PARAMS)
    assert batch.num_segments == sum(map(turns_of, samples)) > batch.num_sequences
    assert torch.equal(batch.weight_versions >= 0, batch.loss_mask)
    assert int(batch.loss_mask.sum()) == sum(map(sum, masks(samples)))


def test_versions_and_support_of_turns_drawn_by_different_weights_follow_each_other() -> None:
    engine, _ = engine_of()
    models = {call: Truth("dense", call) for call in (1, 2, 3)}
    noting = NotingEngine(engine, lambda call: serve(engine, models[call], 10 + call) if call else None)
    samples = sampled(noting, top_k=12)
    for sample, mask in zip(samples, masks(samples), strict=True):
        spans = sample.weight_versions
        assert [version for version, _, _ in spans] == [7, 11, 12, 13][: turns_of(sample)]
        assert spans[0][1] == 0 and spans[-1][2] == len(mask)
        assert all(before[2] == after[1] for before, after in pairwise(spans))
        # a turn begins where the span of its version does
        assert all(mask[first] and (first == 0 or not mask[first - 1]) for _, first, _ in spans)
        assert sample.support is not None and len(sample.support) == len(mask)
        assert all(token in kept for token, kept in zip(sample.output_ids, sample.support, strict=True))


def test_a_response_with_a_damaged_turn_is_discarded_with_all_its_tokens() -> None:
    engine, _ = engine_of()

    class Damaging(NotingEngine):
        def generate(self, *arguments: Any, **options: Any) -> list[Sample]:
            samples = super().generate(*arguments, **options)
            if len(self.calls) == 2:
                samples[0].discarded, samples[0].discarded_detail = "timeout", "no time was left"
            return samples

    samples = sampled(Damaging(engine))
    (damaged,) = [sample for sample in samples if sample.discarded]
    assert (damaged.discarded, damaged.discarded_detail) == ("timeout", "no time was left")
    assert turns_of(damaged) == 2, "nothing is asked after a damaged turn"


def test_finished_responses_are_reported_once() -> None:
    task, counts = CountingTask(), list[int]()
    respond(engine_of()[0], task, task.prompts(0, 6), PARAMS, n=2, seeds=range(12), on_finished=counts.append)
    assert sum(counts) == 12 and len(counts) > 1 and 0 not in counts


def test_counters_of_the_turns_are_joined() -> None:
    fields: dict[str, Any] = {"finish_reason": "stop", "weight_versions": [(3, 0, 1)]}
    first = Sample([1], [20], [-1.0], retractions=1, server="a", syncs=4, cached_tokens=9, **fields)
    then = Sample([1, 20, 5], [26], [-2.0], retractions=2, server="b", syncs=5, cached_tokens=None, **fields)
    both = joined(first, [5], then)
    assert (both.output_ids, both.logprobs, both.output_mask) == ([20, 5, 26], [-1.0, 0.0, -2.0], [True, False, True])
    assert (both.retractions, both.server, both.syncs, both.cached_tokens) == (3, "b", 5, 9)
    assert both.weight_versions == [(3, 0, 3)] and both.support is None and both.routes is None
