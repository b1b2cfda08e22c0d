"""Rows beyond the reach of 32-bit offsets, and more programs than the second dimension of a grid may have."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from checking.kept import Counts, with_support
from checking.row_problem import Answer, Problem, report, solve, truth
from checking.rows import problem
from checking.setting import Check, Comparison, Setting, generator, poisoned
from megatron_rc import vocab_parallel_logprobs
from megatron_rc.batch import Support

_LAST = 64
"""Rows at the end that are compared."""
_WIDTH = 151_936


def checks(setting: Setting) -> Iterator[Check]:
    for bits in (31, 32):
        for kept in (False, True):
            name = f"rows beyond 2^{bits} elements{', kept ids' if kept else ''}"
            yield Check("far rows", name, partial(_far, bits, kept), large=True)
    yield Check("far rows", "more than 65,535 rows", partial(_many, 70_000, 33))
    yield Check("far rows", "a million rows", partial(_many, 2**20, 257))


def _far(bits: int, kept: bool, setting: Setting, comparison: Comparison) -> None:
    rows = 2**bits // _WIDTH + _LAST + 1
    # the logits, their copy for PyTorch's answer, and what fp64 needs of the last rows
    setting.need_bytes(3 * 2 * rows * _WIDTH + 2**33)
    last = problem(setting, torch.bfloat16, _LAST, _WIDTH, bits)
    if kept:
        with_support(last, Counts(1, 20), generator(setting, bits))
    logits = torch.zeros(rows, _WIDTH, dtype=torch.bfloat16, device=setting.device)
    logits[-_LAST:] = last.logits
    targets = torch.zeros(rows, dtype=torch.int64, device=setting.device)
    targets[-_LAST:] = last.targets
    options = {"inplace_backward": True, "with_entropy": True, "backend": "triton"}
    if kept:
        ids, offsets = last.options["support"]
        # every row before the last ones keeps one id
        before = torch.arange(rows - _LAST, device=setting.device)
        zeros = torch.zeros_like(before)
        options["support"] = Support(torch.cat([zeros, ids]), torch.cat([before, offsets + rows - _LAST]))
    leaf = logits.requires_grad_()
    view = leaf.view_as(leaf)
    with poisoned():
        logprobs, entropy = vocab_parallel_logprobs(view, targets, **options)  # type: ignore[arg-type]
        assert last.up is not None and last.up_entropy is not None
        ups = [torch.zeros(rows, device=setting.device) for _ in range(2)]
        ups[0][-_LAST:], ups[1][-_LAST:] = last.up, last.up_entropy
        (gradient,) = torch.autograd.grad((logprobs, entropy), view, ups)
    ours = Answer(logprobs[-_LAST:].detach(), entropy[-_LAST:].detach(), gradient[-_LAST:])
    report(setting, comparison, last, ours, solve(last, "torch"), truth(last))


def _many(rows: int, width: int, setting: Setting, comparison: Comparison) -> None:
    setting.need_cuda()
    given = problem(setting, torch.bfloat16, setting.size(rows, 40), width)
    with poisoned():
        ours = solve(given, "triton")
    pytorch = solve(given, "torch")
    # fp64 some rows at a time
    for first in range(0, len(given.targets), 2**17):
        span = slice(first, first + 2**17)
        assert given.up is not None and given.up_entropy is not None
        part = Problem(given.logits[span], given.targets[span], {}, given.up[span], given.up_entropy[span])
        mine, theirs = (Answer(*(values[span] for values in answer)) for answer in (ours, pytorch))
        report(setting, comparison, part, mine, theirs, truth(part))
