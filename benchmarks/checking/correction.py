"""correct(): every preset, level, mode and gate on ragged batches, beside the same in fp64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from checking.setting import Check, Comparison, Setting, generator, poisoned
from megatron_rc import Corrected, Rejection, RolloutCorrection, Weight, correct
from megatron_rc.config import PRESETS

INF, NAN = math.inf, math.nan
_METRICS = 1e-6
"""Relative error of a metric."""
_SPREADS = ("prob_correlation", "weight_std", "rho_std", "seq_rho_std")
"""Metrics that are rounding where their numbers are next to equal."""
BOUNDS = {  # that split the batches below, and that no value of them comes near
    "ratio": (0.803, 1.297),
    "k2": (0.0103, 0.1207),
    "k3": (0.0103, 0.1207),
    "abs_log_ratio": (0.1013, 0.5017),
    "prob_diff": (-0.0611, 0.0507),
    "surprise": (-0.503, 0.607),
}
EVERY_UNIT = RolloutCorrection(
    Weight("sequence", "clip", *BOUNDS["ratio"]),
    (
        Rejection("ratio", "token", lower=0.2003, upper=5.003),
        Rejection("surprise", "token", upper=2.5003, when="negative_advantage"),
        Rejection("k3", "sequence", "mean", upper=0.3007),
        Rejection("prob_diff", "segment", "max", upper=0.9001),
    ),
    normalize="batch",
)
"""Every unit, and what most batches have."""


@dataclass
class Batch:
    """Log-probs are multiples of 2^-10, so that log-ratios are the same in fp32 and fp64."""

    train: Tensor
    rollout: Tensor
    mask: Tensor
    options: dict[str, Any]

    def double(self) -> Batch:
        given = {
            k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in self.options.items()
        }
        given["statistics"] = {name: value.double() for name, value in self.options["statistics"].items()}
        return Batch(self.train.double(), self.rollout.double(), self.mask, given)

    def correct(self, correction: RolloutCorrection, backend: str) -> Corrected:
        return correct(self.train, self.rollout, self.mask, correction=correction, backend=backend, **self.options)


Edit = Callable[[Batch, torch.Generator], Batch]


def checks(setting: Setting) -> Iterator[Check]:
    for name in setting.thinned(PRESETS, 3):
        yield Check("correction", f"preset {name}", partial(_corrected, RolloutCorrection.preset(name)))
    levels, modes = ("token", "sequence", "geometric", "segment"), ("truncate", "clip", "mask")
    for level, mode in setting.thinned(itertools.product(levels, modes), 2):
        lower = None if mode == "truncate" else BOUNDS["ratio"][0]
        weight = Weight(level, mode, lower, BOUNDS["ratio"][1])  # type: ignore[arg-type]
        yield Check("correction", f"{level} {mode}", partial(_corrected, RolloutCorrection(weight)))
    for statistic, level in setting.thinned(itertools.product(BOUNDS, ("token", "sequence", "segment")), 4):
        yield Check("correction", f"gates on {statistic} of a {level}", partial(_corrected, _gates(statistic, level)))
    for name, edit in EDITS.items():
        yield Check("batches", name, partial(_edited, edit))
    for name, lengths in setting.size(_LENGTHS, _TOY_LENGTHS).items():
        yield Check("batches", name, partial(_lengths, lengths))


def _gates(statistic: str, level: str) -> RolloutCorrection:
    """Every reduction of one statistic, from below and from above."""
    lower, upper = BOUNDS[statistic]
    gates: list[Rejection]
    if level == "token":
        gates = [
            Rejection(statistic, "token", lower=lower),
            Rejection(statistic, "token", upper=upper, when="negative_advantage"),
        ]
    else:
        # sums and extremes are larger than means
        low, high = (lower / 8 if lower > 0 else lower * 4), upper * 8
        gate = partial(Rejection, statistic, level)  # type: ignore[arg-type]
        gates = [
            gate("mean", lower=lower),
            gate("sum", upper=high),
            gate("max", upper=high, when="negative_advantage"),
            gate("min", lower=low),
        ]
    return RolloutCorrection(Weight("token", "truncate", upper=BOUNDS["ratio"][1]), tuple(gates))


_LENGTHS: dict[str, list[int]] = {
    "one long sequence": [200_000],
    "as many sequences as tokens": [1] * 20_000,
    "empty sequences only": [0] * 50,
    "5,000 sequences, half of them empty": [13, 0] * 2500,
    "lengths around a block": [1023, 1024, 1025, 2047, 2048, 2049, 0, 1],
    "one token": [1],
    "a million tokens": [1000, 0, 3000, 2000] * 170,
}
_TOY_LENGTHS: dict[str, list[int]] = {
    "one long sequence": [50],
    "as many sequences as tokens": [1] * 5,
    "empty sequences only": [0] * 2,
    "lengths around a block": [15, 16, 17],
    "one token": [1],
}


def batch_of(setting: Setting, lengths: list[int], *seed: object) -> Batch:
    """Random tokens for sequences of these lengths; rows without a loss hold rubbish."""
    source, n = generator(setting, lengths[:9], *seed), sum(lengths)
    new: dict[str, Any] = {"device": setting.device, "generator": source}
    rollout = -(torch.rand(n, **new) * 3 * 1024).round() / 1024
    train = rollout + (torch.randn(n, **new) * 0.2 * 1024).round() / 1024
    mask = torch.rand(n, **new) < 0.7
    rubbish = torch.tensor([NAN, INF, -INF, 3.0], device=setting.device)[torch.randint(4, (n,), **new)]
    surprise = torch.randn(n, **new)
    train, rollout, surprise = (torch.where(mask, x, rubbish) for x in (train, rollout, surprise))
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=setting.device)
    advantages = torch.randn(len(lengths), **new)
    options = {"cu_seqlens": cu_seqlens, "advantages": advantages, "statistics": {"surprise": surprise}}
    return Batch(train, rollout, mask, options)


def _ragged(setting: Setting, *seed: object) -> Batch:
    lengths = setting.size([0, 1500, 3, 0, 700, 2100, 1, 40, 5000, 0], [18, 0, 5])
    return batch_of(setting, lengths * setting.size(4, 1), *seed)


def compare(comparison: Comparison, batch: Batch, correction: RolloutCorrection) -> None:
    """Mask exactly, weights as near to fp64 as PyTorch in fp32, metrics to a millionth."""
    with poisoned():
        ours = batch.correct(correction, "triton")
    pytorch, truth = batch.correct(correction, "torch"), batch.double().correct(correction, "torch")
    comparison.equal("mask", ours.mask, truth.mask)
    comparison.equal("bad_sequences", ours.bad_sequences, truth.bad_sequences)
    comparison.true("no weight where the mask is 0", not bool(ours.weights[~ours.mask].any()))
    size = truth.weights.abs().max().item() if truth.weights.numel() else 0.0
    comparison.close("weights", ours.weights, pytorch.weights, truth.weights, epsilon=2.0**-23 * size)
    found, expected = ours.metrics.values(), truth.metrics.values()
    comparison.true("the same metrics", found.keys() == expected.keys())
    worst, name = max((_relative(found.get(name, INF), value, name), name) for name, value in expected.items())
    comparison.at_most(f"metric {name}", worst, _METRICS)


def _relative(found: float, expected: float, name: str) -> float:
    if math.isnan(expected) or math.isinf(expected):
        return 0.0 if found == expected or (math.isnan(found) and math.isnan(expected)) else INF
    # a difference that is next to nothing has no relative error
    slack = 1e-6 if name in _SPREADS else 1e-13
    return max(abs(found - expected) - slack, 0.0) / abs(expected) if expected else float(abs(found) > slack)


def _corrected(correction: RolloutCorrection, setting: Setting, comparison: Comparison) -> None:
    batch = _ragged(setting, repr(correction))
    if correction.reject and correction.reject[0].upper in (1.001, 1.002):
        # sequences that such gates keep
        batch = replace(batch, train=batch.rollout + (batch.train - batch.rollout).round(decimals=0) / 1024)
    compare(comparison, batch, correction)


def _edited(edit: Edit, setting: Setting, comparison: Comparison) -> None:
    batch = _ragged(setting, edit.__name__)
    compare(comparison, edit(batch, generator(setting, edit.__name__)), EVERY_UNIT)


def _lengths(lengths: list[int], setting: Setting, comparison: Comparison) -> None:
    compare(comparison, batch_of(setting, lengths), EVERY_UNIT)


def _some(batch: Batch, source: torch.Generator, share: float) -> Tensor:
    return torch.rand(batch.mask.shape, device=batch.mask.device, generator=source) < share


def _corrupt(batch: Batch, source: torch.Generator) -> Batch:
    """NaN and infinities of tokens that count."""
    share = min(0.1, 20 / len(batch.mask))
    for index, side in enumerate((batch.train, batch.rollout) * 3):
        side[_some(batch, source, share) & batch.mask] = (NAN, INF, -INF)[index // 2]
    batch.options["statistics"]["surprise"][_some(batch, source, share)] = NAN
    return batch


def _impossible(batch: Batch, source: torch.Generator) -> Batch:
    """Tokens that the trainer gives no probability: rho is 0, and nothing is corrupt."""
    batch.train[_some(batch, source, 0.01) & batch.mask] = -INF
    return batch


def _far_apart(batch: Batch, source: torch.Generator) -> Batch:
    """Log-ratios beyond log_ratio_bound."""
    batch.train[_some(batch, source, 0.1)] -= 30
    batch.rollout[_some(batch, source, 0.1)] -= 30
    return batch


def _no_loss(batch: Batch, source: torch.Generator) -> Batch:
    batch.mask.zero_()
    return batch


def _all_loss(batch: Batch, source: torch.Generator) -> Batch:
    keep = batch.mask
    for side in (batch.train, batch.rollout, batch.options["statistics"]["surprise"]):
        side[~keep] = -0.25
    return replace(batch, mask=torch.ones_like(keep))


def _segment_ids(batch: Batch, source: torch.Generator) -> Batch:
    """Turns that are named, with rows without a loss inside them."""
    starts = _some(batch, source, 0.05)
    first = batch.options["cu_seqlens"][:-1].long()
    starts[first[first < len(starts)]] = True
    ids = torch.where(batch.mask, starts.cumsum(0), -7)
    batch.options |= {"segment_ids": ids, "num_segments": len(ids) + 2}
    return batch


def _token_advantages(batch: Batch, source: torch.Generator) -> Batch:
    batch.options["advantages"] = torch.randn(batch.mask.shape, device=batch.mask.device, generator=source)
    return batch


def _padded(batch: Batch, source: torch.Generator) -> Batch:
    """[B, T], every row one sequence."""
    rows = 3
    length = len(batch.mask) // rows
    train, rollout, mask, surprise = (
        part[: rows * length].view(rows, length)
        for part in (batch.train, batch.rollout, batch.mask, batch.options["statistics"]["surprise"])
    )
    options = {"advantages": batch.options["advantages"][:rows], "statistics": {"surprise": surprise}}
    return Batch(train, rollout, mask, options)


def _halves(batch: Batch, source: torch.Generator) -> Batch:
    """Log-probs in fp16, a mask in int64, advantages in bf16."""
    train, rollout = ((64 * side).round().div(64).half() for side in (batch.train, batch.rollout))
    batch.options["advantages"] = batch.options["advantages"].bfloat16()
    return Batch(train, rollout, batch.mask.long(), batch.options)


def _slices(batch: Batch, source: torch.Generator) -> Batch:
    """Parts of a larger rollout: odd addresses, and every second number of one."""

    def odd(values: Tensor) -> Tensor:
        return torch.cat([values[:1], values])[1:]

    batch.options["statistics"] = {"surprise": odd(batch.options["statistics"]["surprise"])}
    return Batch(odd(batch.train), torch.stack([batch.rollout] * 2, 1)[:, 1], odd(batch.mask), batch.options)


EDITS: dict[str, Edit] = {
    "NaN and infinities": _corrupt,
    "tokens of probability 0": _impossible,
    "log-ratios beyond the bound": _far_apart,
    "no loss token": _no_loss,
    "loss tokens only": _all_loss,
    "named segments": _segment_ids,
    "an advantage per token": _token_advantages,
    "padded": _padded,
    "fp16 log-probs, int64 mask, bf16 advantages": _halves,
    "slices and strides": _slices,
}
