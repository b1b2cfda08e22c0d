"""Batches for the correction, and `correct` for tests: the fields of its `Extras` are arguments of their own."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from megatron_rc import Corrected, Extras, RolloutCorrection, Weight
from megatron_rc.correction import correct as of_package


@dataclass
class Case:
    """Arguments of `correct`; what is None is left out."""

    train: Tensor
    rollout: Tensor
    mask: Tensor
    cu_seqlens: Tensor | None
    advantages: Tensor
    """[S], or [N]."""
    statistics: dict[str, Tensor] = field(default_factory=dict)
    lags: Tensor | None = None
    """[N] int."""
    sampling_logprobs: Tensor | None = None
    segment_ids: Tensor | None = None
    num_segments: int | None = None

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.train, self.rollout, self.mask

    @property
    def options(self) -> dict[str, Any]:
        given = {each.name: getattr(self, each.name) for each in fields(self)[3:]}
        return {name: value for name, value in given.items() if value is not None}

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Case":
        """With every tensor changed."""

        def changed(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: change(tensor) for name, tensor in value.items()}
            return change(value) if isinstance(value, Tensor) else value

        return Case(*(changed(getattr(self, each.name)) for each in fields(self)))

    def part(self, first: int, last: int) -> "Case":
        """Sequences first to last - 1."""
        bounds = self.cu_seqlens[first : last + 1]
        rows = slice(int(bounds[0]), int(bounds[-1]))
        statistics = {name: value[rows] for name, value in self.statistics.items()}
        lags = None if self.lags is None else self.lags[rows]
        tokens = (x[rows] for x in self.arguments)
        return Case(*tokens, bounds - bounds[0], self.advantages[first:last], statistics, lags)


def case(
    lengths: list[int], *, seed: int = 0, density: float = 0.7, gap: float = 0.4, dtype: torch.dtype = torch.float32
) -> Case:
    """Random log-probs for sequences of these lengths, 0 included; some have no loss token."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    rollout = -torch.rand(n, generator=generator) * 3
    train, rollout = below_zero(rollout + torch.randn(n, generator=generator) * gap, rollout)
    mask = torch.rand(n, generator=generator) < density
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    advantages = torch.randn(len(lengths), generator=generator)
    surprise = torch.randn(n, generator=generator)
    # rows without a loss hold rubbish
    train, rollout, surprise = (torch.where(mask, x, torch.nan) for x in (train, rollout, surprise))
    return Case(train.to(dtype), rollout.to(dtype), mask, cu_seqlens, advantages, {"surprise": surprise})


def padded_around(batch: Case, head: int, tail: int) -> Case:
    """The same sequences between rows of rubbish that belong to none of them."""

    def around(value: Tensor, filling: Any) -> Tensor:
        return torch.cat([value.new_full((head,), filling), value, value.new_full((tail,), filling)])

    return Case(
        around(batch.train, 5.0), around(batch.rollout, math.nan), around(batch.mask, True), batch.cu_seqlens + head,
        batch.advantages, {name: around(value, math.nan) for name, value in batch.statistics.items()},
    )  # fmt: skip


def gapped(*log_ratios: float, lengths: list[int] | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """train, rollout, mask, cu_seqlens; all tokens count."""
    given = torch.tensor(log_ratios, dtype=torch.float32)
    cu_seqlens = torch.tensor([0, *(lengths or [len(given)])]).cumsum(0).to(torch.int32)
    return *below_zero(given, torch.zeros_like(given)), torch.ones_like(given, dtype=torch.bool), cu_seqlens


def below_zero(train: Tensor, rollout: Tensor) -> tuple[Tensor, Tensor]:
    """The same log-ratios, of log-probs that are not above 0."""
    above = torch.maximum(train, rollout).clamp(min=0).nan_to_num(0, 0)
    return train - above, rollout - above


def weight(level: str, mode: str) -> Weight:
    return Weight(level, mode, None if mode == "truncate" else 0.8, 1.3)  # type: ignore[arg-type]


def correct(*pair: Any, **given: Any) -> Corrected:
    own = {field.name: given.pop(field.name) for field in fields(Extras) if field.name in given}
    return of_package.correct(*pair, extras=Extras(**own), **given)


def on_gaps(
    correction: RolloutCorrection, *log_ratios: float, lengths: list[int] | None = None, **options: Any
) -> Corrected:
    """The correction of tokens with these log-ratios, which all count."""
    train, rollout, mask, cu_seqlens = gapped(*log_ratios, lengths=lengths)
    return correct(train, rollout, mask, correction=correction, cu_seqlens=cu_seqlens, **options)
