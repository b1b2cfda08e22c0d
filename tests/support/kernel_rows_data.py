"""Rows of logits in every layout for the kernels of log-probs, and what their fp64 truth is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from logprobs_truth import INF, truth
from torch import Tensor

from megatron_rc.kernels.launch_table import LAUNCH
from megatron_rc.logprobs import vocab_parallel_logprobs

BLOCK = 32
TWO_ULP = 2**-22
"""Twice the distance from 1 to the next fp32 number: what a kernel may err more than twice PyTorch's own error."""
ULP = {torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@contextmanager
def small_blocks(block: int | None = BLOCK) -> Iterator[None]:
    """Many blocks a row, from shapes that the interpreter is done with quickly; None: those of the launch table."""
    if block is None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        of_rows = ("row_statistics", "row_statistics_narrow", "row_gradient", "row_gradient_narrow")
        for name in (*of_rows, "merge_statistics"):
            patch.setitem(LAUNCH, name, LAUNCH[name]._replace(block=block))
        yield


@dataclass
class Problem:
    """One call: the logits, the options, and the gradients that come back from what follows."""

    logits: Tensor
    targets: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    up: Tensor | None = None
    """Upstream gradient of the log-probs, in the shape of targets; None: they are not used."""
    up_entropy: Tensor | None = None
    inplace: bool = False

    @property
    def size(self) -> float:
        """1 + the largest finite |z|."""
        temperature = self.options.get("temperature", 1.0)
        z = self.logits.double() / (temperature[..., None] if isinstance(temperature, Tensor) else temperature)
        return 1 + largest(z.nan_to_num(0, 0, 0))


@dataclass
class Solution:
    """All fp64."""

    logprobs: Tensor
    entropy: Tensor
    gradient: Tensor


def solve(problem: Problem, backend: str) -> Solution:
    """By one backend; the memory of the logits stays as it is."""
    leaf = _same_memory_layout(problem.logits).requires_grad_()
    # a leaf that is written in place would be its own gradient
    logits = leaf.view_as(leaf)
    found: list[Tensor] = []
    logits.register_hook(lambda gradient: found.append(gradient))
    lp, entropy = vocab_parallel_logprobs(
        logits, problem.targets, with_entropy=True, backend=backend, inplace_backward=problem.inplace, **problem.options
    )
    used = [(lp, problem.up), (entropy, problem.up_entropy)]
    torch.autograd.backward(*zip(*((y, up) for y, up in used if up is not None), strict=True))
    assert lp.dtype == entropy.dtype == torch.float32 and found[0].dtype == logits.dtype
    assert lp.shape == entropy.shape == problem.targets.shape and found[0].shape == logits.shape
    assert not problem.inplace or found[0].data_ptr() == logits.data_ptr()
    return Solution(lp.detach().double(), entropy.detach().double(), found[0].double())


def solve_exactly(problem: Problem) -> Solution:
    shape, flat = problem.targets.shape, problem.logits.reshape(-1, problem.logits.shape[-1])
    options = {k: v.reshape(-1) if isinstance(v, Tensor) else v for k, v in problem.options.items()}
    leaf, lp, entropy = truth(flat, problem.targets.reshape(-1).long(), **options)
    finite = (lp != -INF).reshape(shape)
    mask = problem.options.get("mask")
    # a row that does not count has no gradient, and 0 * NaN is one
    kept = torch.ones(shape, dtype=torch.bool) if mask is None else mask.reshape(shape) != 0
    total = torch.zeros((), dtype=torch.float64)
    if problem.up is not None:
        up = torch.where(finite & kept, problem.up.double(), 0).reshape(-1)
        total = total + (torch.where(finite.reshape(-1), lp, 0) * up).sum()
    if problem.up_entropy is not None:
        total = total + (entropy * torch.where(kept, problem.up_entropy.double(), 0).reshape(-1)).sum()
    total.backward()
    assert leaf.grad is not None
    return Solution(
        lp.detach().reshape(shape), entropy.detach().reshape(shape), leaf.grad.reshape(problem.logits.shape)
    )


def assert_kernels_are_as_exact_as_pytorch(problem: Problem, block: int | None = BLOCK) -> None:
    """Every error is at most twice that of the fp32 torch backend, plus two ulp of the largest |z| (stated above)."""
    with small_blocks(block):
        ours = solve(problem, "triton")
    pytorch, exact = solve(problem, "torch"), solve_exactly(problem)
    dtype, slack = problem.logits.dtype, TWO_ULP * problem.size
    for name in ("logprobs", "entropy"):
        mine, theirs, true = (getattr(s, name) for s in (ours, pytorch, exact))
        assert torch.equal(mine == -INF, true == -INF), name
        finite = true != -INF
        error, allowed = largest((mine - true)[finite]), 2 * largest((theirs - true)[finite]) + slack
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"
    assert (ours.logprobs <= 0).all()
    upstream = sum(largest(up.nan_to_num(0)) for up in (problem.up, problem.up_entropy) if up is not None)
    temperature = problem.options.get("temperature", 1.0)
    lowest = min(temperature.flatten().tolist(), default=1.0) if isinstance(temperature, Tensor) else temperature
    allowed = 2 * largest(pytorch.gradient - exact.gradient) + slack * upstream * problem.size / lowest
    if dtype != torch.float32:
        # the interpreter drops bits of bf16 where a GPU rounds; the smallest fp16 number for those that vanish
        allowed = allowed + ULP[dtype] * exact.gradient.abs() + 2**-24
    assert ((ours.gradient - exact.gradient).abs() <= allowed).all()
    assert (ours.gradient[without_gradient(problem)] == 0).all()


def without_gradient(problem: Problem) -> Tensor:
    """Where the gradient is exactly 0, in the shape of the logits."""
    mask, shape = problem.options.get("mask"), problem.targets.shape
    idle = torch.zeros(shape, dtype=torch.bool) if mask is None else mask == 0
    ups = [up for up in (problem.up, problem.up_entropy) if up is not None]
    idle = idle | torch.stack([up == 0 for up in ups]).all(0)
    width = problem.logits.shape[-1]
    return (
        idle[..., None] | (torch.arange(width) >= problem.options.get("vocab_size", width)) | (problem.logits == -INF)
    )


def largest(values: Tensor) -> float:
    return values.abs().max().item() if values.numel() else 0.0


def _same_memory_layout(values: Tensor) -> Tensor:
    """A copy with the same strides, an expanded one too, so that a test may write to it."""
    storage = values.untyped_storage().clone()
    copy = torch.empty(0, dtype=values.dtype).set_(storage, values.storage_offset(), values.shape, values.stride())
    return copy


def random(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)


def problem_of(logits: Tensor, targets: Tensor, **options: Any) -> Problem:
    generator = torch.Generator().manual_seed(7)
    options = {name: v.to(logits.device) if isinstance(v, Tensor) else v for name, v in options.items()}
    return Problem(
        logits, targets, options, random(tuple(targets.shape), generator), random(tuple(targets.shape), generator)
    )
