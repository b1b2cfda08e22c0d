"""Servers that fail while they generate: every prompt ends exactly once, and nothing waits for ever."""

import logging
import os
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from faulty_answers import logprob_of, tokens_after
from faulty_sglang import Fault, FaultySglang
from faulty_weights import weights_of
from process_groups import until
from sglang_clients import sglang_engine

from megatron_rc.engine import Sample, SamplingParams

PARAMS = SamplingParams(max_new_tokens=8)
REASONS = {
    400: "server_error", "extra_logprob": "length_mismatch", "phantom": "phantom_logprob", "nan": "nan_logprob",
    "null": "nan_logprob", "positive": "positive_logprob", "completion_tokens": "bad_answer",
    "no_routes": "missing_routes", "short_routes": "routes_bytes", "retracted": "retracted_with_routes",
}  # fmt: skip
"""Faults that end a response at once."""
TRANSIENT = {
    **dict.fromkeys(("reset", 500, 503, "drop"), "server_error"), "abort": None,
    **dict.fromkeys(("truncated", "html"), "bad_answer"), **dict.fromkeys(("hang", "slow"), "timeout"),
}  # fmt: skip
"""Faults that are tried again, and what a response is discarded for when they persist."""


def prompts_of(count: int) -> list[list[int]]:
    return [[i // 37, i % 37] for i in range(count)]


def assert_whole(sample: Sample) -> None:
    assert sample.discarded is None and sample.finish_reason == "length"
    assert sample.output_ids == tokens_after(sample.prompt_ids, 8)
    assert sample.logprobs == [logprob_of(token) for token in sample.output_ids]


def faults_of(server: FaultySglang, seed: int, share: float) -> dict[tuple[int, ...], list[Any]]:
    """Let this share of the requests fail, and record by prompt what went wrong, in order."""
    generator, kinds = random.Random(seed), [*REASONS, *TRANSIENT]
    met: dict[tuple[int, ...], list[Any]] = defaultdict(list)

    def fault(number: int, body: dict[str, Any]) -> Any:
        kind = generator.choice(kinds) if generator.random() < share else None
        met[tuple(body["input_ids"][:2])].append(kind)
        return kind

    server.fail("/generate", fault)
    return met


def test_of_400_prompts_with_a_fifth_of_faults_each_ends_once_and_in_order() -> None:
    prompts, finished = prompts_of(400), list[int]()
    with FaultySglang() as server, sglang_engine(server.url, return_routes=True, timeout_s=3.0) as engine:
        met = faults_of(server, seed=6, share=0.2)
        samples = engine.generate(prompts, PARAMS, n=1, seeds=range(400), on_finished=finished.append)
        rids = [body["rid"] for body in server.asked]
    assert sum(finished) == 400 and all(count > 0 for count in finished)
    assert len(set(rids)) == len(rids) and {len(rid) for rid in rids} == {32}
    faults = [fault for kinds in met.values() for fault in kinds if fault]
    assert 0.15 < len(faults) / len(rids) < 0.25 and set(faults) == {*REASONS, *TRANSIENT}
    assert [sample.prompt_ids for sample in samples] == prompts
    for sample in samples:
        *before, last = met[tuple(sample.prompt_ids)]
        assert not set(before) & set(REASONS), "what ends a response is not tried again"
        if last is None:
            assert_whole(sample)
            assert sample.routes is not None and len(sample.routes) == 2 + 8 - 1
        else:
            assert sample.discarded == (REASONS | TRANSIENT)[last]
            assert sample.discarded_detail
            # the tokens known so far are those of the prompt
            assert sample.output_ids == tokens_after(sample.prompt_ids, len(sample.output_ids))
    assert sum(sample.discarded is None for sample in samples) > 330


def at_request(number: int, server: FaultySglang, call: Callable[[], None]) -> None:
    """Call in a thread of its own: the servers' threads answer meanwhile."""

    def counting(asked: int, body: dict[str, Any]) -> None:
        if asked == number:
            threading.Thread(target=call).start()

    server.faults.insert(0, Fault("/generate", counting))


def test_of_400_prompts_each_ends_once_also_when_servers_die_and_return_with_old_weights() -> None:
    prompts, finished = prompts_of(400), list[int]()
    with FaultySglang() as good, FaultySglang() as dies, FaultySglang() as restarts:
        servers = good, dies, restarts
        with sglang_engine(*(server.url for server in servers), timeout_s=3.0) as engine:
            engine.update_weights(weights_of(1).items(), 1)
            for seed, server in enumerate(servers):
                faults_of(server, seed, share=0.2)

            def restart() -> None:
                restarts.die()
                restarts.listen(version="default")

            at_request(100, dies, dies.die)
            at_request(100, restarts, restart)
            samples = engine.generate(prompts, PARAMS, n=1, seeds=range(400), on_finished=finished.append)
            out = [server.out for server in engine._pool.servers]
    assert out == [None, None, "the weights are called 'default', the newest are 1"]
    assert sum(finished) == 400 and [sample.prompt_ids for sample in samples] == prompts
    rids = [body["rid"] for server in servers for body in server.asked]
    assert len(set(rids)) == len(rids) > 400
    for sample in samples:
        if sample.discarded is None:
            assert_whole(sample)
            assert sample.weight_versions == [(1, 0, 8)]
        else:
            assert sample.discarded in {*REASONS.values(), *TRANSIENT.values(), "unknown_version"}
            assert sample.discarded_detail
            assert sample.output_ids == tokens_after(sample.prompt_ids, len(sample.output_ids))
    assert sum(sample.discarded is None for sample in samples) > 300


def test_a_server_that_refuses_connections_discards_every_response_and_serves_again_later() -> None:
    with FaultySglang() as server, sglang_engine(server.url, retries=1) as engine:
        server.die()
        refused = engine.generate(prompts_of(40), PARAMS, n=1, seeds=range(40))
        assert {sample.discarded for sample in refused} == {"server_error"}
        assert all(f"{server.url} refuses connections" in sample.discarded_detail for sample in refused)
        server.listen()
        for sample in engine.generate(prompts_of(40), PARAMS, n=1, seeds=range(40)):
            assert_whole(sample)


def test_when_one_of_two_servers_dies_the_other_finishes_everything() -> None:
    with FaultySglang(token_seconds=0.002) as one, FaultySglang(token_seconds=0.002) as two:
        with sglang_engine(one.url, two.url, concurrency=16) as engine:
            at_request(20, one, one.die)
            samples = engine.generate(prompts_of(200), PARAMS, n=1, seeds=range(200))
        assert 20 < len(one.asked) < len(two.asked)
    for sample in samples:
        assert_whole(sample)


@pytest.mark.parametrize("paused", [False, True])
def test_a_server_that_never_answers_holds_the_process_no_longer_than_its_timeouts(paused: bool) -> None:
    with FaultySglang() as server, sglang_engine(server.url, timeout_s=0.3, retries=1) as engine:
        if paused:
            engine._pool.servers[0].post("/pause_generation", {"mode": "abort"}, 5)
        else:
            server.fail("/generate", "hang")
        started = time.monotonic()
        samples = engine.generate(prompts_of(64), PARAMS, n=1, seeds=range(64))
        # two attempts, each with 0.3 s and as much again for the abort, on a machine that may be busy
        assert time.monotonic() - started < 30
    assert {sample.discarded for sample in samples} == {"timeout"}


def test_a_response_that_exceeds_its_time_is_continued_where_it_stood() -> None:
    slow_once = Counter[int]()

    def fault(number: int, body: dict[str, Any]) -> str | None:
        slow_once[body["input_ids"][1]] += 1
        return "slow" if slow_once[body["input_ids"][1]] == 1 else None

    with FaultySglang(Fault("/generate", fault)) as server, sglang_engine(server.url, timeout_s=1.0) as engine:
        for sample in engine.generate(prompts_of(5), PARAMS, n=1, seeds=range(5)):
            assert_whole(sample)
        assert [len(body["input_ids"]) for body in server.asked] == [2] * 5 + [2 + 4] * 5
        assert [body["sampling_params"]["max_new_tokens"] for body in server.asked] == [8] * 5 + [4] * 5


def test_without_partial_rollouts_a_late_response_is_discarded_with_its_tokens_and_not_drawn_anew() -> None:
    # drawing it anew would favour short responses
    with FaultySglang(Fault("/generate", "slow")) as server:
        with sglang_engine(server.url, timeout_s=0.2, partial=False) as engine:
            (sample,) = engine.generate(prompts_of(1), PARAMS, n=1, seeds=[0])
        assert len(server.asked) == 1
    assert sample.discarded == "timeout" and sample.output_ids == tokens_after([0, 0], 4)


def test_aborts_by_the_server_do_not_use_up_retries_while_tokens_come() -> None:
    with FaultySglang(Fault("/generate", lambda number, body: "abort" if number < 3 else None)) as server:
        with sglang_engine(server.url, retries=0) as engine:
            (sample,) = engine.generate(prompts_of(1), PARAMS, n=1, seeds=[0])
        assert [body["sampling_params"]["max_new_tokens"] for body in server.asked] == [8, 4, 2, 1]
    assert_whole(sample)


def aborting(engine: Any, server: FaultySglang, requests: int, after_s: float) -> threading.Thread:
    """A thread that aborts so many seconds after the server has had these requests."""

    def abort() -> None:
        until(lambda: len(server.asked) >= requests)
        time.sleep(after_s)
        engine.abort()

    thread = threading.Thread(target=abort)
    thread.start()
    return thread


def test_an_aborted_call_keeps_its_tokens_and_the_next_one_continues_them() -> None:
    with FaultySglang(token_seconds=0.75) as server, sglang_engine(server.url, concurrency=8) as engine:
        timer = aborting(engine, server, requests=8, after_s=1.0)
        first = engine.generate(prompts_of(12), PARAMS, n=1, seeds=range(12))
        timer.join()
        begun = len(server.asked)
        assert begun == 8 and {sample.discarded for sample in first} == {"aborted"}
        assert all(sample.output_ids == tokens_after(sample.prompt_ids, len(sample.output_ids)) for sample in first)
        drawn = [len(sample.output_ids) for sample in first]
        assert all(0 < count < 8 for count in drawn[:8]) and drawn[8:] == [0] * 4
        server.token_seconds = 0
        # another seed, or another distribution, is another response
        engine.generate(prompts_of(12), PARAMS, n=1, seeds=range(12, 24))
        engine.generate(prompts_of(12), SamplingParams(max_new_tokens=8, temperature=0.5), n=1, seeds=range(12))
        assert {body["sampling_params"]["max_new_tokens"] for body in server.asked[begun:]} == {8}
        begun = len(server.asked)
        for sample in engine.generate(prompts_of(12), PARAMS, n=1, seeds=range(12)):
            assert_whole(sample)
        budgets = {tuple(b["input_ids"][:2]): b["sampling_params"]["max_new_tokens"] for b in server.asked[begun:]}
        assert [budgets[tuple(prompt)] for prompt in prompts_of(12)] == [8 - count for count in drawn]


def test_an_abort_ends_a_call_whose_server_does_not_answer_it() -> None:
    with FaultySglang(Fault("/generate", "hang")) as server, sglang_engine(server.url, timeout_s=2) as engine:
        aborting(engine, server, requests=4, after_s=0.1)
        started = time.monotonic()
        samples = engine.generate(prompts_of(4), PARAMS, n=1, seeds=range(4))
        assert time.monotonic() - started < 30, "2 s for its time and 2 s for an abort that is not answered"
    assert {sample.discarded for sample in samples} == {"aborted"}


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Also where a shell started the tests in its background, with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("how", ["signal", "callback"])
def test_an_interrupt_leaves_no_request_and_no_thread(how: str, interruptible: None) -> None:
    def fault(number: int, body: dict[str, Any]) -> str | None:
        if number == 19 and how == "signal":
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        return "slow" if number else None

    on_finished = Mock(side_effect=KeyboardInterrupt) if how == "callback" else None
    with FaultySglang(Fault("/generate", fault)) as server, sglang_engine(server.url) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompts_of(20), PARAMS, n=1, seeds=range(20), on_finished=on_finished)
        assert len(set(server.aborted)) == len(server.asked) - 1
        assert until(lambda: not server.running)
    assert not [thread for thread in threading.enumerate() if "sglang" in thread.name]


def test_samples_of_a_prompt_share_a_server_and_servers_share_the_load() -> None:
    with FaultySglang(token_seconds=0.005) as one, FaultySglang(token_seconds=0.005) as two:
        with sglang_engine(one.url, two.url, concurrency=16) as engine:
            engine.generate(prompts_of(20), PARAMS, n=4, seeds=range(80))
        homes = [{tuple(body["input_ids"]) for body in server.asked} for server in (one, two)]
        assert len(homes[0] & homes[1]) <= 8
        assert abs(len(one.asked) - len(two.asked)) <= 16
        assert max(one.most_running, two.most_running) <= 16


def test_neither_logs_nor_details_hold_tokens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with FaultySglang(Fault("/generate", 400)) as server, sglang_engine(server.url) as engine:
        (sample,) = engine.generate([[11, 13]], PARAMS, n=1, seeds=[0])
    assert sample.discarded_detail.endswith("answered 400: told to answer 400, input [...]")
    assert "11, 13" not in caplog.text
