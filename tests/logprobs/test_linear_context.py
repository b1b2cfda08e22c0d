"""linear_policy_loss on two context-parallel ranks, each with two distant pieces of every sequence, against one."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks

from megatron_rc.correction.correct import correct
from megatron_rc.correction.settings import Rejection, RolloutCorrection, Weight
from megatron_rc.logprobs.inputs import HeadInputs
from megatron_rc.logprobs.linear import linear_policy_loss
from megatron_rc.loss.options import LossOptions
from megatron_rc.loss.scale import loss_scale

LENGTHS, HIDDEN, VOCABULARY = (8, 4, 12), 6, 13
PIECES = {1: [[0, 1, 2, 3]], 2: [[0, 3], [1, 2]]}
"""Which quarters of a sequence each rank has: those of Megatron, first and last, and the two between."""


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

    hidden, weight = normal(tokens, HIDDEN)[rows].requires_grad_(), normal(VOCABULARY, HIDDEN).requires_grad_()
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
    by_hidden = torch.zeros(tokens, HIDDEN, dtype=torch.float64)
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
