"""The kernels of the route comparison against Python sets: exact in every integer."""

import pytest
import torch
from hypothesis import given, settings
from on_device import far_apart
from route_sets import DTYPES, assert_same, compare_sets, random_routes, route_pairs
from torch import Tensor

from megatron_rc.kernels.compare_routes import compare_routes_fwd
from megatron_rc.kernels.launch_table import LAUNCH
from megatron_rc.moe.shift import expert_shift
from megatron_rc.moe.tables import MoeShape, RouteTable
from speed.traffic import counted_traffic

pytestmark = pytest.mark.kernel


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tiles from few tokens."""
    monkeypatch.setitem(LAUNCH, "compare_routes", LAUNCH["compare_routes"]._replace(block=4))


@settings(max_examples=40)
@given(given_routes=route_pairs())
def test_any_shape_dtype_stride_and_mask_equals_sets(given_routes: tuple[Tensor, Tensor, Tensor | None]) -> None:
    assert_same(compare_routes_fwd(*given_routes), compare_sets(*given_routes))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_and_smallest_ids_of_a_dtype(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    a = torch.tensor([[[limits.max, limits.min]], [[limits.max, 0]], [[limits.max - 1, -1]]], dtype=dtype)
    b = torch.tensor([[[limits.max, limits.min]], [[0, limits.max]], [[limits.max, -1]]], dtype=dtype)
    assert_same(compare_routes_fwd(a, b), compare_sets(a, b))


def test_ids_that_agree_in_their_low_bits_only_differ() -> None:
    a, b = torch.tensor([[[5]]], dtype=torch.int16), torch.tensor([[[5 + 2**16]]])
    assert compare_routes_fwd(a, b)[1].item() == compare_routes_fwd(b, a)[1].item() == 1


def test_the_blocks_of_the_launch_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    a, b = random_routes((2 * LAUNCH["compare_routes"].block + 5, 2, 6))
    mask = torch.arange(len(a)) % 5 != 0
    assert_same(compare_routes_fwd(a, b, mask), compare_sets(a, b, mask))


@pytest.mark.parametrize("far", [0, 1, 2])
def test_elements_past_two_to_the_31(far: int) -> None:
    pair = random_routes((6, 3, 4))
    steps = [[12, 4, 1], [4, 24, 1], [3, 1, 18]][far]
    steps[far] = 2**31 // (pair[0].shape[far] - 1) + 99
    a, b = (far_apart((6, 3, 4), steps, 2**31, torch.int16) for _ in range(2))
    for view, ids in zip((a, b), pair, strict=True):
        view.copy_(ids)
    assert_same(compare_routes_fwd(a, b), compare_sets(*pair))


def test_expert_shift_is_the_same_by_both_backends() -> None:
    shape = MoeShape(num_layers=5, layers=(0, 2, 4), top_k=4, num_experts=12)
    tables = [RouteTable(shape, ids.to(shape.dtype)) for ids in random_routes((37, 3, 4), seed=3)]
    generator = torch.Generator().manual_seed(1)
    log_ratio, mask = torch.randn(37, generator=generator), torch.rand(37, generator=generator) < 0.8
    torch_shift, shift = (
        expert_shift(*tables, mask, log_ratio=log_ratio, positions=torch.arange(37), backend=backend)
        for backend in ("torch", "triton")
    )
    assert torch.equal(shift.route_shift, torch_shift.route_shift) and shift.route_shift.any()
    # NaN equals NaN as text
    assert repr(shift.sums.values()) == repr(torch_shift.sums.values())


@pytest.mark.interpreter
def test_both_engines_are_read_once() -> None:
    a, b = random_routes((9, 3, 6))
    with counted_traffic() as traffic:
        compare_routes_fwd(a.int(), b.short(), torch.ones(9, dtype=torch.bool))
    read = {at.argument: size for at, size in traffic.loaded.items() if at.kernel == "compare_routes_fwd_kernel"}
    assert read == {"a": 4 * a.numel(), "b": 2 * b.numel(), "mask": 9}
