"""Weight updates on a real SGLang server: after every transport its log-probs are those of the new weights."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from process_groups import until
from sglang_server import CLOSE, SglangServer, Truth, checkpoint_weights, shared_server

from megatron_rc.engine import Sample
from megatron_rc.rollout.sglang.pool import Pool
from megatron_rc.rollout.sglang.weights import update_servers, weight_sync
from megatron_rc.settings.sglang import SGLangSettings

PROMPT = [3, 4, 5, 6, 7]


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    with shared_server("dense", tmp_path_factory) as found:
        yield found


class Trainer(AbstractContextManager["Trainer"]):
    def __init__(self, server: SglangServer, kind: str, transport: Any, folder: Path) -> None:
        self.server = server
        self.config = json.loads((Path(server.model) / "config.json").read_text())
        self.pool = Pool([server.url], concurrency=4, timeout_s=60)
        settings = SGLangSettings(weight_sync=transport, bucket_bytes=20_000, sync_dir=str(folder), timeout_s=60)
        self.sync = weight_sync(settings, self.config)
        self.truths = {seed: Truth(kind, seed) for seed in (0, 1, 2)}

    def __exit__(self, *_: object) -> None:
        self.sync.close()
        self.pool.close()

    def weights(self, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
        return checkpoint_weights(self.truths[seed].model)

    def update(self, seed: int, version: int) -> None:
        update_servers(self.pool, self.sync, self.weights(seed), version)

    def probe(self, seed: int) -> Any:
        return lambda prompt: self.truths[seed].logprobs(Sample(prompt[:1], prompt[1:], [], "length")).tolist()

    def distance(self, seed: int, answer: Any) -> float:
        """max |server - model of seed| over the output tokens, nats."""
        expected = self.truths[seed].logprobs(Sample(PROMPT, answer["output_ids"], [], "length"))
        found = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        assert found
        return float((torch.tensor(found).double() - expected).abs().max())

    def sampled(self, tokens: int = 12) -> Any:
        return self.server.generate(PROMPT, {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True})


@pytest.mark.parametrize("transport", ["disk", "tensor", "distributed"])
def test_after_an_update_the_log_probs_are_those_of_the_new_weights(server, tmp_path, transport):
    with Trainer(server, "dense", transport, tmp_path) as trainer:
        assert trainer.distance(0, trainer.sampled()) < CLOSE
        (connected,) = trainer.pool.servers
        connected.post = Mock(wraps=connected.post)
        for version, seed in [(1, 1), (2, 2), (3, 2), (4, 0)]:
            trainer.sync.probe = trainer.probe(seed)
            trainer.update(seed, version)
            answer = trainer.sampled()
            assert trainer.distance(seed, answer) < CLOSE
            assert trainer.distance((seed + 1) % 3, answer) > 1e-2, "another model's would pass, too"
            assert answer["meta_info"]["weight_versions"] == [{"version": str(version), "start": 0, "end": 12}]
        if transport == "disk":
            (folder,) = tmp_path.iterdir()
            assert len(list(folder.glob("*.safetensors"))) >= 3
        else:
            paths = [call.args[0] for call in connected.post.call_args_list]
            assert paths.count(f"/update_weights_from_{transport}") >= 4 * 3, "an update takes several buckets"


@pytest.mark.parametrize("transport", ["disk", "tensor", "distributed"])
def test_a_mixture_of_experts_is_updated_expert_by_expert(tmp_path_factory, tmp_path, transport):
    with shared_server("moe", tmp_path_factory) as server, Trainer(server, "moe", transport, tmp_path) as trainer:
        for version, seed in [(1, 1), (2, 0)]:
            trainer.sync.probe = trainer.probe(seed)
            trainer.update(seed, version)
            answer = trainer.sampled()
            assert trainer.distance(seed, answer) < CLOSE
            assert answer["meta_info"]["weight_version"] == str(version)
        # of one expert alone the server's fused tensor changes
        trainer.truths[0].model.state_dict()["model.layers.1.mlp.experts.gate_up_proj"][5] += 0.5
        trainer.sync.probe = trainer.probe(0)
        trainer.update(0, 3)


@contextmanager
def always_asking(trainer: Trainer) -> Iterator[list[Any]]:
    """Answers to requests of which some are running at any moment: each of four threads asks one after the other."""
    answers: list[Any] = []
    ended = threading.Event()

    def ask(tokens: int) -> None:
        while not ended.is_set():
            answers.append(trainer.sampled(tokens))

    # of different lengths, so that they do not end together
    threads = [threading.Thread(target=ask, args=(tokens,)) for tokens in (200, 170, 140, 110)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_requests_during_an_update_end_with_the_versions_that_drew_their_tokens(server, tmp_path):
    with Trainer(server, "dense", "tensor", tmp_path) as trainer:
        trainer.update(1, 1)
        held: list[Any] = []
        waiting = threading.Thread(target=lambda: held.append(trainer.sampled()))

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in trainer.weights(2):
                if not waiting.ident:
                    waiting.start()
                    time.sleep(0.3)
                    assert not held, "a request that is sent during the update is held"
                yield name, tensor

        with always_asking(trainer) as answers:
            # when the shortest has ended, the others have tokens
            assert until(lambda: answers and server.call("/v1/loads?include=core")[1]["loads"][0]["num_running_reqs"])
            update_servers(trainer.pool, trainer.sync, weights(), 2)
        waiting.join()
        (answer,) = held
        assert answer["meta_info"]["weight_versions"] == [{"version": "2", "start": 0, "end": 12}]
        assert trainer.distance(2, answer) < CLOSE
        aborted = [a for a in answers if a["meta_info"]["finish_reason"]["type"] == "abort" and a["output_ids"]]
        assert aborted, "requests that run when the update begins end with it"
        for answer in answers:
            if answer["output_ids"]:
                (span,) = answer["meta_info"]["weight_versions"]
                assert (span["start"], span["end"]) == (0, len(answer["output_ids"]))
                assert span["version"] == "1" or answer not in aborted
                assert trainer.distance(int(span["version"]), answer) < CLOSE


@pytest.mark.parametrize("transport", ["disk", "tensor"])
def test_a_server_that_accepts_half_of_the_tensors_is_found_by_its_checksums_and_paused(server, tmp_path, transport):
    with Trainer(server, "dense", transport, tmp_path) as trainer:
        half = ((name, tensor) for name, tensor in trainer.weights(1) if ".layers.1." not in name)
        with pytest.raises(ValueError, match="8 tensors that the update did not fill, such as model.layers.1."):
            update_servers(trainer.pool, trainer.sync, half, 1)
        assert "did not fill" in str(trainer.pool.servers[0].out)
        assert server.call("/model_info")[1]["weight_version"] == "unproved-1"
        assert server.call("/ready")[0] == 503, "it must not answer with mixed weights"
        trainer.update(1, 2)
        assert trainer.pool.servers[0].out is None
        assert trainer.distance(1, trainer.sampled()) < CLOSE


def test_a_folder_that_the_server_does_not_see_is_refused_and_the_old_weights_stay(server, tmp_path, monkeypatch):
    with Trainer(server, "dense", "disk", tmp_path) as trainer:
        (connected,) = trainer.pool.servers
        post = connected.post

        def elsewhere(path: str, body: Any, timeout_s: float) -> Any:
            return post(path, body | {"model_path": "/elsewhere/weights"} if "model_path" in body else body, timeout_s)

        monkeypatch.setattr(connected, "post", elsewhere)
        with pytest.raises(ValueError, match=r"update_weights_from_disk answered 400"):
            trainer.update(1, 1)
