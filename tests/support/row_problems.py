"""Rows of logits and the gradients that come back to them: what either backend makes of them, and the fp64 truth."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
from logprobs_truth import INF, kept_columns, random_logits, truth, unchecked
from torch import Tensor

from megatron_rc.backend import use_triton
from megatron_rc.batch import Support
from megatron_rc.kernels.launch_table import LAUNCH
from megatron_rc.logprobs import backends
from megatron_rc.logprobs.logits import vocab_parallel_logprobs
from megatron_rc.logprobs.reference import rows as reference_rows
from megatron_rc.logprobs.reference.rows import Rows

BLOCK = 32
TWO_ULP = 2**-22
"""Twice the distance from 1 to the next fp32 number: what a kernel may err more than twice PyTorch's own error."""
EPSILON = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6}
"""What the torch backend may err, for a largest |z| of 1."""
ULP = {torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@contextmanager
def small_blocks(block: int = BLOCK) -> Iterator[None]:
    """Many blocks a row, from shapes that the interpreter is done with quickly."""
    of_rows = ("row_statistics", "row_statistics_narrow", "row_gradient", "row_gradient_narrow", "merge_statistics")
    blocks = dict.fromkeys(of_rows, block) | dict.fromkeys(("support_statistics", "support_gradient"), block // 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_rows, "_BLOCK", block)
        for name, size in blocks.items():
            patch.setitem(LAUNCH, name, LAUNCH[name]._replace(block=size))
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
    widths: tuple[int, ...] = ()
    """Widths of shards whose statistics are merged; (): there is one, which needs no merger."""

    @property
    def size(self) -> float:
        """1 + the largest finite |z|."""
        temperature = self.options.get("temperature", 1.0)
        z = self.logits.double() / (temperature[..., None] if isinstance(temperature, Tensor) else temperature)
        return 1 + largest(z.nan_to_num(0, 0, 0))

    @property
    def upstream(self) -> float:
        """The largest upstream gradients, added up."""
        return sum(largest(up.nan_to_num(0)) for up in (self.up, self.up_entropy) if up is not None)

    def shards(self) -> Iterator[tuple[Tensor, Rows]]:
        start, vocabulary = 0, self.options.get("vocab_size", self.logits.shape[-1])
        support = self.options.get("support", (None, None))
        for width in self.widths:
            valid = min(max(vocabulary - start, 0), width)
            temperature, mask = self.options.get("temperature", 1.0), self.options.get("mask")
            yield self.logits[..., start : start + width], Rows(self.targets, temperature, mask, *support, start, valid)
            start += width


class Solution(NamedTuple):
    """All fp64."""

    logprobs: Tensor
    entropy: Tensor
    gradient: Tensor


def solve(problem: Problem, backend: str = "auto") -> Solution:
    """By one backend; the memory of the logits stays as it is."""
    if problem.widths:
        return _solve_shards(problem, backend)
    leaf = _same_memory_layout(problem.logits).requires_grad_()
    # a leaf that is written in place would be its own gradient
    logits = leaf.view_as(leaf)
    found: list[Tensor] = []
    logits.register_hook(lambda gradient: found.append(gradient))
    options = {"backend": backend, "inplace_backward": problem.inplace, **problem.options}
    with unchecked():
        lp, entropy = vocab_parallel_logprobs(logits, problem.targets, with_entropy=True, **options)
        used = [(lp, problem.up), (entropy, problem.up_entropy)]
        torch.autograd.backward(*zip(*((y, up.to(y.dtype)) for y, up in used if up is not None), strict=True))
    assert lp.dtype == entropy.dtype == torch.promote_types(logits.dtype, torch.float32)
    assert lp.shape == entropy.shape == problem.targets.shape and found[0].shape == logits.shape
    assert found[0].dtype == logits.dtype
    assert not problem.inplace or found[0].data_ptr() == logits.data_ptr()
    return Solution(lp.detach().double(), entropy.detach().double(), found[0].double())


def _solve_shards(problem: Problem, backend: str) -> Solution:
    shards, gradients = list(problem.shards()), list[Tensor]()
    rows = backends.computing(backend, logits=problem.logits)
    statistics = torch.stack([rows.shard_statistics(*shard, with_entropy=True) for shard in shards])
    merged = rows.merge_shards(statistics, shards[0][1], with_entropy=True)
    for shard in shards:
        gradients.append(torch.empty_like(shard[0], memory_format=torch.contiguous_format))
        rows.write_gradient(gradients[-1], *shard, merged, problem.up, problem.up_entropy)
    return Solution(merged.logprobs.double(), merged.entropy.double(), torch.cat(gradients, -1).double())


def solve_exactly(problem: Problem) -> Solution:
    shape, flat = problem.targets.shape, problem.logits.reshape(-1, problem.logits.shape[-1])
    options = {k: v.reshape(-1) if isinstance(v, Tensor) else v for k, v in problem.options.items()}
    leaf, lp, entropy = truth(flat, problem.targets.reshape(-1).long(), **options)
    finite = (lp != -INF).reshape(shape)
    mask = problem.options.get("mask")
    # a row that does not count has no gradient, and 0 * NaN is one
    kept = torch.ones(shape, dtype=torch.bool) if mask is None else mask.reshape(shape) != 0
    total = (leaf * 0).nan_to_num(0, 0, 0).sum()
    if problem.up is not None:
        up = torch.where(finite & kept, problem.up.double(), 0).reshape(-1)
        total = total + (torch.where(finite.reshape(-1), lp, 0) * up).sum()
    if problem.up_entropy is not None:
        total = total + (entropy * torch.where(kept, problem.up_entropy.double(), 0).reshape(-1)).sum()
    (gradient,) = torch.autograd.grad(total, leaf)
    return Solution(lp.detach().reshape(shape), entropy.detach().reshape(shape), gradient.reshape(problem.logits.shape))


def assert_exact(problem: Problem) -> Solution:
    """Errors of kernels are at most twice those of the fp32 torch backend and some ulp, whose own are rounding."""
    kernels = use_triton("auto", logits=problem.logits)
    ours, exact = solve(problem), solve_exactly(problem)
    theirs = solve(replace(problem, widths=(), inplace=False), "torch") if kernels else exact
    *of_values, of_gradient = _slack(problem, kernels)
    for name, slack in zip(("logprobs", "entropy"), of_values, strict=True):
        mine, other, true = (getattr(s, name) for s in (ours, theirs, exact))
        assert torch.equal(mine == -INF, true == -INF), name
        finite = true != -INF
        error, allowed = largest((mine - true)[finite]), 2 * largest((other - true)[finite]) + slack
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"
    assert (ours.logprobs <= 0).all()
    allowed = torch.tensor(2 * largest(theirs.gradient - exact.gradient) + of_gradient)
    if problem.logits.dtype in (torch.bfloat16, torch.float16):
        # the interpreter drops bits of bf16 where a GPU rounds; the smallest fp16 number for those that vanish
        allowed = allowed + ULP[problem.logits.dtype] * exact.gradient.abs() + 2**-24
    assert ((ours.gradient - exact.gradient).abs() <= allowed).all()
    assert (ours.gradient[without_gradient(problem)] == 0).all()
    return ours


def _slack(problem: Problem, kernels: bool) -> tuple[float, float, float]:
    """What log-probs, entropy and gradient may err by rounding alone."""
    if not kernels:
        rounding = EPSILON[problem.logits.dtype] * problem.size
        return rounding, rounding, 8 * rounding * max(1.0, problem.upstream)
    rounding = TWO_ULP * problem.size
    if "support" in problem.options:
        return rounding, rounding, 5e-7 * max(1.0, problem.upstream)
    temperature = problem.options.get("temperature", 1.0)
    lowest = min(temperature.flatten().tolist(), default=1.0) if isinstance(temperature, Tensor) else temperature
    return rounding, rounding, rounding * problem.upstream * problem.size / lowest


def without_gradient(problem: Problem) -> Tensor:
    """Where the gradient is exactly 0, in the shape of the logits."""
    mask, shape = problem.options.get("mask"), problem.targets.shape
    idle = torch.zeros(shape, dtype=torch.bool) if mask is None else mask == 0
    ups = [up for up in (problem.up, problem.up_entropy) if up is not None]
    idle = idle | torch.stack([up == 0 for up in ups]).all(0)
    width = problem.logits.shape[-1]
    beyond = torch.arange(width) >= problem.options.get("vocab_size", width)
    if "support" in problem.options:
        beyond = beyond | ~kept_columns(problem.options["support"], width).view(*shape, width)
    return idle[..., None] | beyond | (problem.logits == -INF)


def largest(values: Tensor) -> float:
    return values.abs().max().item() if values.numel() else 0.0


def _same_memory_layout(values: Tensor) -> Tensor:
    """A copy with the same strides, an expanded one too, so that a test may write to it."""
    storage = values.untyped_storage().clone()
    return torch.empty(0, dtype=values.dtype).set_(storage, values.storage_offset(), values.shape, values.stride())


def problem_of(logits: Tensor, targets: Tensor, **options: Any) -> Problem:
    generator = torch.Generator().manual_seed(7)
    options = {name: v.to(logits.device) if isinstance(v, Tensor) else v for name, v in options.items()}
    return Problem(logits, targets, options, *[torch.randn(targets.shape, generator=generator) for _ in range(2)])


def kept_problem(rows: int = 4, width: int = 90, kept: int = 46, **options: Any) -> Problem:
    """Rows with so many kept ids each, in random order; the target is one of them."""
    logits, _ = random_logits(rows, width)
    ids = torch.rand(rows, width, generator=torch.Generator().manual_seed(1)).argsort(1)[:, :kept]
    support = Support(ids.flatten(), kept * torch.arange(rows + 1))
    return problem_of(logits, ids[torch.arange(rows), torch.arange(rows) % kept], support=support, **options)
