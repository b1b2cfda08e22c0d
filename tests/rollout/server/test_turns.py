"""Responses of several turns from a real server: their tokens, log-probs and routes are what the model says."""

from __future__ import annotations

from itertools import groupby

import pytest
import torch
from served_truth import CLOSE, Truth
from sglang_engines import sglang_engine
from sglang_server import MODELS, shared_server
from turn_tasks import CALLS, CountingTask

from megatron_rc.engine import SamplingParams
from megatron_rc.training.step.turns import respond, turns_of


@pytest.mark.full
@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("truncated", [False, True])
def test_turns_of_a_server_are_those_of_the_model(
    kind: str, truncated: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    task = CountingTask()
    params = SamplingParams(40, 0.8, *((0.9, 12) if truncated else ()), stop_token_ids=task.stop_token_ids)
    prompts, truth = task.prompts(0, 12), Truth(kind)
    with (
        shared_server(kind, tmp_path_factory) as server,
        sglang_engine(server.url, model=MODELS[kind], return_routes=kind == "moe", timeout_s=60.0) as engine,
    ):
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
        place = 0
        for by_policy, group in groupby(mask):
            end = place + len(list(group))
            if not by_policy:
                before = sample.output_ids[:place]
                assert before[-1] in CALLS
                assert sample.output_ids[place:end] == task.reply(prompts[0], before)
            place = end
