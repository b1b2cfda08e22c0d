"""Connecting to SGLang servers and routers, what is refused before a request is sent, and rotation after updates."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from faulty_answers import tokens_after
from faulty_sglang import PROBE, FaultySglang
from faulty_weights import probe_logprobs, weights_of
from refusals import refuses
from sglang_clients import MODEL, sglang_engine

from megatron_rc.engine import RolloutEngine, SamplingParams
from megatron_rc.versions import installing

PARAMS = SamplingParams(max_new_tokens=8)
WEIGHTS = list(weights_of(1).items())


def refused(*urls: str, **changes: Any) -> str:
    before = set(threading.enumerate())
    with pytest.raises(ValueError) as error, sglang_engine(*urls, **changes):
        pass
    assert set(threading.enumerate()) == before
    return str(error.value)


def test_what_cannot_work_is_refused_by_one_sentence_that_names_the_server() -> None:
    with FaultySglang() as server:
        url = server.url
        server.info["enable_return_routed_experts"] = False
        no_routes = f"{url} returns no routes: start it with --enable-return-routed-experts"
        assert refused(url, return_routes=True) == no_routes
        other_type = MODEL | {"model_type": "qwen3"}
        assert "type 'qwen3_moe', the trained one is of type 'qwen3'" in refused(url, model=other_type)
        assert "mixture-of-experts" in refused(url, model={"vocab_size": 37}, return_routes=True)
        server.info["preferred_sampling_params"] = {"top_k": 3}
        assert "--preferred-sampling-params" in refused(url)
        server.fail("/model_info", 500)
        assert refused(url).endswith(f"{url}/model_info answered 500: told to answer 500, input [...]")
        server.die()
        assert refused(url).endswith(f"{url} refuses connections")
    assert refused("127.0.0.1:3") == "urls must start with http:// or https://, got '127.0.0.1:3'"
    assert refused() == "urls must name at least one server"
    assert "concurrency" in refused("http://127.0.0.1:3", concurrency=0)


def test_a_server_that_takes_connections_and_never_answers_is_given_up_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert refused(url, timeout_s=0.5).endswith(f"{url}/workers did not answer within 0.5 s")
        assert 0.5 <= time.monotonic() - started < 30


def test_without_aiohttp_one_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert refused("http://127.0.0.1:3").endswith(f"need aiohttp: {installing('sglang')}")


def test_importing_the_package_or_the_engine_does_not_import_aiohttp() -> None:
    code = "import sys, megatron_rc.rollout.sglang.engine; assert 'aiohttp' not in sys.modules, 'imported'"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("prompts", "params", "sentence"),
    [
        ([[3], [3, 37]], PARAMS, "prompt 1 has an id outside the vocabulary of 37"),
        ([[3], [-1]], PARAMS, "prompt 1 has an id outside the vocabulary of 37"),
        ([[3] * 247], PARAMS, "prompt 0 has 247 tokens, which with max_new_tokens=8 is longer than the context of 254"),
        ([[3]], SamplingParams(top_p=0.9), "only for a finite top_k; set rollout.top_k to a number from 2 to 4096"),
        ([[3]], SamplingParams(top_k=5000), "top_k=5000 is more than the 4096 kept ids that .*-max-tokens 5000"),
    ],
)
def test_no_harmful_or_refused_request_is_sent(prompts: list[list[int]], params: SamplingParams, sentence: str) -> None:
    with FaultySglang() as server, sglang_engine(server.url) as engine:
        refuses(sentence, engine.generate, prompts, params, n=1, seeds=range(len(prompts)))
        assert not server.asked


@pytest.mark.parametrize(
    ("info", "sentence"),
    [
        ({"sampling_mask_max_tokens": None}, "this server cannot return kept ids; serve with SGLang"),
        ({"speculative_algorithm": "EAGLE"}, r"no kept ids under speculative decoding \(EAGLE\)"),
    ],
)
def test_servers_that_return_no_kept_ids_sample_without_top_k_only(info: dict[str, Any], sentence: str) -> None:
    with FaultySglang(info=info) as server, sglang_engine(server.url) as engine:
        engine.check_sampling(PARAMS)
        refuses(f"{server.url}: .*{sentence}", engine.check_sampling, SamplingParams(top_k=4))


def test_a_router_stands_for_its_workers_which_are_asked_directly() -> None:
    with FaultySglang() as one, FaultySglang() as two:
        # every rank of a data-parallel server is a worker of its own to a router
        workers = [f"{one.url}@0", f"{one.url}@1", two.url]
        with FaultySglang(workers=workers) as router, sglang_engine(router.url, two.url) as engine:
            samples = engine.generate([[1, 2], [3, 4]], PARAMS, n=2, seeds=range(4))
            assert [s.output_ids for s in samples[::2]] == [tokens_after(p, 8) for p in ([1, 2], [3, 4])]
            assert len(one.asked) == len(two.asked) == 2 and set(router.calls) == {"/workers"}
    with FaultySglang(workers=[]) as router:
        assert refused(router.url) == f"the router {router.url} has no workers"


@pytest.mark.parametrize("honoured", [True, False])
def test_seeds_are_sent_where_all_servers_honour_them(honoured: bool) -> None:
    on, maybe = {"enable_deterministic_inference": True}, {"enable_deterministic_inference": honoured}
    with FaultySglang(info=on) as one, FaultySglang(info=maybe) as two, sglang_engine(one.url, two.url) as engine:
        engine.generate([[1, 2], [3, 4]], PARAMS, n=1, seeds=[5, 6])
        sent = [body["sampling_params"].get("sampling_seed") for body in one.asked + two.asked]
        assert sent == ([5, 6] if honoured else [None, None])


def test_responses_of_weights_beyond_the_allowed_staleness_are_discarded() -> None:
    with FaultySglang() as server, sglang_engine(server.url, max_lag=1) as engine:
        engine.update_weights(WEIGHTS, 3)
        for version, reason in (("3", None), ("2", None), ("1", "stale_version"), ("4", "unknown_version")):
            server.version = version
            (sample,) = engine.generate([[1, 2]], PARAMS, n=1, seeds=[0])
            assert sample.discarded == reason


def test_a_server_restarted_with_old_weights_is_out_until_the_next_update() -> None:
    with FaultySglang() as one, FaultySglang() as two, sglang_engine(one.url, two.url) as engine:
        engine.update_weights(WEIGHTS, 1)
        one.die()
        one.listen(version="default")
        samples = engine.generate([[i, i] for i in range(30)], PARAMS, n=1, seeds=range(30))
        assert all(s.discarded is None and s.weight_versions == [(1, 0, 8)] for s in samples)
        seen = len(one.asked)
        engine.generate([[1, 2]], PARAMS, n=4, seeds=range(4))
        assert len(one.asked) == seen
        engine.update_weights(WEIGHTS, 2)
        engine.generate([[i, i] for i in range(30)], PARAMS, n=1, seeds=range(30))
        assert len(one.asked) > seen


def test_the_only_server_restarted_with_old_weights_discards_every_response_then_is_an_error() -> None:
    with FaultySglang() as server, sglang_engine(server.url) as engine:
        engine.update_weights(WEIGHTS, 1)
        server.die()
        server.listen(version="default")
        samples = engine.generate([[i, i] for i in range(9)], PARAMS, n=1, seeds=range(9))
        assert {s.discarded for s in samples} <= {"unknown_version", "server_error"} and samples[0].discarded
        with pytest.raises(ValueError, match=f"no SGLang server is left in rotation .{server.url}: the weights are"):
            engine.generate([[1, 2]], PARAMS, n=1, seeds=[0])


@pytest.mark.parametrize("failure", ["dies", "has other log-probs"])
def test_a_server_that_fails_during_an_update_is_out_for_every_process(failure: str) -> None:
    agreed, probe = list[str | None](), partial(probe_logprobs, weights_of(1))
    with FaultySglang() as good, FaultySglang() as bad:
        urls = good.url, bad.url
        with (
            sglang_engine(*urls, probe=probe, agree=agreed.append) as writer,
            sglang_engine(*urls, writer=False) as reader,
        ):
            taken = iter(WEIGHTS)
            if failure == "dies":
                bad.fail("/update_weights_from_tensor", "die")
            else:
                bad.fail(PROBE, "other_probe")
            writer.update_weights(WEIGHTS, 1)
            if failure == "dies":
                bad.listen()
            reader.update_weights(taken, 1)
            assert next(taken, None) is None, "a reader takes all weights, for making them is a collective"
            assert agreed == [None] and writer.weight_version == reader.weight_version == 1
            for engine in (writer, reader):
                assert [server.url for server in engine._pool.rotation] == [good.url]
            bad.faults.clear()
            writer.update_weights(WEIGHTS, 2)
            reader.update_weights(WEIGHTS, 2)
            assert len(writer._pool.rotation) == len(reader._pool.rotation) == 2


def test_a_writer_that_finds_no_server_takes_all_weights_and_tells_the_others() -> None:
    agreed: list[str | None] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield from WEIGHTS
        agreed.append("all taken")

    with FaultySglang() as server, sglang_engine(server.url, agree=agreed.append) as engine:
        server.die()
        engine.update_weights(weights(), 1)
        assert agreed[0] == "all taken" and agreed[1] is not None and server.url in agreed[1]


def test_a_closed_engine_leaves_no_thread_and_says_that_it_is_closed() -> None:
    before = set(threading.enumerate())
    with FaultySglang() as server:
        with sglang_engine(server.url) as engine:
            assert isinstance(engine, RolloutEngine)
            engine.generate([[1, 2]], PARAMS, n=1, seeds=[0])
            engine.close()
        refuses("the engine is closed", engine.generate, [[1, 2]], PARAMS, n=1, seeds=[0])
    assert set(threading.enumerate()) == before
