"""The fused head over two gloo ranks with shards of unequal width, with and without sequence parallelism."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import Collectives, run_ranks
from head_case import Case, Result, by_head, distance, exact, head_case
from torch import Tensor

from megatron_rc.backend import set_debug_checks

WIDTHS = (8, 5)
TOKENS, CHUNK = 12, 5


@dataclass(frozen=True)
class Layout:
    fused: bool
    sequence_parallel: bool = False
    main_grad: bool = False
    frozen: bool = False
    with_rows: bool = False
    options: dict[str, Any] = field(default_factory=dict)


LAYOUTS = [
    *(Layout(fused, sequence_parallel) for fused in (True, False) for sequence_parallel in (True, False)),
    Layout(True, True, main_grad=True, options={"upstream": 0.7, "temperature": 0.8, "vocab_size": 12}),
    Layout(True, main_grad=True),
    Layout(False, True, main_grad=True),
    Layout(True, frozen=True),
    Layout(False, frozen=True),
    Layout(True, True, with_rows=True),
    Layout(False, with_rows=True),
]


def whole_case() -> Case:
    return head_case(tokens=TOKENS)


def of_rank(layout: Layout, rank: int) -> tuple[Result, Tensor | None, list[tuple[str, int]]]:
    """(result with this rank's gradients, main_grad, collectives)."""
    case = whole_case()
    hidden, weight = case.hidden, case.weight.split(WIDTHS)[rank].clone()
    if layout.sequence_parallel:
        hidden = hidden.chunk(2)[rank]
    hidden = hidden.clone().requires_grad_()
    weight.requires_grad_(not layout.frozen)
    if layout.main_grad:
        weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
        weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    options = dict(layout.options)
    if layout.with_rows:
        options |= {"mask": case.batch["loss_mask"], "rows": case.batch["loss_mask"].nonzero()[:, 0]}
    with Collectives() as collectives:
        result = by_head(
            case, fused=layout.fused, factor=0.7, leaves=(hidden, weight), tp_group=dist.group.WORLD, chunk=CHUNK,
            sequence_parallel=layout.sequence_parallel, **options,
        )  # fmt: skip
    return result, getattr(weight, "main_grad", None), collectives.seen


def every_layout(rank: int) -> list[Any]:
    # the debug checks communicate, and the first call exchanges the widths
    set_debug_checks(False)
    for layout in LAYOUTS:
        of_rank(layout, rank)
    return [of_rank(layout, rank) for layout in LAYOUTS]


@pytest.fixture(scope="module")
def ranks() -> list[list[Any]]:
    return run_ranks(2, every_layout)


@pytest.mark.parametrize("index", range(len(LAYOUTS)), ids=map(str, LAYOUTS))
def test_every_layout_equals_the_fp64_truth(index: int, ranks: list[list[Any]]) -> None:
    layout, case = LAYOUTS[index], whole_case()
    softmax = {name: value for name, value in layout.options.items() if name != "upstream"}
    if layout.with_rows:
        softmax["mask"] = case.batch["loss_mask"]
    true = exact(case, factor=0.7, **softmax)
    results, main_grads, _ = zip(*(rank[index] for rank in ranks), strict=True)
    for result in results:
        for found, truth, same in zip(result[:3], true[:3], results[0][:3], strict=True):
            assert distance(found, truth) <= 1e-12 and torch.equal(found, same)
    by_hidden = [result.by_hidden for result in results]
    for found in [torch.cat(by_hidden)] if layout.sequence_parallel else by_hidden:
        assert distance(found, true.by_hidden) <= 1e-12
    if not layout.frozen:
        by_weight = main_grads if layout.main_grad else [result.by_weight for result in results]
        assert distance(torch.cat(list(by_weight)), true.by_weight) <= 1e-12


def test_a_chunk_costs_one_gather_of_four_numbers_per_token(ranks: list[list[Any]]) -> None:
    """In fp64 here; backward adds one collective, and sequence parallelism one gather in front."""
    for layout, (_, _, seen) in zip(LAYOUTS, ranks[0], strict=True):
        tokens = int(whole_case().batch["loss_mask"].sum()) if layout.with_rows else TOKENS
        chunks = [min(CHUNK, tokens - first) for first in range(0, tokens, CHUNK)]
        gathers = [("_allgather_base_", 2 * 4 * 8 * rows) for rows in chunks]
        states = whole_case().hidden.nbytes
        if layout.sequence_parallel:
            expected = [("_allgather_base_", states), *gathers, ("_reduce_scatter_base_", states // 2)]
        else:
            expected = [*gathers, ("allreduce_", states)]
        assert seen == expected
