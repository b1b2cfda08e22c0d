"""Rows of logits in every dtype, layout and width, and with every value that logits may have."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from checking.layouts import LAYOUTS, arranged
from checking.row_problem import INF, Problem, compare
from checking.setting import Check, Comparison, Setting, generator

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDTHS = (1, 7, 127, 128, 1187, 4095, 4096, 4097, 9496, 12_568, 18_992, 32_768, 50_257, 131_072, 151_936, 262_144)
_TOY_WIDTHS = (1, 7, 31, 32, 33, 63, 64, 65)

Edit = Callable[[Problem, torch.Generator], None]
"""Makes a problem special."""


def problem(setting: Setting, dtype: torch.dtype, rows: int, width: int, *seed: object) -> Problem:
    """Random logits, targets and upstream gradients."""
    source = generator(setting, dtype, rows, width, *seed)
    new: dict[str, Any] = {"device": setting.device, "generator": source}
    logits = (3 * torch.randn(rows, width, **new)).to(dtype)
    targets = torch.randint(width, (rows,), **new)
    up, up_entropy = torch.randn(2, rows, **new)
    return Problem(logits, targets, {}, up, up_entropy)


def checks(setting: Setting) -> Iterator[Check]:
    for dtype, layout in setting.thinned(itertools.product(DTYPES, LAYOUTS), 2):
        yield Check("rows", f"{named(dtype)}, {layout}", partial(_layout, dtype, layout))
    for width in setting.size(_WIDTHS, _TOY_WIDTHS):
        yield Check("widths", f"bf16, {width:,} columns", partial(_width, width))
    for dtype in setting.size((torch.bfloat16, torch.float32), (torch.bfloat16,)):
        for name, edit in EDITS.items():
            yield Check("values", f"{named(dtype)}, {name}", partial(_edited, dtype, edit))
    yield Check("values", "no log-prob above 0 at temperatures below 1", _never_above_zero)
    yield Check("values", "no row at all", _no_row)


def named(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def _layout(dtype: torch.dtype, layout: str, setting: Setting, comparison: Comparison) -> None:
    rows, width = setting.size((64, 9500), (4 if "pages" in layout else 2, 40))
    given = problem(setting, dtype, rows, width, layout)
    given.logits = arranged(given.logits, layout)
    if given.logits.dim() == 3:
        given.targets, up, up_entropy = (
            part.view(2, -1) for part in (given.targets, given.up, given.up_entropy) if part is not None
        )
        given.up, given.up_entropy = up, up_entropy
    compare(setting, comparison, given)


def _width(width: int, setting: Setting, comparison: Comparison) -> None:
    rows = setting.size(48, 1)
    compare(setting, comparison, problem(setting, torch.bfloat16, rows, width))


def _edited(dtype: torch.dtype, edit: Edit, setting: Setting, comparison: Comparison) -> None:
    given = problem(setting, dtype, *setting.size((96, 9000), (2, 40)), edit.__name__)
    edit(given, generator(setting, edit.__name__))
    compare(setting, comparison, given)


def _never_above_zero(setting: Setting, comparison: Comparison) -> None:
    for temperature in (0.6, 0.7, 0.9):
        given = problem(setting, torch.bfloat16, *setting.size((2048, 1000), (2, 40)), temperature)
        given.logits *= 10
        # the likeliest id: its log-prob is next to 0
        given.targets = given.logits.argmax(1)
        given.options["temperature"] = temperature
        logprobs = compare(setting, comparison, given).logprobs
        comparison.at_most(f"highest log-prob at {temperature}", logprobs.max().item(), 0.0)


def _no_row(setting: Setting, comparison: Comparison) -> None:
    answer = compare(setting, comparison, problem(setting, torch.bfloat16, 0, 70))
    comparison.true("shapes", answer.logprobs.shape == (0,) and answer.gradient.shape == (0, 70))


def _some(given: Problem, source: torch.Generator, share: float) -> Tensor:
    return torch.rand(given.logits.shape, device=given.logits.device, generator=source) < share


def _rows(given: Problem, source: torch.Generator, share: float) -> Tensor:
    """[N] bool; the first row is always among them, the last one never is."""
    chosen = torch.rand(len(given.logits), device=given.logits.device, generator=source) < share
    chosen[0], chosen[-1] = True, False
    return chosen


def _per_row(given: Problem, source: torch.Generator) -> Tensor:
    return 0.5 + torch.rand(len(given.logits), device=given.logits.device, generator=source)


def _masked(given: Problem, source: torch.Generator) -> None:
    given.options["mask"] = ~_rows(given, source, 0.4)


def _all_masked(given: Problem, source: torch.Generator) -> None:
    given.options["mask"] = torch.zeros(len(given.logits), device=given.logits.device)


def _rubbish_behind_a_mask(given: Problem, source: torch.Generator) -> None:
    _masked(given, source)
    gone = ~given.options["mask"]
    given.logits[gone] = torch.nan
    given.targets[gone] = -(2**40)
    assert given.up is not None
    given.up[gone] = torch.nan
    given.options["temperature"] = _per_row(given, source).masked_fill(gone, torch.nan)
    given.options["mask"] = given.options["mask"].to(torch.int64)


def _scattered_minus_inf(given: Problem, source: torch.Generator) -> None:
    given.logits[_some(given, source, 0.3)] = -INF


def _first_block_minus_inf(given: Problem, source: torch.Generator) -> None:
    given.logits[:, : 5 * given.logits.shape[1] // 9] = -INF


def _only_one_finite(given: Problem, source: torch.Generator) -> None:
    keep = torch.zeros_like(given.logits, dtype=torch.bool).scatter_(1, given.targets[:, None], True)
    given.logits[~keep] = -INF


def _whole_rows_minus_inf(given: Problem, source: torch.Generator) -> None:
    given.logits[_rows(given, source, 0.4)] = -INF


def _target_minus_inf(given: Problem, source: torch.Generator) -> None:
    chosen = _rows(given, source, 0.4)
    given.logits[chosen, given.targets[chosen]] = -INF


def _targets_outside(given: Problem, source: torch.Generator) -> None:
    width = given.logits.shape[1]
    odd = torch.tensor([-1, width, 2**33, -(2**33)], device=given.logits.device)
    chosen = _rows(given, source, 0.4)
    given.targets[chosen] = odd[torch.arange(len(given.targets), device=odd.device) % 4][chosen]


def _nan(given: Problem, source: torch.Generator) -> None:
    given.logits[_rows(given, source, 0.4), 3] = torch.nan


def _plus_inf(given: Problem, source: torch.Generator) -> None:
    given.logits[_rows(given, source, 0.4), -1] = INF


def _far_below_zero(given: Problem, source: torch.Generator) -> None:
    given.logits -= 1000


def _far_apart(given: Problem, source: torch.Generator) -> None:
    given.logits *= 1000


def _equal_logits(given: Problem, source: torch.Generator) -> None:
    given.logits.fill_(2.5)


def _padded_vocabulary(given: Problem, source: torch.Generator) -> None:
    valid = given.logits.shape[1] - 13
    given.logits[:, valid:] = torch.nan
    given.targets %= valid
    given.options["vocab_size"] = valid


def _cold(given: Problem, source: torch.Generator) -> None:
    given.options["temperature"] = 0.6


def _hot(given: Problem, source: torch.Generator) -> None:
    given.options["temperature"] = 1.7


def _temperature_per_row(given: Problem, source: torch.Generator) -> None:
    given.options["temperature"] = _per_row(given, source)


def _strided_arguments(given: Problem, source: torch.Generator) -> None:
    """Targets, mask, temperatures and gradients that are columns of wider tensors, at odd addresses."""
    given.options |= {"temperature": _per_row(given, source), "mask": ~_rows(given, source, 0.4)}
    assert given.up is not None and given.up_entropy is not None

    def column(values: Tensor) -> Tensor:
        return torch.stack([values, values, values], 1)[:, 1]

    given.targets, given.up, given.up_entropy = column(given.targets), column(given.up), column(given.up_entropy)
    given.options |= {name: column(given.options[name]) for name in ("temperature", "mask")}


def _int32_targets(given: Problem, source: torch.Generator) -> None:
    given.targets = given.targets.int()


def _in_place(given: Problem, source: torch.Generator) -> None:
    given.options["inplace_backward"] = True


def _in_place_masked(given: Problem, source: torch.Generator) -> None:
    _rubbish_behind_a_mask(given, source)
    _in_place(given, source)


def _expanded_gradients(given: Problem, source: torch.Generator) -> None:
    """What .sum().backward() sends."""
    given.up = torch.full((), 0.7, device=given.logits.device).expand(len(given.logits))
    given.up_entropy = torch.full((), -0.3, device=given.logits.device).expand(len(given.logits))


def _rows_without_gradient(given: Problem, source: torch.Generator) -> None:
    gone = _rows(given, source, 0.5)
    assert given.up is not None and given.up_entropy is not None
    given.up, given.up_entropy = given.up.masked_fill(gone, 0), given.up_entropy.masked_fill(gone, 0)


def _only_logprobs(given: Problem, source: torch.Generator) -> None:
    given.up_entropy = None


def _only_entropy(given: Problem, source: torch.Generator) -> None:
    given.up = None


EDITS: dict[str, Edit] = {
    "40 % masked": _masked,
    "all masked": _all_masked,
    "NaN behind a mask": _rubbish_behind_a_mask,
    "30 % -inf": _scattered_minus_inf,
    "first blocks -inf": _first_block_minus_inf,
    "only the target finite": _only_one_finite,
    "whole rows -inf": _whole_rows_minus_inf,
    "target -inf": _target_minus_inf,
    "targets outside the vocabulary": _targets_outside,
    "NaN among the logits": _nan,
    "+inf among the logits": _plus_inf,
    "all far below 0": _far_below_zero,
    "far apart": _far_apart,
    "all equal": _equal_logits,
    "NaN behind vocab_size": _padded_vocabulary,
    "temperature 0.6": _cold,
    "temperature 1.7": _hot,
    "a temperature per row": _temperature_per_row,
    "strided targets, mask, temperatures, gradients": _strided_arguments,
    "int32 targets": _int32_targets,
    "in place": _in_place,
    "in place, NaN behind a mask": _in_place_masked,
    "expanded gradients": _expanded_gradients,
    "rows without gradient": _rows_without_gradient,
    "gradient of log-probs alone": _only_logprobs,
    "gradient of entropy alone": _only_entropy,
}
