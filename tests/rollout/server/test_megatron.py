"""A Megatron trainer of two tensor-parallel ranks against a real SGLang server, before and after weight syncs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from sglang_server import shared_server

PROMPTS = [[3, 4, 5, 6, 7], [9, 8, 7], [20, 21, 22, 23, 24, 25, 26, 27, 28]]


def _train_and_sync(rank: int, url: str, model: str, folder: str) -> list[dict[str, Any]]:
    from megatron_rc.batch import TokenBatch
    from megatron_rc.engine import Sample, SamplingParams
    from megatron_rc.rollout.sglang.control import probe_prompt
    from megatron_rc.rollout.sglang.pool import Pool
    from megatron_rc.rollout.sglang.weights import update_servers, weight_sync
    from megatron_rc.schema.sglang_settings import SGLangSettings
    from megatron_rc.settings import ModelSettings, ParallelSettings, TrainSettings
    from megatron_rc.training import groups
    from megatron_rc.training.heads import Answer
    from megatron_rc.training.policy import Policy
    from megatron_rc.training.step.microbatches import MicroBatch

    place = groups.initialize(ParallelSettings(tensor=2), seed=1)
    train = TrainSettings(optimizer="sgd", lr=8.0)
    policy = Policy(ModelSettings(hf_path=model), ParallelSettings(tensor=2), train, place)
    policy.start_phase(lr=8.0, min_lr=8.0, warmup_steps=0, total_steps=10, decay_style="constant")
    writer = rank == 0
    pool = Pool([url], concurrency=4, timeout_s=60) if writer else None

    def from_writer(make: Callable[[], Any]) -> Any:
        holder = [make() if writer else None]
        dist.broadcast_object_list(holder, src=0)
        return holder[0]

    def batch_of(prompts: list[list[int]], outputs: list[list[int]]) -> TokenBatch:
        samples = [
            Sample(prompt, output, [0.0] * len(output), "length", [(0, 0, len(output))])
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
        return TokenBatch.from_samples(samples, SamplingParams())

    def sampled() -> tuple[list[list[int]], list[float]]:
        assert pool is not None
        (server,) = pool.servers
        sampling = {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True}
        asked = [{"input_ids": prompt, "sampling_params": sampling, "return_logprob": True} for prompt in PROMPTS]
        answers = [server.post("/generate", body, 60) for body in asked]
        logprobs = [entry[0] for answer in answers for entry in answer["meta_info"]["output_token_logprobs"]]
        return [answer["output_ids"] for answer in answers], logprobs

    def compared() -> tuple[float, TokenBatch]:
        """max |server - trainer| over tokens that the server samples now, nats."""
        outputs, logprobs = from_writer(sampled)
        batch = batch_of(PROMPTS, outputs)
        ours, _ = policy.logprobs([MicroBatch(batch)])
        return float((ours[batch.loss_mask] - torch.tensor(logprobs)).abs().max()), batch

    found = []
    distance, batch = compared()
    found.append({"transport": "as started", "distance": distance})
    for version, transport in enumerate(("disk", "tensor", "distributed"), start=1):

        def loss(answer: Answer) -> tuple[torch.Tensor, Any]:
            return -(answer.logprobs()[0] * answer.micro.batch.loss_mask).mean(), None

        policy.update([MicroBatch(batch)], loss)
        apart, _ = compared()
        settings = SGLangSettings(weight_sync=transport, bucket_bytes=20_000, sync_dir=folder, timeout_s=60)
        sync = weight_sync(settings, policy.hf_config)
        # log-probs of the trainer are a collective: all compute those of the probe before the writer is asked for them
        prompt = probe_prompt(policy.hf_config["vocab_size"], policy.hf_config["max_position_embeddings"])
        probed, _ = policy.logprobs([MicroBatch(batch_of([prompt[:1]], [prompt[1:]]))])
        sync.probe = lambda ids, probed=probed: probed[:-1].tolist()
        if pool is not None:
            update_servers(pool, sync, policy.export(), version)
        else:
            for _ in policy.export():
                pass
        distance, batch = compared()
        served = from_writer(lambda: pool.servers[0].get("/model_info", 60)["weight_version"])
        found.append({"transport": transport, "distance": distance, "apart": apart, "version": served})
        sync.close()
    if pool is not None:
        pool.close()
    return found


def test_the_servers_log_probs_are_the_trainers_before_and_after_each_transport(
    tmp_path_factory: pytest.TempPathFactory, tmp_path
):
    with shared_server("dense", tmp_path_factory) as server:
        ranks = run_ranks(2, _train_and_sync, server.url, server.model, str(tmp_path))
    assert ranks[0] == ranks[1], "log-probs are bitwise equal on tensor-parallel ranks"
    started, *synced = ranks[0]
    assert started["distance"] < 2e-5
    for version, result in enumerate(synced, start=1):
        assert result["version"] == str(version)
        assert result["apart"] > 1e-3, "a step of training must be seen, or the sync proves nothing"
        assert result["distance"] < 2e-5
