"""The fused head over two gloo ranks, cut in every way, and what it holds beyond its inputs."""

import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import Collectives, run_ranks
from head_case import Case, Result, by_head, distance, exact, head_case, with_main_grad
from loss_batch import grouped
from torch import Tensor

from megatron_rc import HeadInputs, LossOptions, correct, linear_logprobs, linear_policy_loss, loss_scale
from megatron_rc.backend import set_debug_checks
from megatron_rc.correction.settings import Rejection, RolloutCorrection, Weight
from megatron_rc.logprobs.reference import rows as reference_rows

WIDTHS = (8, 5)
TOKENS, CHUNK = 12, 5
LENGTHS, FEATURES, VOCABULARY = (8, 4, 12), 6, 13
PIECES = {1: [[0, 1, 2, 3]], 2: [[0, 3], [1, 2]]}
"""Which quarters of a sequence each rank has: those of Megatron, first and last, and the two between."""


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


def rows_of(world: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows of the whole batch, local cu_seqlens)."""
    rows, ends, start = list[torch.Tensor](), [0], 0
    for length in LENGTHS:
        quarters = torch.arange(start, start + length).chunk(4)
        rows += [quarters[i] for i in PIECES[world][rank]]
        ends.append(sum(map(len, rows)))
        start += length
    return torch.cat(rows), torch.tensor(ends, dtype=torch.int32)


def one_loss(rank: int, aggregation: Any) -> dict[str, Any]:
    """The loss and the gradient by the weight of all ranks, the gradient by hidden states of this one, metrics."""
    world, group = dist.get_world_size(), dist.group.WORLD
    rows, cu_seqlens = rows_of(world, rank)
    draw, tokens = torch.Generator().manual_seed(3), sum(LENGTHS)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    hidden, weight = normal(tokens, FEATURES)[rows].requires_grad_(), normal(VOCABULARY, FEATURES).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (tokens,), generator=draw)[rows]
    loss_mask = (torch.rand(tokens, generator=draw) < 0.7)[rows]
    old, rollout, reference = (-2.5 + 0.5 * normal(tokens)[rows] for _ in range(3))
    advantages = normal(len(LENGTHS))[torch.repeat_interleave(torch.arange(len(LENGTHS)), cu_seqlens.long().diff())]
    gate = Rejection(level="sequence", reduce="mean", upper=1.5)
    corrected = correct(
        old, rollout, loss_mask, correction=RolloutCorrection(Weight("sequence", upper=2.0), (gate,)),
        cu_seqlens=cu_seqlens, advantages=advantages, cp_group=group,
    )  # fmt: skip
    scale = loss_scale(loss_mask, corrected.mask, aggregation=aggregation, cu_seqlens=cu_seqlens, cp_group=group)
    result = linear_policy_loss(
        hidden, weight, targets, old, advantages, corrected, scale=scale, reference_logprobs=reference,
        options=LossOptions(kl_coef=0.2, entropy_coef=0.1), head=HeadInputs(chunk=5, rows=loss_mask.nonzero()[:, 0]),
        with_entropy=True, upstream=0.7,
    )  # fmt: skip
    (0.7 * result.loss).backward()
    total = torch.cat([result.loss.detach()[None], weight.grad.flatten()])  # type: ignore[union-attr]
    dist.all_reduce(total)
    by_hidden = torch.zeros(tokens, FEATURES, dtype=torch.float64)
    by_hidden[rows] = hidden.grad  # type: ignore[assignment]
    return {"total": total, "by hidden": by_hidden, "metrics": result.metrics.all_reduce(group).values()}


def each_loss(rank: int, aggregations: list[str]) -> list[dict[str, Any]]:
    return [one_loss(rank, aggregation) for aggregation in aggregations]


def test_context_parallel_ranks_give_the_loss_gradients_and_metrics_of_one() -> None:
    aggregations = ["token-mean", "seq-mean-token-mean"]
    (whole,), halves = run_ranks(1, each_loss, aggregations), run_ranks(2, each_loss, aggregations)
    for one, first, second in zip(whole, *halves, strict=True):
        assert one["total"].abs().min() > 0 and one["by hidden"].any()
        torch.testing.assert_close(first["total"], one["total"], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(first["by hidden"] + second["by hidden"], one["by hidden"], rtol=1e-12, atol=1e-14)
        assert first["metrics"] == second["metrics"] == pytest.approx(one["metrics"], rel=1e-12)


MANY, WIDE = 64, 4096
TEMPORARIES = {torch.float32: 80 * 2**10, torch.bfloat16: 144 * 2**10}
"""Bytes of row statistics and products; on a CPU, PyTorch converts one row of logits at a time to fp32."""


def peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes that were allocated at a time, beyond those at the start.

    Without oneDNN, whose products of bf16 take scratch memory that differs from CPU to CPU: on one with AMX more than a
    chunk of logits. What was garbage before is collected first: freed during the call, it would count as the call's.
    """
    gc.collect()
    with (
        warnings.catch_warnings(action="ignore"),
        torch.backends.mkldnn.flags(enabled=False),  # type: ignore[no-untyped-call]
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile,
    ):
        call()
    live = highest = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        highest = max(highest, live)
    return highest


def step(case: Case, leaves: Any, form: str, **options: Any) -> Callable[[], None]:
    given, of_loss = case.of_loss()

    def run() -> None:
        if form == "logprobs":
            logprobs = linear_logprobs(*leaves, case.targets, backend="torch", **grouped(**options))
            logprobs.backward(torch.ones_like(logprobs))  # type: ignore[union-attr]
        else:
            known = {"upstream": 1.0} if form == "policy_loss, upstream" else {}
            terms = {"with_entropy": True, "backend": "torch", **known, **grouped(**of_loss, **options)}
            linear_policy_loss(*leaves, case.targets, *given, **terms).loss.backward()

    return run


@pytest.mark.parametrize("home", ["main_grad", "main_grad, rows", "own"])
# the larger of the two: a chunk of logits, or the gradient that Megatron's DDP wants to see
@pytest.mark.parametrize(("rows", "width"), [(32, 20), (24, 64)], ids=["chunk is larger", "weight is larger"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("form", ["logprobs", "policy_loss", "policy_loss, upstream"])
def test_the_peak_is_a_chunk_or_a_gradient_of_the_weight_and_not_both(
    form: str, dtype: torch.dtype, rows: int, width: int, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_rows, "_CHUNK_ELEMENTS", WIDE)
    monkeypatch.setattr("megatron_rc.logprobs.gradient._BLOCK_ELEMENTS", WIDE)
    case, size = head_case(dtype, MANY, width, WIDE), dtype.itemsize
    leaves = case.leaves() if home == "own" else with_main_grad(case, torch.float32)
    options = {"rows": case.batch["loss_mask"].nonzero()[:, 0]} if home == "main_grad, rows" else {}
    found = peak_bytes(step(case, leaves, form, chunk=rows, **options))

    weight = WIDE * width
    summed = 4 * weight if home == "own" or form == "policy_loss" else 0
    chunk = rows * WIDE * size + summed
    if home == "own":
        # what autograd gets is the sum, or made of it in the dtype of the weight
        gradient = summed + size * weight if dtype == torch.bfloat16 else 0
    else:
        # nothing is in it, but DDP asserts that it is there
        gradient = size * weight
    states = (MANY + (len(options["rows"]) if options else 0)) * width * size
    assert 0 <= found - max(chunk, gradient) <= states + 64 * MANY + TEMPORARIES[dtype]
