"""The fused head: log-probs, loss and both gradients of hidden states and weight, in every form and dtype."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from checking.kept import Counts, with_support
from checking.row_problem import INF, Problem
from checking.rows import DTYPES, named
from checking.setting import TWO_ULP, ULP, Check, Comparison, Setting, generator, poisoned
from megatron_rc import (
    Corrected,
    MetricSums,
    RolloutCorrection,
    linear_logprobs,
    linear_policy_loss,
    policy_loss,
    vocab_parallel_logprobs,
)

FORMS = ("linear_policy_loss", "linear_logprobs")
_LOG_RATIOS = (-1.5, -0.5, -0.1, 0.0, 0.1, 0.5)
"""log(current / old): no ratio lies so near to a bound that rounded logits move it across."""


@dataclass
class Head:
    """One call of the head, with the loss that follows."""

    hidden: Tensor
    """[N, H]."""
    weight: Tensor
    """[V, H]."""
    targets: Tensor
    tokens: dict[str, Tensor]
    """advantages, weights, mask, scale, log_ratio: [N] each."""
    softmax: dict[str, Any] = field(default_factory=dict)
    """temperature, mask, support, vocab_size."""
    of_head: dict[str, Any] = field(default_factory=dict)
    """chunk, rows, logits_dtype."""
    factor: float = 1.0
    """The gradient by the loss."""
    upstream: bool = False
    """Known in forward."""
    main_grad: bool = False
    frozen: str = ""
    """hidden or weight, which gets no gradient."""


class Answer(NamedTuple):
    loss: Tensor
    logprobs: Tensor
    entropy: Tensor
    by_hidden: Tensor
    by_weight: Tensor
    by_logits: Tensor | None = None
    """[N, V], where the logits were kept."""


Edit = Callable[[Setting, Head, torch.Generator], None]


def checks(setting: Setting) -> Iterator[Check]:
    for form, dtype in itertools.product(FORMS, DTYPES):
        yield Check("head", f"{form}, {named(dtype)}", partial(_plain, form, dtype))
    crossed = ((FORMS[0], torch.bfloat16), (FORMS[1], torch.float32))
    others = ((FORMS[0], torch.float32), (FORMS[1], torch.bfloat16))
    for (form, dtype), (name, edit) in itertools.product(setting.size(crossed + others, crossed), EDITS.items()):
        yield Check("head", f"{form}, {named(dtype)}, {name}", partial(_edited, form, dtype, edit))
    for width in setting.size((1187, 9496, 50_257, 151_936), (31, 33)):
        yield Check("head", f"{width:,} ids, bf16", partial(_width, width))
    yield Check("head", "one chunk has the bits of the logits path", _bits)
    yield Check("head", "fp32 logits: log-probs of bf16 states within 1e-5", _wide_logits)


def head_of(setting: Setting, dtype: torch.dtype, *seed: object, width: int = 0) -> Head:
    """Random states and weight with logits of a few units, and a loss with every term."""
    rows, features = setting.size((300, 256), (12, 8))
    width = width or setting.size(5000, 40)
    source = generator(setting, dtype, width, *seed)
    new: dict[str, Any] = {"device": setting.device, "generator": source}
    hidden = torch.randn(rows, features, **new).to(dtype)
    weight = (3 * torch.randn(width, features, **new) / features**0.5).to(dtype)
    counts = torch.rand(rows, **new) < 0.7
    counts[0], counts[-1] = True, False
    advantages = torch.randn(rows, **new)
    # groups of equal rewards
    advantages[torch.rand(rows, **new) < 0.2] = 0
    steps = torch.tensor(_LOG_RATIOS, device=setting.device)
    tokens = {
        "advantages": advantages,
        "weights": 0.2 + torch.rand(rows, **new),
        "mask": counts & (torch.rand(rows, **new) < 0.8),
        "scale": counts * (0.5 + torch.rand(rows, **new)) / rows,
        "log_ratio": steps[torch.randint(len(steps), (rows,), **new)],
    }
    targets = torch.randint(max(1, width - 2), (rows,), **new)
    fp16 = dtype == torch.float16
    # fp16 takes no factor that comes after rounding
    return Head(
        hidden, weight, targets, tokens, {"mask": counts}, {"chunk": rows // 3 + 1}, 256.0 if fp16 else -1.7, fp16
    )


def compare(setting: Setting, comparison: Comparison, head: Head, form: str) -> Answer:
    """Ours, once computed, is judged."""
    with poisoned():
        ours = by_head(head, form, head.hidden, head.weight)
    judge(setting, comparison, head, ours)
    return ours


def judge(setting: Setting, comparison: Comparison, head: Head, ours: Answer) -> None:
    """Ours is as near to fp64 as PyTorch over kept logits is, in the same dtype."""
    true = _by_logits(head, torch.float64, head.softmax)
    # the old policy is that of fp64, rounded once for everybody
    pytorch = _by_logits(head, head.hidden.dtype, head.softmax)
    size, slope = _sizes(head, true)
    largest = _logits(head).abs().max().item() if len(head.hidden) else 0.0
    dtype = head.hidden.dtype
    for name in ("logprobs", "entropy"):
        comparison.close(name, *(getattr(a, name) for a in (ours, pytorch, true)), epsilon=TWO_ULP * size)
    total = head.tokens["scale"].sum().item() * 10
    theirs, mine = ((answer.loss.double() - true.loss).abs().item() for answer in (pytorch, ours))
    comparison.at_most("loss", mine, 2 * theirs + 1e-6 * total)
    # logits are rounded to their dtype, which multiplies each probability, and so is their gradient
    rounding = setting.cast(dtype) + TWO_ULP * size + (ULP[dtype] * largest if dtype != torch.float32 else 0.0)
    floor = 2.0**-24 * len(head.weight) if dtype == torch.float16 else 0.0
    for name, part in zip(("by_hidden", "by_weight"), slope, strict=True):
        found = [getattr(answer, name) for answer in (ours, pytorch, true)]
        comparison.close(name, *found, epsilon=rounding * part + floor, cast=setting.cast(dtype))


def _sizes(head: Head, true: Answer) -> tuple[float, tuple[float, float]]:
    """The largest logit and the largest elements of both gradients, were no product in their sums to cancel another."""
    hidden, weight = head.hidden.double().abs(), head.weight.double().abs()
    assert true.by_logits is not None
    slope = true.by_logits.abs()
    return 1 + (hidden @ weight.T).max().item(), ((slope @ weight).max().item(), (slope.T @ hidden).max().item())


def _logits(head: Head) -> Tensor:
    return head.hidden.double() @ head.weight.double().T


def _old(head: Head) -> Tensor:
    """fp32 log-probs of the old policy: those of fp64, and the log-ratios."""
    options = {name: v.double() if _is_float(v) else v for name, v in head.softmax.items()}
    exact = vocab_parallel_logprobs(_logits(head), head.targets, backend="torch", **options)
    assert isinstance(exact, Tensor)
    return (exact.nan_to_num(-5.0, 0, -5.0) - head.tokens["log_ratio"]).float()


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _loss_arguments(head: Head, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    old = _old(head)
    t = {name: v.to(dtype) if _is_float(v) else v for name, v in head.tokens.items()}
    corrected = Corrected(t["weights"], t["mask"], t["mask"][:1], MetricSums(), RolloutCorrection())
    options = {
        "scale": t["scale"], "reference_logprobs": (old - 0.25).to(dtype), "dual_clip": 3.0, "kl_coef": 0.2,
        "entropy_coef": 0.1,
    }  # fmt: skip
    return (old.to(dtype), t["advantages"], corrected), options


def _by_logits(head: Head, dtype: torch.dtype, softmax: dict[str, Any]) -> Answer:
    """By PyTorch over logits that are kept, in this dtype."""
    hidden, weight = (part.to(dtype, copy=True).requires_grad_() for part in (head.hidden, head.weight))
    wide = torch.promote_types(dtype, torch.float32)
    options = {name: v.to(wide) if _is_float(v) else v for name, v in softmax.items()}
    logits = hidden @ weight.T
    logits.retain_grad()
    logprobs, entropy = vocab_parallel_logprobs(logits, head.targets, with_entropy=True, backend="torch", **options)
    given, of_loss = _loss_arguments(head, wide)
    loss = policy_loss(logprobs, *given, entropy=entropy, backend="torch", **of_loss).loss
    return _answer(head, loss, logprobs, entropy, hidden, weight)._replace(by_logits=logits.grad)


def loss_of(head: Head, form: str, hidden: Tensor, weight: Tensor) -> Tensor:
    """The loss of other states and another weight, its old policy being given."""
    old = torch.full_like(head.tokens["scale"], -2.0)
    t = head.tokens
    corrected = Corrected(t["weights"], t["mask"], t["mask"][:1], MetricSums(), RolloutCorrection())
    given, options = (old, t["advantages"], corrected), head.softmax | head.of_head | {"backend": "triton"}
    if form == "linear_policy_loss":
        return linear_policy_loss(hidden, weight, head.targets, *given, scale=t["scale"], **options).loss
    logprobs = linear_logprobs(hidden, weight, head.targets, **options)
    assert isinstance(logprobs, Tensor)
    return policy_loss(logprobs, *given, scale=t["scale"], backend="triton").loss


def by_head(head: Head, form: str, hidden: Tensor, weight: Tensor) -> Answer:
    """By the head, which may get a part of the states and of the weight."""
    hidden, weight = (part.clone().requires_grad_() for part in (hidden, weight))
    leaf: Any = weight
    if head.frozen:
        {"hidden": hidden, "weight": weight}[head.frozen].requires_grad_(False)
    if head.main_grad:
        leaf.main_grad = torch.zeros(weight.shape, device=weight.device)
        leaf.grad_added_to_main_grad = False
    given, of_loss = _loss_arguments(head, torch.float32)
    options = {**head.softmax, **head.of_head, "with_entropy": True, "backend": "triton"}
    if form == "linear_policy_loss":
        upstream = torch.full((), head.factor, device=hidden.device) if head.upstream else None
        loss, _, logprobs, entropy = linear_policy_loss(
            hidden, weight, head.targets, *given, upstream=upstream, **of_loss, **options
        )
        assert entropy is not None
    else:
        logprobs, entropy = linear_logprobs(hidden, weight, head.targets, **options)
        loss = policy_loss(logprobs, *given, entropy=entropy, backend="triton", **of_loss).loss
    return _answer(head, loss, logprobs, entropy, hidden, weight)


def _answer(head: Head, loss: Tensor, logprobs: Tensor, entropy: Tensor, hidden: Tensor, weight: Tensor) -> Answer:
    (loss * head.factor).backward()
    gradients = []
    for name, leaf in (("hidden", hidden), ("weight", weight)):
        found = getattr(leaf, "main_grad", leaf.grad)
        frozen = found is None or name == head.frozen
        gradients.append(torch.zeros_like(leaf) if frozen else found)
    return Answer(loss.detach(), logprobs.detach(), entropy.detach(), *gradients)


def _plain(form: str, dtype: torch.dtype, setting: Setting, comparison: Comparison) -> None:
    compare(setting, comparison, head_of(setting, dtype), form)


def _edited(form: str, dtype: torch.dtype, edit: Edit, setting: Setting, comparison: Comparison) -> None:
    head = head_of(setting, dtype, edit.__name__)
    edit(setting, head, generator(setting, edit.__name__))
    compare(setting, comparison, head, form)


def _width(width: int, setting: Setting, comparison: Comparison) -> None:
    compare(setting, comparison, head_of(setting, torch.bfloat16, width=width), "linear_policy_loss")


def _bits(setting: Setting, comparison: Comparison) -> None:
    head = head_of(setting, torch.bfloat16, "bits")
    options = {**head.softmax, "with_entropy": True, "backend": "triton"}
    found = linear_logprobs(head.hidden, head.weight, head.targets, chunk=len(head.hidden), **options)
    kept = vocab_parallel_logprobs(head.hidden @ head.weight.T, head.targets, **options)
    for name, ours, theirs in zip(("logprobs", "entropy"), found, kept, strict=True):
        comparison.equal(name, ours, theirs)


def _wide_logits(setting: Setting, comparison: Comparison) -> None:
    head = head_of(setting, torch.bfloat16, "wide")
    head.of_head["logits_dtype"] = torch.float32
    true = _by_logits(head, torch.float64, head.softmax)
    error = (by_head(head, "linear_policy_loss", head.hidden, head.weight).logprobs - true.logprobs).abs().max().item()
    comparison.at_most("logprobs", error, 1e-5)


def _one_chunk(setting: Setting, head: Head, source: torch.Generator) -> None:
    head.of_head["chunk"] = None


def _tiny_chunks(setting: Setting, head: Head, source: torch.Generator) -> None:
    head.of_head["chunk"] = setting.size(7, 5)


def _rows(setting: Setting, head: Head, source: torch.Generator) -> None:
    """Rows without loss are left out."""
    counts = head.softmax["mask"]
    head.of_head["rows"] = counts.nonzero()[:, 0]


def _kept(setting: Setting, head: Head, source: torch.Generator) -> None:
    given = Problem(head.weight.new_empty(len(head.targets), len(head.weight)), head.targets)
    with_support(given, Counts(1, setting.size(20, 9)), source)
    head.targets, head.softmax["support"] = given.targets, given.options["support"]


def _kept_rows(setting: Setting, head: Head, source: torch.Generator) -> None:
    _kept(setting, head, source)
    _rows(setting, head, source)


def _temperature(setting: Setting, head: Head, source: torch.Generator) -> None:
    head.softmax["temperature"] = 0.6 + torch.rand(len(head.targets), device=setting.device, generator=source)


def _padded(setting: Setting, head: Head, source: torch.Generator) -> None:
    valid = len(head.weight) - 5
    head.softmax["vocab_size"] = valid
    head.targets %= valid


def _far_states(setting: Setting, head: Head, source: torch.Generator) -> None:
    """Addresses that are no multiple of 16 bytes, rows of a wider tensor."""
    for name in ("hidden", "weight"):
        part = getattr(head, name)
        room = part.new_full((len(part), part.shape[1] + 3), INF)
        setattr(head, name, room[:, 1 : 1 + part.shape[1]].copy_(part))


def _frozen_weight(setting: Setting, head: Head, source: torch.Generator) -> None:
    head.frozen = "weight"


def _main_grad(setting: Setting, head: Head, source: torch.Generator) -> None:
    head.main_grad = True


def _main_grad_at_once(setting: Setting, head: Head, source: torch.Generator) -> None:
    head.main_grad = head.upstream = True


def _wide(setting: Setting, head: Head, source: torch.Generator) -> None:
    head.of_head["logits_dtype"] = torch.float32


def _no_advantage(setting: Setting, head: Head, source: torch.Generator) -> None:
    head.tokens["advantages"].zero_()


EDITS: dict[str, Edit] = {
    "one chunk": _one_chunk,
    "chunks of a few tokens": _tiny_chunks,
    "rows without loss left out": _rows,
    "kept ids": _kept,
    "kept ids, rows left out": _kept_rows,
    "a temperature per row": _temperature,
    "ids behind vocab_size": _padded,
    "strided states and weight": _far_states,
    "frozen weight": _frozen_weight,
    "main_grad": _main_grad,
    "main_grad, gradient known in forward": _main_grad_at_once,
    "fp32 logits": _wide,
    "no advantage": _no_advantage,
}
