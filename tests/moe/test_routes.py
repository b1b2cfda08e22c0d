"""compare_routes against Python sets: exact, whatever the order, dtype, strides and mask, and within its budget."""

import time

import pytest
import torch
from hypothesis import given
from route_sets import DTYPES, assert_same, compare_sets, peak_memory, random_routes, route_pairs
from torch import Tensor

from megatron_rc.moe import reference as routes
from megatron_rc.moe.reference import compare_routes


@given(given_routes=route_pairs())
def test_any_shape_dtype_stride_and_mask_equals_sets(given_routes: tuple[Tensor, Tensor, Tensor | None]) -> None:
    assert_same(compare_routes(*given_routes), compare_sets(*given_routes))


def test_ids_that_agree_in_their_low_bits_only_differ() -> None:
    a, b = torch.tensor([[[5]]], dtype=torch.int16), torch.tensor([[[5 + 2**16]]])
    assert compare_routes(a, b).differing_tokens.item() == compare_routes(b, a).differing_tokens.item() == 1


@pytest.mark.parametrize("ids", [1, 7, 60])
def test_the_cut_into_chunks_changes_nothing(ids: int, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = random_routes((11, 3, 4))
    mask = torch.arange(11) % 2
    monkeypatch.setattr(routes, "_CHUNK_IDS", ids)
    assert_same(compare_routes(a, b, mask), compare_sets(a, b, mask))


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_and_time_stay_within_budget(dtype: torch.dtype) -> None:
    """At most 4 times the input in all, and 500 ms of 2 cores' time: here on one."""
    a, mask = torch.randint(0, 128, (65_536, 48, 8), dtype=dtype), torch.ones(65_536)
    b = torch.where(torch.rand(65_536, 48, 1) < 0.1, a.flip(0), a)
    compare_routes(a[:4096], b[:4096])
    before, start = peak_memory(reset=True), time.process_time()
    compare_routes(a, b, mask)
    # of processor time, which other processes do not stretch
    assert time.process_time() - start < 1.0
    assert peak_memory() - before <= 2 * a.nbytes
