"""The SGLang engine against real servers on this machine's CPU: what it returns is what the model says."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from sglang_clients import sglang_engine
from sglang_server import CLOSE, MODELS, SglangServer, Truth, shared_server
from turn_tasks import CountingTask

from megatron_rc.batch import TokenBatch
from megatron_rc.engine import Sample, SamplingParams
from megatron_rc.training.step.turns import respond, turns_of

PROMPTS = [[3, 4, 5, 6, 7], [9] * 30, [11], [2, 30, 17], [36, 35], [5, 4, 3, 2]]
EOS = MODELS["dense"]["eos_token_id"]
"""End token of the checkpoint: the servers stop there whatever is asked."""


@pytest.fixture(params=["dense", "moe"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    with shared_server(kind, tmp_path_factory) as running:
        yield running


def assert_of(truth: Truth, sample: Sample, temperature: float = 1.0) -> None:
    assert sample.discarded is None, sample.discarded_detail
    assert (torch.tensor(sample.logprobs).double() - truth.logprobs(sample, temperature)).abs().max() < CLOSE
    if sample.routes is not None:
        assert torch.equal(sample.routes, truth.routes(sample))
    if sample.top_ids is not None and sample.support is None:
        # with the mass of the whole vocabulary, after the temperature
        exact = (truth.logits(sample) / temperature).log_softmax(-1)
        assert sample.top_rollout_logprobs is not None and sample.top_ids.shape[1] == 5
        assert (sample.top_rollout_logprobs - exact.topk(5).values).abs().max() < CLOSE
        assert (sample.top_rollout_logprobs - exact.gather(1, sample.top_ids.long())).abs().max() < CLOSE


def with_model(server: SglangServer, kind: str, **changes: Any) -> Any:
    return sglang_engine(server.url, model=MODELS[kind], return_routes=kind == "moe", timeout_s=60.0, **changes)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_routes_are_those_of_the_model(server: SglangServer, kind: str, temperature: float) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=temperature, stop_token_ids=(20, 21), top_logprobs=5)
    finished: list[int] = []
    with with_model(server, kind) as engine:
        samples = engine.generate(PROMPTS, params, n=3, seeds=range(18), on_finished=finished.append)
    assert sum(finished) == 18
    assert [sample.prompt_ids for sample in samples] == [prompt for prompt in PROMPTS for _ in range(3)]
    truth = Truth(kind)
    for sample in samples:
        assert_of(truth, sample, temperature)
        assert (sample.routes is None) == (kind == "dense") and sample.top_ids is not None
        stopped = sample.output_ids[-1] in (20, 21, EOS)
        assert sample.finish_reason == ("stop" if stopped else "length")
        assert not set(sample.output_ids[:-1]) & {20, 21, EOS} and (stopped or len(sample.output_ids) == 12)
    batch = TokenBatch.from_samples(samples, params)
    assert int(batch.loss_mask.sum()) == sum(len(sample.output_ids) for sample in samples)


def test_under_top_p_and_top_k_the_logprobs_are_those_of_the_kept_ids(server: SglangServer, kind: str) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=0.5, top_k=9, top_p=0.6, top_logprobs=9)
    with with_model(server, kind) as engine:
        samples = engine.generate(PROMPTS, params, n=2, seeds=range(12))
    truth = Truth(kind)
    sizes = set()
    for sample in samples:
        assert_of(truth, sample, 0.5)
        for row, kept, ids, listed in zip(
            (truth.logits(sample) / 0.5).softmax(-1), sample.support, sample.top_ids, sample.top_rollout_logprobs,
            strict=True,
        ):  # fmt: skip
            assert ids[ids >= 0].sort().values.tolist() == sorted(kept) and listed[ids < 0].eq(-torch.inf).all()
            over_kept = row[ids[ids >= 0].long()].log()
            assert (listed[ids >= 0] - (over_kept - over_kept.logsumexp(0))).abs().max() < CLOSE
            ordered, order = row.sort(descending=True)
            before = ordered.cumsum(0) - ordered
            # over the mass of the whole distribution; a set that ends within rounding of the edge is not judged
            if (before - 0.6).abs().min() > 1e-5:
                assert set(kept) == set(order[(before <= 0.6) & (torch.arange(len(row)) < 9)].tolist())
            sizes.add(len(kept))
    assert len(sizes) > 1, "top-p never cut"
    TokenBatch.from_samples(samples, params)


def once_something_is_finished(call: Callable[[], Any]) -> Callable[[int], None]:
    """on_finished that calls, in a thread of its own, when the first responses have ended."""
    threads: list[threading.Thread] = []

    def on_finished(count: int) -> None:
        if not threads:
            threads.append(threading.Thread(target=call))
            threads[0].start()

    return on_finished


def test_an_aborted_response_is_continued_as_if_it_had_never_stopped(server: SglangServer, kind: str) -> None:
    # more of them than can end before the abort
    params, prompts = SamplingParams(max_new_tokens=200, top_logprobs=5), [PROMPTS[i % 6] for i in range(2000)]
    with with_model(server, kind, concurrency=8) as engine:
        # on a busy machine those under way may all end by themselves before the server reads the abort
        for seeds in (range(start, start + 2000) for start in range(0, 20000, 2000)):
            stop = once_something_is_finished(engine.abort)
            first = engine.generate(prompts, params, n=1, seeds=seeds, on_finished=stop)
            assert {sample.discarded for sample in first} == {None, "aborted"}
            if begun := [i for i, sample in enumerate(first) if sample.discarded and sample.output_ids]:
                break
        assert begun and len(begun) <= 8
        again = engine.generate([prompts[i] for i in begun], params, n=1, seeds=[seeds[i] for i in begun])
    truth = Truth(kind)
    for i, sample in zip(begun, again, strict=True):
        assert sample.output_ids[: len(first[i].output_ids)] == first[i].output_ids
        assert len(sample.output_ids) > len(first[i].output_ids)
        assert_of(truth, sample)
    for sample in first:
        if sample.discarded is None:
            assert_of(truth, sample)


@pytest.mark.parametrize("mode", ["abort", "retract"])
def test_a_pause_by_the_server_leaves_spans_of_both_versions(server: SglangServer, kind: str, mode: str) -> None:
    def pause_and_rename(version: int) -> None:
        for path, body in (
            ("/pause_generation", {"mode": mode}),
            ("/update_weight_version", {"new_version": str(version), "abort_all_requests": False}),
            ("/continue_generation", {}),
        ):
            status, answer = server.call(path, body)
            assert status == 200, answer

    params, prompts = SamplingParams(max_new_tokens=200), [PROMPTS[i % 6] for i in range(64)]
    with with_model(server, kind, concurrency=8) as engine:
        # those under way may all end by themselves before the server reads the pause
        for version in range(7, 17):
            pause = once_something_is_finished(partial(pause_and_rename, version))
            seeds = [64 * version + number for number in range(64)]
            samples = engine.generate(prompts, params, n=1, seeds=seeds, on_finished=pause)
            mixed = [sample for sample in samples if len(sample.weight_versions) > 1]
            retracted = [sample for sample in samples if sample.retractions or sample.discarded]
            if retracted if mode == "retract" else mixed:
                break
    truth = Truth(kind)
    for sample in samples:
        if sample.discarded is None:
            assert_of(truth, sample)
    # the server computed these routes again, after the tokens had been drawn
    lost = {"retracted_with_routes"} if mode == "retract" and kind == "moe" else {None}
    assert {sample.discarded for sample in (retracted if mode == "retract" else samples)} == lost
    assert retracted or mixed
    for sample in mixed:
        (old, start, middle), (new, same, end) = sample.weight_versions
        assert (old, start, new, end) == (-1 if version == 7 else version - 1, 0, version, len(sample.output_ids))
        assert 0 < middle == same < end


@pytest.mark.parametrize("kind", ["dense"])
def test_the_longest_request_is_the_longest_that_the_server_does_not_cut(server: SglangServer, kind: str) -> None:
    prompt = [3, 4, 5, 6, 7]
    whole = server.generate(prompt, {"max_new_tokens": 249, "ignore_eos": True})
    cut = server.generate(prompt, {"max_new_tokens": 250, "ignore_eos": True})
    assert len(whole["output_ids"]) == len(cut["output_ids"]) == 249
    with with_model(server, kind) as engine:
        with pytest.raises(ValueError, match="longer than the context of 254 tokens"):
            engine.generate([prompt], SamplingParams(max_new_tokens=250), n=1, seeds=[0])
        (sample,) = engine.generate([prompt], SamplingParams(max_new_tokens=249), n=1, seeds=[0])
        assert sample.discarded is None


@pytest.mark.full
@pytest.mark.parametrize("truncated", [False, True])
def test_turns_of_a_server_are_those_of_the_model(server: SglangServer, kind: str, truncated: bool) -> None:
    task = CountingTask()
    params = SamplingParams(40, 0.8, *((0.9, 12) if truncated else ()), stop_token_ids=task.stop_token_ids)
    prompts, truth = task.prompts(0, 12), Truth(kind)
    with with_model(server, kind) as engine:
        samples = respond(engine, task, prompts, params, n=4, seeds=range(48))
    assert {turns_of(sample) for sample in samples} >= {1, 2, 3}
    for number, sample in enumerate(samples):
        assert sample.discarded is None, sample.discarded_detail
        assert sample.prompt_ids == list(prompts[number // 4].token_ids)
        mask = sample.output_mask or [True] * len(sample.output_ids)
        gaps = torch.tensor(sample.logprobs).double() - truth.logprobs(sample, 0.8)
        assert gaps[torch.tensor(mask)].abs().max() < CLOSE
        assert (sample.support is not None) == truncated
        if kind == "moe":
            assert sample.routes is not None and torch.equal(sample.routes, truth.routes(sample))
