"""A process group of None means no communication, in every function that takes one."""

from typing import Any

import pytest
import torch
from correction_book import case
from distributed import run_ranks
from extras import correct
from route_sets import random_routes

from megatron_rc.correction.correct import pair_metrics
from megatron_rc.correction.metrics import MetricSums
from megatron_rc.correction.settings import Rejection, RolloutCorrection, Weight
from megatron_rc.logprobs.logits import vocab_parallel_logprobs
from megatron_rc.loss.scale import loss_scale
from megatron_rc.moe.shift import expert_shift
from megatron_rc.moe.tables import MoeShape, RouteTable

CORRECTION = RolloutCorrection(Weight("segment", "mask", 0.5, 2.0), (Rejection("k3", upper=0.5),), normalize="batch")


def without_groups(rank: int) -> dict[str, Any]:
    """What a rank gets from its own tokens."""
    batch = case([9, 0, 12], seed=rank)
    corrected = correct(*batch.arguments, correction=CORRECTION, dp_group=None, cp_group=None, **batch.options)
    pair = pair_metrics(*batch.arguments, cu_seqlens=batch.cu_seqlens, cp_group=None)
    means = MetricSums.of_means({"entropy": (torch.tensor(rank + 1.0), torch.tensor(2.0))})
    chosen, sampled = random_routes((21, 2, 2), seed=rank)
    shape = MoeShape(num_layers=2, layers=(0, 1), top_k=2, num_experts=int(max(chosen.max(), sampled.max())) + 1)
    shift = expert_shift(RouteTable(shape, chosen), RouteTable(shape, sampled), batch.mask)
    scale = loss_scale(
        batch.mask, corrected.mask, aggregation="seq-mean-token-mean", cu_seqlens=batch.cu_seqlens,
        dp_group=None, cp_group=None,
    )  # fmt: skip
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(rank))
    return {
        "weights": corrected.weights.tolist(),
        "correct": corrected.metrics.all_reduce(None).values(),
        "pair": pair.all_reduce(None).values(),
        "means": means.all_reduce(None).values(),
        "shift": {n: v for n, v in shift.sums.all_reduce(None).values().items() if isinstance(v, float)},
        "scale": scale.tolist(),
        "logprobs": vocab_parallel_logprobs(logits, torch.arange(4), tp_group=None).tolist(),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(2, without_groups)


@pytest.mark.parametrize("name", ["weights", "correct", "pair", "means", "shift", "scale", "logprobs"])
def test_ranks_of_one_world_get_their_own_answers(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        assert ranks[rank][name] == pytest.approx(without_groups(rank)[name], nan_ok=True)
    assert ranks[0][name] != ranks[1][name]
