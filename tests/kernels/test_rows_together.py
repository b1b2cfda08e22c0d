"""Rows in company: in a batch, merged from shards, checkpointed, and after a backward in place."""

from __future__ import annotations

import pytest
import torch
from kernel_rows_data import BLOCK, Problem, problem_of, small_blocks, solve, solve_exactly
from logprobs_truth import errors_of_close_logits, random_logits
from on_device import assert_same
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_rc.fused import backend_module
from megatron_rc.kernels.merge_statistics import merge_statistics_fwd
from megatron_rc.logprobs import vocab_parallel_logprobs
from megatron_rc.reference.rows import Rows as ReferenceRows

pytestmark = pytest.mark.kernel


def test_a_row_does_not_depend_on_its_batch_its_position_or_its_strides() -> None:
    logits, targets = random_logits(5, 3 * BLOCK + 7)
    with small_blocks():
        whole = solve(problem_of(logits, targets), "triton")
        columns = solve(problem_of(logits.t().contiguous().t(), targets), "triton")
        rows = [solve(Problem(logits[i : i + 1], targets[i : i + 1], {}, torch.ones(1)), "triton") for i in range(5)]
    for name in ("logprobs", "entropy", "gradient"):
        assert_same(getattr(columns, name), getattr(whole, name))
    assert torch.equal(torch.cat([row.logprobs for row in rows]), whole.logprobs)
    assert torch.equal(torch.cat([row.entropy for row in rows]), whole.entropy)


@pytest.mark.parametrize("widths", [(107,), (53, 54), (21, 54, 32), (21, 21, 21, 21, 23), (32, 32, 32, 11)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shards_that_are_merged_equal_the_fp64_truth(widths: tuple[int, ...], dtype: torch.dtype) -> None:
    logits, targets = random_logits(6, 107)
    temperature, mask = torch.linspace(0.5, 2, 6), torch.arange(6) % 5 != 2
    # the last shards are padding, in part or altogether, which holds anything
    logits[:, 93:], targets = torch.nan, targets % 93
    problem = problem_of(logits.to(dtype), targets, temperature=temperature, mask=mask, vocab_size=93)
    starts = [sum(widths[:index]) for index in range(len(widths))]
    shards = [
        (problem.logits[:, a : a + w], ReferenceRows(targets, temperature, mask, None, None, a, min(max(93 - a, 0), w)))
        for a, w in zip(starts, widths, strict=True)
    ]
    rows, gradient = backend_module("rows", "triton"), torch.empty_like(problem.logits)
    with small_blocks():
        statistics = torch.stack([rows.shard_statistics(*shard, with_entropy=True) for shard in shards])
        merged = rows.merge_shards(statistics, shards[0][1], with_entropy=True)
        for a, w, shard in zip(starts, widths, shards, strict=True):
            rows.write_gradient(gradient[:, a : a + w], *shard, merged, problem.up, problem.up_entropy)
    exact = solve_exactly(problem)
    for found, true in ((merged.logprobs, exact.logprobs), (merged.entropy, exact.entropy)):
        torch.testing.assert_close(found.double(), true, atol=4e-6, rtol=0)
    torch.testing.assert_close(
        gradient.double(), exact.gradient, atol=2e-5, rtol=4 * 2**-23 if dtype == torch.float32 else 2**-7
    )


def test_the_merge_of_64_shards_is_that_of_the_same_rows_in_two_calls_bit_by_bit() -> None:
    maxima, sums = 5 * torch.randn(64, 100), 1 + torch.rand(64, 100)
    gathered = torch.stack([maxima, sums, -sums, maxima - 1], 1)
    with small_blocks():
        whole, *parts = (
            merge_statistics_fwd(part.contiguous(), None, 0.7, with_entropy=True)
            for part in (gathered, *gathered.split([33, 67], 2))
        )
    for all_rows, *of_parts in zip(whole, *parts, strict=True):
        assert torch.equal(torch.cat(of_parts), all_rows)


@pytest.mark.parametrize("wrap", ["checkpoint", "reentrant checkpoint", "autocast"])
def test_checkpointing_and_autocast_change_no_bit(wrap: str, device: torch.device) -> None:
    logits, targets = random_logits(4, 2 * BLOCK + 5)

    def head(logits: Tensor) -> Tensor:
        found = vocab_parallel_logprobs(logits * 1, targets, with_entropy=True, backend="triton")
        return (found[0] + 0.1 * found[1]).sum()

    def wrapped(leaf: Tensor) -> Tensor:
        if wrap != "autocast":
            return checkpoint(head, leaf, use_reentrant="reentrant" in wrap)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return head(leaf)

    leaves = [logits.bfloat16().requires_grad_() for _ in range(2)]
    values = [head(leaves[0]), wrapped(leaves[1])]
    for value in values:
        value.backward()
    assert leaves[0].grad is not None and leaves[1].grad is not None
    assert torch.equal(*values) and torch.equal(leaves[0].grad, leaves[1].grad)


def leaf_and_logits() -> tuple[Tensor, Tensor, Tensor]:
    leaf, targets = random_logits(3, 8)
    return leaf.requires_grad_(), leaf * 1, targets


def test_a_second_backward_after_one_in_place_raises() -> None:
    _, logits, targets = leaf_and_logits()
    lp = vocab_parallel_logprobs(logits, targets, inplace_backward=True, backend="triton")
    assert isinstance(lp, Tensor)
    lp.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        lp.sum().backward()


def test_backward_in_place_raises_in_another_operation_that_saved_the_logits() -> None:
    leaf, logits, targets = leaf_and_logits()
    squared = (logits**2).sum()
    lp = vocab_parallel_logprobs(logits, targets, inplace_backward=True, backend="triton")
    assert isinstance(lp, Tensor)
    torch.autograd.grad(lp.sum(), leaf, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()


@pytest.mark.parametrize("kept", [False, True])
def test_a_temperature_divides_differences_of_logits_which_are_exact_for_close_ones(kept: bool) -> None:
    of_logprobs, of_gradient = errors_of_close_logits(kept=kept, backend="triton")
    assert of_logprobs <= 4e-7 and of_gradient <= 2e-7
