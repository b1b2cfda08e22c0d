"""The policy loss of a micro-batch: every surrogate, old policy and term, and what must leave no trace in it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from checking.setting import Check, Comparison, Setting, generator, poisoned
from megatron_rc import Corrected, MetricSums, RolloutCorrection, policy_loss

INF, NAN = float("inf"), float("nan")
_EPSILON = 1e-6
"""What an answer may err besides, relative to the terms that it is the sum of."""
_EXACT = ("clip_high", "clip_low", "dual_clip")
TERMS: dict[str, dict[str, float]] = {
    "no other term": {},
    "KL": {"kl_coef": 0.2},
    "entropy": {"entropy_coef": 0.1},
    "KL and entropy": {"kl_coef": 0.2, "entropy_coef": 0.1},
}


@dataclass
class Batch:
    """Log-probs are multiples of 2^-10: log-ratios are the same in fp32 and fp64, and no ratio lies on a bound."""

    tensors: dict[str, Tensor]
    """current, old, reference, advantages, weights, scale, entropy, mask."""
    old: str = "recompute"
    options: dict[str, Any] = field(default_factory=dict)
    upstream: float = 1.0
    dtype: torch.dtype = torch.float32
    """Data type of the log-probs."""

    def double(self) -> Batch:
        wide = {name: t.double() if t.is_floating_point() else t for name, t in self.tensors.items()}
        return replace(self, tensors=wide, dtype=torch.float64)


Edit = Callable[[Batch, torch.Generator], None]


def checks(setting: Setting) -> Iterator[Check]:
    cases = itertools.product(("ppo", "reinforce"), ("recompute", "current", "rollout"), TERMS)
    for surrogate, old, terms in setting.thinned(cases, 3):
        options = {"surrogate": surrogate, **TERMS[terms]}
        yield Check("loss", f"{surrogate}, old={old}, {terms}", partial(_options, old, options))
    for name, edit in EDITS.items():
        yield Check("loss", name, partial(_edited, edit))
    for tokens in setting.size((1, 1023, 1024, 1025, 2**20), (1, 15, 16, 17)):
        yield Check("loss", f"{tokens:,} tokens", partial(_tokens, tokens))


def batch_of(setting: Setting, tokens: int, *seed: object) -> Batch:
    source = generator(setting, tokens, *seed)
    new: dict[str, Any] = {"device": setting.device, "generator": source}

    def steps(spread: float) -> Tensor:
        return (spread * 1024 * torch.randn(tokens, **new)).round() / 1024

    current, loss_mask = -steps(1.0).abs(), torch.rand(tokens, **new) < 0.7
    advantages = torch.randn(tokens, **new)
    # groups of equal rewards have advantage 0: neither good nor bad
    advantages[torch.rand(tokens, **new) < 0.2] = 0
    return Batch(
        {
            "current": current,
            "old": current + steps(0.4),
            "reference": current + steps(0.5),
            "advantages": advantages,
            "weights": 0.2 + torch.rand(tokens, **new),
            "scale": loss_mask * (0.5 + torch.rand(tokens, **new)) / max(tokens, 1),
            "entropy": torch.randn(tokens, **new).abs(),
            "mask": loss_mask & (torch.rand(tokens, **new) < 0.8),
        },
        options={"dual_clip": 3.0, **TERMS["KL and entropy"]},
    )


def evaluate(batch: Batch, backend: str) -> dict[str, Tensor]:
    """The loss, its gradients and its metrics."""
    t, options = batch.tensors, dict(batch.options)
    current = t["current"].to(batch.dtype, copy=True).requires_grad_()
    entropy = t["entropy"].clone().requires_grad_() if "entropy_coef" in options else None
    corrected = Corrected(
        t["weights"],
        t["mask"],
        torch.zeros(1, dtype=torch.bool),
        MetricSums(),
        RolloutCorrection(old=batch.old),  # type: ignore[arg-type]
    )
    loss, metrics = policy_loss(
        current,
        None if batch.old == "current" else t["old"].to(batch.dtype),
        t["advantages"],
        corrected,
        scale=t["scale"],
        reference_logprobs=t["reference"].to(batch.dtype) if "kl_coef" in options else None,
        entropy=entropy,
        backend=backend,
        **options,
    )
    (loss * batch.upstream).backward()
    assert current.grad is not None
    answer = {"loss": loss.detach(), "gradient": current.grad}
    if entropy is not None:
        assert entropy.grad is not None
        answer["entropy gradient"] = entropy.grad
    return answer | {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.values().items()}


def compare(setting: Setting, comparison: Comparison, batch: Batch) -> None:
    with poisoned():
        ours = evaluate(batch, "triton")
    pytorch, truth = evaluate(batch, "torch"), evaluate(batch.double(), "torch")
    comparison.true("the same metrics", list(ours) == list(truth))
    size = _size_of_terms(batch)
    for name, true in truth.items():
        if name in _EXACT:
            comparison.equal(name, ours[name], true)
            continue
        per_token = true.dim() > 0
        largest = true.nan_to_num(0, 0, 0).abs().max().item() if true.numel() else 0.0
        total = size * (batch.tensors["scale"].sum().item() if name == "loss" else 1.0)
        # a gradient leaves in the dtype of the log-probs
        cast = setting.cast(batch.dtype) if name == "gradient" else 0.0
        epsilon = _EPSILON * (largest if per_token else total)
        comparison.close(name, ours[name], pytorch[name], true, epsilon=epsilon, cast=cast)


def _size_of_terms(batch: Batch) -> float:
    """The sum of the metrics, were no token's term to cancel another's."""
    wide = batch.double()
    same_sign = wide.tensors | {"advantages": -wide.tensors["advantages"].abs()}
    values = evaluate(replace(wide, tensors=same_sign), "torch")
    names = ("policy_loss", "kl_ref", "entropy")
    return sum(values[name].nan_to_num(0, 0, 0).abs().item() for name in names if name in values)


def _options(old: str, options: dict[str, Any], setting: Setting, comparison: Comparison) -> None:
    batch = batch_of(setting, setting.size(40_000, 40), old)
    batch.old, batch.options, batch.upstream = old, options, -1.7
    if options["surrogate"] == "ppo":
        batch.options = options | {"dual_clip": 3.0, "clip_lower": 0.2, "clip_upper": 0.28}
    compare(setting, comparison, batch)


def _edited(edit: Edit, setting: Setting, comparison: Comparison) -> None:
    batch = batch_of(setting, setting.size(40_000, 40), edit.__name__)
    edit(batch, generator(setting, edit.__name__))
    compare(setting, comparison, batch)


def _tokens(tokens: int, setting: Setting, comparison: Comparison) -> None:
    compare(setting, comparison, batch_of(setting, tokens))


def _some(batch: Batch, source: torch.Generator, share: float) -> Tensor:
    mask = batch.tensors["mask"]
    return torch.rand(mask.shape, device=mask.device, generator=source) < share


def _no_clipping(batch: Batch, source: torch.Generator) -> None:
    batch.options |= {"dual_clip": None, "clip_lower": 1.0, "clip_upper": 9.0}


def _clips_of_zero(batch: Batch, source: torch.Generator) -> None:
    batch.options |= {"dual_clip": 1.2, "clip_lower": 0.0, "clip_upper": 0.0}
    # a ratio of exactly 1 would lie on both bounds
    batch.tensors["old"] += 0.5 / 1024


def _no_advantage(batch: Batch, source: torch.Generator) -> None:
    batch.tensors["advantages"].zero_()


def _far_ratios(batch: Batch, source: torch.Generator) -> None:
    """Beyond log_ratio_bound, to both sides."""
    batch.tensors["old"] += 60 * (_some(batch, source, 0.3).float() - _some(batch, source, 0.3).float())


def _impossible_tokens(batch: Batch, source: torch.Generator) -> None:
    batch.tensors["current"][_some(batch, source, 0.2)] = -INF
    batch.tensors["old"][_some(batch, source, 0.2)] = NAN
    batch.tensors["old"][_some(batch, source, 0.2)] = -INF


def _rubbish_without_scale(batch: Batch, source: torch.Generator) -> None:
    t = batch.tensors
    for index, name in enumerate(("current", "old", "reference", "advantages", "weights", "entropy")):
        t[name][t["scale"] == 0] = (NAN, INF, -INF)[index % 3]


def _rubbish_of_dropped_tokens(batch: Batch, source: torch.Generator) -> None:
    for name in ("advantages", "weights"):
        batch.tensors[name][~batch.tensors["mask"]] = NAN


def _nan_that_counts(batch: Batch, source: torch.Generator) -> None:
    """It must show in the loss and in the gradient of its token."""
    counted = batch.tensors["mask"].int().argmax()
    batch.tensors["weights"][counted] = NAN


def _all_dropped(batch: Batch, source: torch.Generator) -> None:
    batch.tensors["mask"].zero_()


def _no_token(batch: Batch, source: torch.Generator) -> None:
    batch.tensors = {name: t[:0] for name, t in batch.tensors.items()}


def _padded(batch: Batch, source: torch.Generator) -> None:
    """[B, T], one advantage per sequence."""
    batch.tensors = {name: t.view(8, -1) for name, t in batch.tensors.items()}
    batch.tensors["advantages"] = batch.tensors["advantages"][:, 0].contiguous()


def _slices(batch: Batch, source: torch.Generator) -> None:
    """A micro-batch is a slice of the rollout: at odd addresses, and strided."""
    batch.tensors = {
        name: t[5:-2] if index % 2 else torch.stack([t, t], 1)[:, 1][5:-2]
        for index, (name, t) in enumerate(batch.tensors.items())
    }


def _bf16(batch: Batch, source: torch.Generator) -> None:
    _narrow(batch, torch.bfloat16)


def _fp16(batch: Batch, source: torch.Generator) -> None:
    _narrow(batch, torch.float16)


def _narrow(batch: Batch, dtype: torch.dtype) -> None:
    batch.dtype = dtype
    for name in ("current", "old", "reference"):
        batch.tensors[name] = (64 * batch.tensors[name]).round() / 64
        batch.tensors[name] = batch.tensors[name].to(dtype).float()


EDITS: dict[str, Edit] = {
    "nothing is clipped": _no_clipping,
    "clips of 0, dual clip of 1.2": _clips_of_zero,
    "advantages of 0": _no_advantage,
    "ratios beyond the bound": _far_ratios,
    "tokens of probability 0": _impossible_tokens,
    "NaN where scale is 0": _rubbish_without_scale,
    "NaN of dropped tokens": _rubbish_of_dropped_tokens,
    "NaN of a token that counts": _nan_that_counts,
    "all tokens dropped": _all_dropped,
    "no token": _no_token,
    "padded, one advantage per sequence": _padded,
    "slices and strides": _slices,
    "bf16 log-probs": _bf16,
    "fp16 log-probs": _fp16,
}
