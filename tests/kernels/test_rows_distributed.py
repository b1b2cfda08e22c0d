"""The kernels of log-probs over real groups, gloo or NCCL: the promises of every backend, and their launches."""

from typing import Any

import pytest
import torch
from distributed import run_ranks
from test_shards import (  # noqa: F401
    every_case,
    results,
    test_all_ranks_hold_the_same_bits,
    test_any_cut_equals_one_shard_within_four_ulp,
    test_only_forward_gathers_four_numbers_a_token,
    test_ranks_with_unequal_rows_are_told,
    test_vocabularies_of_different_shards_share_a_group,
)


@pytest.fixture(
    scope="module",
    params=[pytest.param("gloo", marks=pytest.mark.interpreter), pytest.param("nccl", marks=pytest.mark.cuda)],
)
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    world = min(3, torch.cuda.device_count()) if request.param == "nccl" else 3
    if world < 2:
        pytest.skip("needs two CUDA devices")
    return run_ranks(world, every_case, backend=request.param)


def test_two_launches_forward_one_launch_backward(results: list[list[dict[str, Any]]], ranks: list[Any]) -> None:  # noqa: F811
    for launches, parts in ((2, results), (1, [[one] for one in ranks[0]["1"]])):
        for rank in (rank for case in parts for rank in case):
            forward, backward = rank["counts"]
            kinds = [name.removesuffix("_statistics_fwd_kernel") for name in forward.kernels]
            assert len(kinds) == launches and kinds[0] in ("row", "support") and kinds[1:] in ([], ["merge"])
            assert backward.kernels == [f"{kinds[0]}_gradient_bwd_kernel"]
            assert not forward.operations and not forward.waits and not backward.waits
            # only kept ids have a gradient
            assert backward.operations == ({"zero_": 1} if kinds[0] == "support" else {})
