"""Log-probs over the kept ids of a truncated sampler."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from checking.layouts import LAYOUTS, arranged
from checking.row_problem import INF, Problem, compare
from checking.rows import DTYPES, Edit, named, problem
from checking.setting import Check, Comparison, Setting, generator
from megatron_rc.batch import Support


class Counts(NamedTuple):
    """How many ids each row keeps."""

    fewest: int
    most: int


_COUNTS = (Counts(1, 1), Counts(20, 20), Counts(1, 128), Counts(128, 128), Counts(129, 600), Counts(0, 5))
_TOY_COUNTS = (Counts(1, 1), Counts(8, 8), Counts(9, 33), Counts(0, 3))


def checks(setting: Setting) -> Iterator[Check]:
    for dtype in DTYPES:
        yield Check("kept ids", f"{named(dtype)}, 1 to 20 per row", partial(_counted, dtype, Counts(1, 20)))
    for counts in setting.size(_COUNTS, _TOY_COUNTS):
        name = f"{counts.fewest} to {counts.most} per row"
        yield Check("kept ids", name, partial(_counted, torch.bfloat16, counts))
    for layout in LAYOUTS:
        yield Check("kept ids", f"bf16, {layout}", partial(_layout, layout))
    for name, edit in EDITS.items():
        yield Check("kept ids", name, partial(_edited, edit))


def with_support(given: Problem, counts: Counts, source: torch.Generator) -> Problem:
    """Keeps some ids of every row, in no order, the target among them where any is; never the last id."""
    rows, width = given.logits.shape
    device = given.logits.device
    order = torch.rand(rows, width, device=device, generator=source)
    lengths = torch.randint(counts.fewest, counts.most + 1, (rows,), device=device, generator=source)
    given.targets = given.targets % (width - 1)
    order.scatter_(1, given.targets[:, None], -1)
    order[:, -1] = 2
    ids = order.argsort(1)[:, : counts.most]
    # the target leads its row here; turned, it lies anywhere
    slot = torch.arange(ids.shape[1], device=device)
    turned = (slot + 3 * torch.arange(rows, device=device)[:, None]) % lengths.clamp(min=1)[:, None]
    kept = slot < lengths[:, None]
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    given.options["support"] = Support(ids.gather(1, turned)[kept], offsets)
    return given


def _problem(setting: Setting, dtype: torch.dtype, counts: Counts) -> Problem:
    rows, width = setting.size((96, 5000), (4, 40))
    return with_support(problem(setting, dtype, rows, width, counts), counts, generator(setting, counts))


def _counted(dtype: torch.dtype, counts: Counts, setting: Setting, comparison: Comparison) -> None:
    compare(setting, comparison, _problem(setting, dtype, counts))


def _layout(layout: str, setting: Setting, comparison: Comparison) -> None:
    given = _problem(setting, torch.bfloat16, Counts(1, setting.size(40, 9)))
    given.logits = arranged(given.logits, layout)
    if given.logits.dim() == 3:
        assert given.up is not None and given.up_entropy is not None
        given.targets = given.targets.view(2, -1)
        given.up, given.up_entropy = given.up.view(2, -1), given.up_entropy.view(2, -1)
    compare(setting, comparison, given)


def _edited(edit: Edit, setting: Setting, comparison: Comparison) -> None:
    given = _problem(setting, torch.bfloat16, Counts(1, setting.size(60, 9)))
    edit(given, generator(setting, edit.__name__))
    compare(setting, comparison, given)


def _every_third(given: Problem) -> Tensor:
    return torch.arange(len(given.targets), device=given.targets.device) % 3 == 0


def _unkept_targets(given: Problem, source: torch.Generator) -> None:
    """Targets that were not kept have log-prob -inf and no gradient."""
    given.targets[_every_third(given)] = given.logits.shape[1] - 1


def _minus_inf_kept(given: Problem, source: torch.Generator) -> None:
    gone = torch.rand(given.logits.shape, device=given.logits.device, generator=source) < 0.4
    given.logits[gone] = -INF


def _nan_not_kept(given: Problem, source: torch.Generator) -> None:
    """No other logit than the kept ones is read."""
    support = given.options["support"]
    keep = torch.zeros_like(given.logits, dtype=torch.bool)
    row = torch.arange(len(keep), device=keep.device).repeat_interleave(support.offsets.diff())
    keep[row, support.ids] = True
    given.logits[~keep] = torch.nan


def _masked(given: Problem, source: torch.Generator) -> None:
    gone = _every_third(given)
    given.options["mask"] = ~gone
    given.logits[gone] = torch.nan


def _temperature_per_row(given: Problem, source: torch.Generator) -> None:
    given.options["temperature"] = 0.5 + torch.rand(len(given.targets), device=given.targets.device, generator=source)


def _cold(given: Problem, source: torch.Generator) -> None:
    given.options["temperature"] = 0.7


def _in_place(given: Problem, source: torch.Generator) -> None:
    given.options["inplace_backward"] = True


def _int32(given: Problem, source: torch.Generator) -> None:
    given.targets = given.targets.int()
    given.options["support"] = Support(*(part.int() for part in given.options["support"]))


def _strided(given: Problem, source: torch.Generator) -> None:
    given.options["support"] = Support(*(torch.stack([part, part], 1)[:, 0] for part in given.options["support"]))


def _behind_vocab_size(given: Problem, source: torch.Generator) -> None:
    """Kept ids in the padding count as -inf."""
    given.options["vocab_size"] = given.logits.shape[1] - 5
    given.logits[:, -5:] = torch.nan


def _only_logprobs(given: Problem, source: torch.Generator) -> None:
    given.up_entropy = None


EDITS: dict[str, Edit] = {
    "targets that were not kept": _unkept_targets,
    "-inf among the kept": _minus_inf_kept,
    "NaN among the others": _nan_not_kept,
    "masked rows of NaN": _masked,
    "a temperature per row": _temperature_per_row,
    "temperature 0.7": _cold,
    "in place": _in_place,
    "int32 ids and offsets": _int32,
    "strided ids and offsets": _strided,
    "ids behind vocab_size": _behind_vocab_size,
    "gradient of log-probs alone": _only_logprobs,
}
