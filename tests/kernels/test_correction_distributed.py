"""Over real process groups the correction kernels answer as PyTorch does in one process that holds everything."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from correction_cases import correct
from distributed import run_ranks
from kernel_correction_data import small_blocks
from test_distributed import (
    assert_together_equal_one_process,
    context_parallel,
    data_parallel,
    pair_over_context_parallel,
    whole_batch,
)

from megatron_rc.backend import set_debug_checks
from megatron_rc.correction.correct import pair_metrics
from megatron_rc.correction.settings import RolloutCorrection, Weight

pytestmark = pytest.mark.interpreter

INDICES = (1, 3, 4, 5, 7, 8, 10)
"""Corrections that between them sum, scan and gather whatever crosses ranks; values are test_correction.py's."""


def everything(rank: int) -> dict[str, Any]:
    with small_blocks():
        return {
            "DP": data_parallel(rank, 2, INDICES), "CP": context_parallel(rank, 2, 1, INDICES),
            "pair": pair_over_context_parallel(rank, 2), "refusals": refusals(rank),
        }  # fmt: skip


def refusals(rank: int) -> list[str]:
    """What ranks that hold other sequences, or count other turns, are told."""
    zeros, said = torch.zeros(6), []
    set_debug_checks(True)
    for cu_seqlens, num_segments in (([0, 6] if rank else [0, 2, 6], 4), ([0, 6], 4 + rank)):
        try:
            correct(
                zeros, zeros, zeros == 0, correction=RolloutCorrection(Weight("segment")),
                cu_seqlens=torch.tensor(cu_seqlens), segment_ids=zeros.long(), num_segments=num_segments,
                cp_group=dist.group.WORLD,
            )  # fmt: skip
        except ValueError as error:
            said.append(str(error))
    set_debug_checks(False)
    return said


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(2, everything)


@pytest.mark.parametrize("place", range(len(INDICES)))
@pytest.mark.parametrize("layout", ["DP", "CP"])
def test_ranks_together_equal_pytorch_in_one_process(ranks: list[dict[str, Any]], layout: str, place: int) -> None:
    parts = [rank[layout][place] for rank in ranks]
    assert_together_equal_one_process(parts, INDICES[place], rel=1e-6, backend="torch")


def test_metrics_of_a_pair_over_context_parallel_ranks_equal_pytorch_in_one_process(ranks: list[Any]) -> None:
    batch = whole_batch()
    whole = pair_metrics(*batch.arguments, cu_seqlens=batch.cu_seqlens, backend="torch").values()
    for rank in ranks:
        assert rank["pair"] == pytest.approx(whole, rel=1e-9, abs=1e-12)


def test_ranks_that_disagree_are_told_on_what(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        of_sequences, of_segments = rank["refusals"]
        assert "cu_seqlens must hold one number of sequences on all ranks of cp_group, got [2, 1]" in of_sequences
        assert "num_segments must be one number on all ranks of cp_group, got [4, 5]" in of_segments
