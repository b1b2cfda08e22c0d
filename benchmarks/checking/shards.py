"""The shards of a vocabulary, computed one after the other and merged without a process group."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from checking.kept import Counts, with_support
from checking.row_problem import Answer, Problem, report, truth
from checking.rows import named, problem
from checking.setting import Check, Comparison, Setting, generator, poisoned
from megatron_rc.fused import rows as fused_rows
from megatron_rc.kernels.merge_statistics import merge_statistics_fwd
from megatron_rc.reference import rows as pytorch_rows
from megatron_rc.reference.rows import Rows


class Cut(NamedTuple):
    name: str
    parts: tuple[float, ...]
    """Shares of the vocabulary."""
    padding: float = 0.0
    """Share of the columns, at the end, that are no ids."""


CUTS = (
    Cut("one", (1.0,)),
    Cut("two equal", (0.5, 0.5)),
    Cut("three unequal", (0.2, 0.5, 0.3)),
    Cut("five", (0.2,) * 5),
    Cut("two, the last one padded", (0.5, 0.5), padding=0.2),
    Cut("four, the last one all padding", (0.3, 0.3, 0.3, 0.1), padding=0.15),
)


def checks(setting: Setting) -> Iterator[Check]:
    for cut in CUTS:
        for kept in setting.size((False, True), (len(cut.parts) % 2 == 0,)):
            name = f"{cut.name}{', kept ids' if kept else ''}"
            yield Check("shards", f"{name}, bf16", partial(_cut, cut, torch.bfloat16, kept))
    for dtype in (torch.float16, torch.float32):
        yield Check("shards", f"{CUTS[2].name}, {named(dtype)}", partial(_cut, CUTS[2], dtype, False))
    yield Check("shards", "the merge of 64 is that of the same 64 in two calls, bit by bit", _many)


def _cut(cut: Cut, dtype: torch.dtype, kept: bool, setting: Setting, comparison: Comparison) -> None:
    rows, width = setting.size((96, 9000), (2, 48))
    source = generator(setting, cut.name)
    given = problem(setting, dtype, rows, width, cut.name)
    valid = width - round(cut.padding * width)
    given.targets %= valid
    if kept:
        with_support(given, Counts(1, setting.size(60, 9)), source)
    # a shard of padding holds anything
    given.logits[:, valid:] = torch.nan
    given.options |= {
        "vocab_size": valid,
        "mask": torch.arange(rows, device=setting.device) % 5 != 2,
        "temperature": 0.5 + torch.rand(rows, device=setting.device, generator=source),
    }
    edges = [0, *(round(width * total) for total in itertools.accumulate(cut.parts))]
    with poisoned():
        ours = _merged(given, fused_rows, edges, valid)
    report(setting, comparison, given, ours, _merged(given, pytorch_rows, edges, valid), truth(given))


def _merged(given: Problem, backend: Any, edges: list[int], valid: int) -> Answer:
    """What the ranks of a group would answer, the gradients of their shards beside each other."""
    shards = [
        (given.logits[:, first:behind], _rows(given, first, min(max(valid - first, 0), behind - first)))
        for first, behind in itertools.pairwise(edges)
    ]
    statistics = torch.stack([backend.shard_statistics(*shard, with_entropy=True) for shard in shards])
    merged = backend.merge_shards(statistics, shards[0][1], with_entropy=True)
    gradients = []
    for logits, rows in shards:
        out = torch.empty_like(logits)
        backend.write_gradient(out, logits, rows, merged, given.up, given.up_entropy)
        gradients.append(out)
    return Answer(merged.logprobs, merged.entropy, torch.cat(gradients, 1))


def _rows(given: Problem, start: int, valid: int) -> Rows:
    ids, offsets = given.options.get("support", (None, None))
    return Rows(given.targets, given.options["temperature"], given.options["mask"], ids, offsets, start, valid)


def _many(setting: Setting, comparison: Comparison) -> None:
    """The order of the shards is that of the ranks, however the rows are cut."""
    rows = setting.size(5000, 40)
    source = generator(setting, "many")
    maxima = 5 * torch.randn(64, rows, device=setting.device, generator=source)
    sums = 1 + torch.rand(64, rows, device=setting.device, generator=source)
    gathered = torch.stack([maxima, sums, -sums, maxima - 1], 1).contiguous()
    whole = _merge(gathered)
    halves = [_merge(half.contiguous()) for half in gathered.split([rows // 3, rows - rows // 3], 2)]
    for name, all_rows, *parts in zip(("logprobs", "entropy", "maximum", "log_sum"), whole, *halves, strict=True):
        comparison.equal(name, torch.cat(parts), all_rows)


def _merge(gathered: Tensor) -> list[Tensor]:
    with poisoned():
        logprobs, entropy, maximum, log_sum = merge_statistics_fwd(gathered, None, 0.7, with_entropy=True)
    assert entropy is not None
    return [logprobs, entropy, maximum, log_sum]
