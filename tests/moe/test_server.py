"""Routes of a real SGLang server against those of Megatron with the same weights, both in fp32."""

import math
from typing import Any

import pytest
import torch
from distributed import run_ranks
from moe_runs import PROMPTS, SAMPLES_PER_PROMPT, SAMPLING, step, world
from sglang_engines import sglang_engine
from sglang_server import MODELS, shared_server

from megatron_rc.moe.shift_metrics import MARGINS

NEAR_TIE = 1e-4
"""nats; scores this close may change places by the rounding of another order of additions."""


def _trainer(rank: int, path: str, samples: Any) -> Any:
    with world(path) as policy:
        return step(policy, samples, record=True, replay="R3")


def test_megatron_chooses_the_experts_that_the_server_chose(tmp_path_factory: pytest.TempPathFactory) -> None:
    count = len(PROMPTS) * SAMPLES_PER_PROMPT
    with (
        shared_server("moe", tmp_path_factory) as server,
        sglang_engine(server.url, model=MODELS["moe"], return_routes=True, timeout_s=60.0) as engine,
    ):
        samples = engine.generate(PROMPTS, SAMPLING, n=SAMPLES_PER_PROMPT, seeds=range(count))
        path = server.model
    assert all(sample.routes is not None for sample in samples)
    (result,) = run_ranks(1, _trainer, path, samples)
    shares = dict(zip((*MARGINS, math.inf), result.metrics["old/route_any_diff_by_margin"], strict=True))
    assert all(math.isnan(share) or share == 0 for edge, share in shares.items() if edge > NEAR_TIE)
    assert result.metrics["old/route_any_diff"] < 0.01
    gap = (result.columns["old_logprobs"] - result.share.batch.rollout_logprobs)[result.share.batch.loss_mask]
    assert torch.count_nonzero(result.share.batch.loss_mask) > count and gap.abs().max() < 1e-4
