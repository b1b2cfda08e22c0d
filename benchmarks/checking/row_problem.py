"""Log-probs, entropy and gradient of rows of logits: by kernels, by PyTorch, and in fp64 by their formulas."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from checking.layouts import same_layout
from checking.setting import TWO_ULP, Comparison, Setting, poisoned
from megatron_rc import vocab_parallel_logprobs

INF = float("inf")


@dataclass
class Problem:
    """One call, and the gradients that come back from what follows it."""

    logits: Tensor
    """[N, V] or [B, T, V]."""
    targets: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    """Options of vocab_parallel_logprobs."""
    up: Tensor | None = None
    """Upstream gradient of the log-probs; None: they are not used."""
    up_entropy: Tensor | None = None

    def flat(self, name: str) -> Tensor | None:
        value = self.options.get(name)
        return value.reshape(-1) if isinstance(value, Tensor) else None

    @property
    def temperature(self) -> float | Tensor:
        """A number, or [N, 1] fp64."""
        per_row = self.flat("temperature")
        return self.options.get("temperature", 1.0) if per_row is None else per_row.double()[:, None]


class Answer(NamedTuple):
    logprobs: Tensor
    """[N]."""
    entropy: Tensor
    gradient: Tensor
    """[N, V]."""


def solve(problem: Problem, backend: str) -> Answer:
    """By one backend; the memory of the problem's logits stays as it is."""
    leaf = same_layout(problem.logits).requires_grad_()
    # a leaf that is written in place would be its own gradient
    logits = leaf.view_as(leaf)
    options = {**problem.options, "with_entropy": True, "backend": backend}
    logprobs, entropy = vocab_parallel_logprobs(logits, problem.targets, **options)
    used = [(y, up) for y, up in ((logprobs, problem.up), (entropy, problem.up_entropy)) if up is not None]
    (gradient,) = torch.autograd.grad([y for y, _ in used], logits, [up for _, up in used])
    in_place = gradient.data_ptr() == logits.data_ptr()
    assert in_place is bool(options.get("inplace_backward")) or not gradient.numel()
    return Answer(logprobs.detach().reshape(-1), entropy.detach().reshape(-1), gradient.flatten(0, -2))


def truth(problem: Problem) -> Answer:
    """fp64. NaN throughout for a row with NaN or +inf among the logits that count."""
    logits = problem.logits.flatten(0, -2)
    rows, width = logits.shape
    legal = _legal(problem, rows, width, logits.device)
    z = torch.where(legal, logits.double() / problem.temperature, -INF)
    empty = (z == -INF).all(1)
    log_sum = torch.where(empty, 0, z.logsumexp(1))
    log_p = z - log_sum[:, None]
    p = torch.where(log_p == -INF, 0, log_p.exp())
    entropy = -torch.where(p == 0, 0, p * log_p).sum(1)
    targets = problem.targets.reshape(-1).long()
    inside = (targets >= 0) & (targets < width)
    column = torch.where(inside, targets, 0)[:, None]
    logprobs = torch.where(inside, log_p.gather(1, column)[:, 0], -INF)
    broken = (z.isnan() | (z == INF)).any(1)
    logprobs, entropy = (torch.where(broken, torch.nan, values) for values in (logprobs, entropy))

    keep = _keep(problem, rows, logits.device)
    up = _upstream(problem.up, keep & (logprobs != -INF), rows, logits)
    up_entropy = _upstream(problem.up_entropy, keep, rows, logits)
    onehot = torch.zeros_like(p).scatter_(1, column, inside.double()[:, None])
    log_p = torch.where(p == 0, 0, log_p)
    gradient = up[:, None] * (onehot - p) - up_entropy[:, None] * p * (log_p + entropy[:, None])
    gradient = torch.where((up == 0)[:, None] & (up_entropy == 0)[:, None], 0, gradient / problem.temperature)
    return Answer(torch.where(keep, logprobs, 0), torch.where(keep, entropy, 0), torch.where(legal, gradient, 0))


def compare(setting: Setting, comparison: Comparison, problem: Problem) -> Answer:
    """Ours is as near to the truth as PyTorch is; what must be exactly 0 is."""
    with poisoned():
        ours = solve(problem, "triton")
    report(setting, comparison, problem, ours, solve(problem, "torch"), truth(problem))
    return ours


def report(
    setting: Setting, comparison: Comparison, problem: Problem, ours: Answer, pytorch: Answer, true: Answer
) -> None:
    divided = (problem.logits.flatten(0, -2).double() / problem.temperature).nan_to_num(0, 0, 0)
    size = 1 + (divided.abs().max().item() if divided.numel() else 0.0)
    epsilon = TWO_ULP * size
    for name in ("logprobs", "entropy"):
        comparison.close(name, *(getattr(answer, name) for answer in (ours, pytorch, true)), epsilon=epsilon)
    temperature = problem.temperature
    # of a masked row it may be anything
    lowest = temperature.nan_to_num(1).min().item() if isinstance(temperature, Tensor) else temperature
    ups = [
        up.nan_to_num(0).abs().max().item() for up in (problem.up, problem.up_entropy) if up is not None and up.numel()
    ]
    dtype = problem.logits.dtype
    # the smallest fp16 number stands for those that vanish
    floor = 0.0 if dtype == torch.float32 else 2.0**-24
    broken = true.logprobs.isnan() | true.entropy.isnan()
    kept = [answer.gradient.where(~broken[:, None], 0) for answer in (ours, pytorch, true)]
    slack = epsilon * size * sum(ups) / float(lowest) + floor
    comparison.close("gradient", *kept, epsilon=slack, cast=setting.cast(dtype))
    nothing = (true.gradient == 0) & (
        _without_upstream(problem, true)[:, None] | (problem.logits.flatten(0, -2) == -INF)
    )
    wrong = torch.where(nothing & ~broken[:, None], ours.gradient, 0)
    comparison.equal("gradient that must be 0", wrong, torch.zeros_like(wrong))


def _legal(problem: Problem, rows: int, width: int, device: torch.device) -> Tensor:
    """[N, V] bool: columns below vocab_size, among the kept ids."""
    vocab_size = problem.options.get("vocab_size") or width
    legal = (torch.arange(width, device=device) < vocab_size).expand(rows, width)
    support = problem.options.get("support")
    if support is None:
        return legal
    kept = torch.zeros(rows, width, dtype=torch.bool, device=device)
    row = torch.arange(rows, device=device).repeat_interleave(support.offsets.long().diff())
    kept[row, support.ids.long()] = True
    return legal & kept


def _keep(problem: Problem, rows: int, device: torch.device) -> Tensor:
    mask = problem.flat("mask")
    return torch.ones(rows, dtype=torch.bool, device=device) if mask is None else mask != 0


def _upstream(up: Tensor | None, counts: Tensor, rows: int, logits: Tensor) -> Tensor:
    if up is None:
        return torch.zeros(rows, dtype=torch.float64, device=logits.device)
    return torch.where(counts, up.reshape(-1).double(), 0)


def _without_upstream(problem: Problem, true: Answer) -> Tensor:
    rows, device = len(true.logprobs), true.logprobs.device
    ups = [up.reshape(-1) == 0 for up in (problem.up, problem.up_entropy) if up is not None]
    return torch.stack(ups).all(0) | ~_keep(problem, rows, device)
