"""vocab_parallel_logprobs over real gloo groups: TP = 1, 2, 3 with shards of unequal width against fp64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from logprobs_truth import truth, unchecked
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rc.batch import Support
from megatron_rc.logprobs import vocab_parallel_logprobs

INF = float("inf")
ROWS = 7


@dataclass(frozen=True)
class Case:
    widths: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    vocab_size: int | None = None
    with_support: bool = False
    with_mask: bool = False
    dead_shard: int | None = None
    """Rank whose logits are all -inf in the first three rows."""
    options: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """The whole logits, the targets and the options, the same on every rank."""
        generator = torch.Generator().manual_seed(sum(self.widths))
        total = sum(self.widths)
        logits = 4 * torch.randn(ROWS, total, generator=generator)
        logits[torch.rand(ROWS, total, generator=generator) < 0.1] = -INF
        if self.dead_shard is not None:
            start = sum(self.widths[: self.dead_shard])
            logits[:3, start : start + self.widths[self.dead_shard]] = -INF
        targets = torch.randint(-1, total + 1, (ROWS,), generator=generator)
        targets[0] = total - 1
        options = dict(self.options, vocab_size=self.vocab_size)
        if self.with_mask:
            options["mask"] = torch.arange(ROWS) % 3 != 1
            logits[1] = torch.nan
        if self.with_support:
            ids = [torch.randperm(total, generator=generator)[: 5 * (row % 3)] for row in range(ROWS)]
            options["support"] = Support(torch.cat(ids), torch.tensor([0, *map(len, ids)]).cumsum(0))
        return logits.to(self.dtype), targets, options


def cases(world: int) -> list[Case]:
    wide = (40, 1025, 3)[:world]
    return [
        Case(wide),
        Case((16,) * world),
        Case(wide, torch.bfloat16, options={"temperature": 0.7}),
        Case(wide, torch.float64, options={"temperature": torch.linspace(0.5, 2, ROWS)}),
        # the padding reaches over the whole last shard and part of the one before
        Case((9, 8, 4)[:world], vocab_size=14 if world > 1 else 7),
        Case(wide, dead_shard=0),
        Case(wide, dead_shard=world - 1),
        Case(wide, with_mask=True),
        Case((9, 8, 4)[:world], with_support=True),
        Case((9, 8, 4)[:world], torch.bfloat16, with_support=True, with_mask=True, options={"temperature": 1.3}),
    ]


class Collectives(TorchDispatchMode):
    """(name, elements sent, dtype) of every collective."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.seen.append((func.overloadpacket.__name__, args[1].numel(), args[1].dtype))
        return func(*args, **(kwargs or {}))


def evaluate(case: Case, rank: int, group: dist.ProcessGroup | None) -> dict[str, Any]:
    logits, targets, options = case.tensors()
    start = sum(case.widths[:rank])
    shard = logits[:, start : start + case.widths[rank]].clone().requires_grad_()
    with unchecked():
        vocab_parallel_logprobs(shard, targets, tp_group=group, with_entropy=True, **options)
    generator = torch.Generator().manual_seed(1)
    with unchecked(), Collectives() as forward:
        lp, entropy = vocab_parallel_logprobs(shard, targets, tp_group=group, with_entropy=True, **options)
    with Collectives() as backward:
        up = torch.randn(2, ROWS, generator=generator, dtype=lp.dtype)
        torch.autograd.backward([lp, entropy], [up[0], up[1]])
    return {
        "lp": lp.detach(),
        "entropy": entropy.detach(),
        "grad": shard.grad,
        "forward": forward.seen,
        "backward": backward.seen,
    }


VOCABULARIES = ((9, 8), (8, 8), (9, 7))
"""Shards of three vocabularies over one group: a rank may have the same width in two of them."""


def every_case(rank: int) -> dict[str, Any]:
    """Tensor parallelism over all three ranks, and over ranks 1 and 2."""
    pair = dist.new_group([1, 2])
    found: dict[str, Any] = {"3": [evaluate(case, rank, dist.group.WORLD) for case in cases(3)]}
    if rank > 0:
        found["2"] = [evaluate(case, rank - 1, pair) for case in cases(2)]
        found["vocabularies"] = [
            evaluate(Case(widths, vocab_size=sum(widths)), rank - 1, pair)["lp"] for widths in VOCABULARIES
        ]
    return found


@pytest.fixture(scope="module")
def three_ranks() -> list[dict[str, Any]]:
    return run_ranks(3, every_case)


@pytest.fixture(params=[1, 2, 3])
def results(request: pytest.FixtureRequest) -> list[tuple[Case, list[dict[str, Any]]]]:
    """Every case with what each rank computed."""
    world = request.param
    if world == 1:
        return [(case, [evaluate(case, 0, None)]) for case in cases(1)]
    ranks = [rank[str(world)] for rank in request.getfixturevalue("three_ranks")[3 - world :]]
    return [(case, [rank[i] for rank in ranks]) for i, case in enumerate(cases(world))]


def test_forward_and_backward_equal_the_fp64_truth(results: list[tuple[Case, list[dict[str, Any]]]]) -> None:
    for case, ranks in results:
        logits, targets, options = case.tensors()
        leaf, lp, entropy = truth(logits, targets, **options)
        up = torch.randn(2, ROWS, generator=torch.Generator().manual_seed(1), dtype=ranks[0]["lp"].dtype).double()
        finite = lp != -INF
        torch.autograd.backward([torch.where(finite, lp, 0), entropy], [up[0] * finite, up[1]])
        tolerance = 1e-12 if case.dtype == torch.float64 else 5e-6
        for rank in ranks:
            torch.testing.assert_close(rank["lp"].double(), lp.detach(), atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(rank["entropy"].double(), entropy.detach(), atol=tolerance, rtol=tolerance)
        grad = torch.cat([rank["grad"] for rank in ranks], 1)
        assert grad.dtype == case.dtype and leaf.grad is not None
        rounding = 2**-8 if case.dtype == torch.bfloat16 else tolerance
        torch.testing.assert_close(grad.double(), leaf.grad, atol=4 * tolerance, rtol=rounding)


def test_all_ranks_hold_the_same_bits(results: list[tuple[Case, list[dict[str, Any]]]]) -> None:
    for _, ranks in results:
        for rank in ranks[1:]:
            assert torch.equal(rank["lp"], ranks[0]["lp"])
            assert torch.equal(rank["entropy"], ranks[0]["entropy"])


def test_one_all_gather_of_four_numbers_a_token_and_none_in_backward(
    results: list[tuple[Case, list[dict[str, Any]]]],
) -> None:
    for case, ranks in results:
        dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
        for rank in ranks:
            assert rank["forward"] == ([("_allgather_base_", 4 * ROWS, dtype)] if len(ranks) > 1 else [])
            assert rank["backward"] == []


def test_vocabularies_of_different_shards_share_a_group(three_ranks: list[dict[str, Any]]) -> None:
    for i, widths in enumerate(VOCABULARIES):
        logits, targets, options = Case(widths, vocab_size=sum(widths)).tensors()
        first, second = (rank["vocabularies"][i] for rank in three_ranks[1:])
        assert torch.equal(first, second)
        torch.testing.assert_close(first.double(), truth(logits, targets, **options)[1].detach(), atol=5e-6, rtol=0)
