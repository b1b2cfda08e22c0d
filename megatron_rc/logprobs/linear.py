"""linear_logprobs and linear_policy_loss: log-probs and policy loss of hidden states, whose logits are never kept.

In plain PyTorch:

    def simple_linear_policy_loss(hidden, weight, targets, loss, chunk):
        total, by_hidden, by_weight = 0, torch.zeros_like(hidden), torch.zeros_like(weight)
        for first in range(0, len(hidden), chunk):
            tokens = slice(first, first + chunk)
            logits = (hidden[tokens] @ weight.T).requires_grad_()  # of one chunk alone: the next one overwrites them
            logprobs = logits.log_softmax(1).gather(1, targets[tokens, None])[:, 0]
            part = loss(logprobs, tokens)  # d loss / d log-prob of a token depends on this token alone
            (gradient,) = torch.autograd.grad(part, logits)
            by_hidden[tokens] = gradient @ weight
            by_weight += gradient.T @ hidden[tokens]
            total += part.detach()
        return total, by_hidden, by_weight

`linear_policy_loss` does this in forward: all gradients are there when it ends. `linear_logprobs` keeps hidden states
and 16 bytes per token, and computes the logits again in backward, for any loss. The softmax is that of `logits`: row
statistics, one all-gather of 16 bytes per token, merge. The gradient of the logits is written over them.
"""

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rc.backend import debug_checks, opaque
from megatron_rc.batch import TopIds
from megatron_rc.correction.correct import Corrected
from megatron_rc.correction.metrics import MetricSums
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.logprobs.centering import Centering, centering_metrics, check_top, softmax_and_terms
from megatron_rc.logprobs.gradient import WeightGradient
from megatron_rc.logprobs.inputs import ChunkedHead, Gradients, HeadInputs, chunked_head, entered, factor_of, scattered
from megatron_rc.logprobs.logits import Distribution, distribution_of_rows
from megatron_rc.logprobs.reference import linear as cut_to_size
from megatron_rc.logprobs.reference.rows import Merged
from megatron_rc.loss import policy_loss
from megatron_rc.loss.options import LossOptions
from megatron_rc.loss.policy_loss import LossBackend, check_loss_arguments, loss_metrics
from megatron_rc.loss.reference import LossInputs


# fmt: off
@overload
def linear_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, head: HeadInputs = HeadInputs(),
    with_entropy: Literal[False] = False, backend: str = "auto",
) -> Tensor: ...
@overload
def linear_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, head: HeadInputs = HeadInputs(),
    with_entropy: Literal[True], backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, head: HeadInputs = HeadInputs(),
    with_entropy: bool, backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...
@opaque
def linear_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, head: HeadInputs = HeadInputs(),
    with_entropy: bool = False, backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    # fmt: on
    """log pi(target) of every token, and the entropy of pi, from hidden states and the local shard of the head.

    `vocab_parallel_logprobs` of the logits hidden @ weight^T, computed one chunk of tokens at a time: 2 N H V
    operations in forward, and 6 N H V in backward, which computes the logits again. Any loss may follow.

    With a tensor-parallel group there is one all-gather of 16 bytes per token and chunk, in forward alone. The gradient
    of hidden is summed over the group, as Megatron's column-parallel layer does. That of weight goes to
    weight.main_grad, unrounded, where Megatron's DDP has given it one in fp32. A weight or hidden states that need no
    gradient cost none. A second backward, or two calls with one weight, add up as for any other function.

    Args:
        hidden: [N, H], bf16, fp16, fp32 or fp64, what the head takes; with head.sequence_parallel [N / ranks, H].
        weight: [V_local, H], the same dtype, the head without bias; shards may differ in width.
        targets: [N] int64 or int32, global ids.
        head: temperature, mask, tensor-parallel group, chunk and the like; the fields are explained there.
        with_entropy: return the entropy too.
        backend: "torch", "triton" or "auto", as in vocab_parallel_logprobs. With support, "torch" waits for the device
            once per pass, and once for rows.

    Returns:
        logprobs, [N] fp32 (fp64 for fp64), nats; or (logprobs, entropy).

    Raises:
        ValueError: mismatched shapes, dtypes or devices, a weight that is not a plain tensor (fp8, Megatron-FSDP), a
            chunk below 1, and what vocab_parallel_logprobs refuses.
    """
    chunked = chunked_head(hidden, weight, targets, head, with_entropy=with_entropy, backend=backend)
    logprobs, entropy = _LinearLogProbs.apply(entered(hidden, head), weight, chunked)
    logprobs = scattered(logprobs, head.rows, targets)
    return logprobs if entropy is None else (logprobs, scattered(entropy, head.rows, targets))


@opaque
@torch.no_grad()
def linear_distribution(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    head: HeadInputs = HeadInputs(),
    with_kept_mass: bool = False,
    with_varentropy: bool = False,
    top_ids: Tensor | None = None,
    backend: str = "auto",
) -> Distribution:
    """`vocab_parallel_distribution` of the logits hidden @ weight^T, computed one chunk of tokens at a time.

    Args:
        with_kept_mass, with_varentropy, top_ids: as in vocab_parallel_distribution.
        hidden, weight, targets, head, backend: as in linear_logprobs.

    Raises:
        ValueError: as linear_logprobs.
    """
    chunked = chunked_head(hidden, weight, targets, head, with_entropy=True, backend=backend)
    if with_varentropy:
        # PyTorch computes it, which needs the kept ids cut to the rows of the chunk
        chunked = chunked._replace(cut=cut_to_size)
    if top_ids is not None and head.rows is not None:
        top_ids = top_ids[head.rows]
    wanted: dict[str, Any] = {"with_kept_mass": with_kept_mass, "with_varentropy": with_varentropy}
    parts = [
        distribution_of_rows(
            logits, own, chunked.computed, head.tp_group, top_ids=None if top_ids is None else top_ids[span], **wanted
        )
        for span, own, logits in chunked.chunks(entered(hidden, head), weight)
    ]
    joined = (None if part[0] is None else torch.cat(part) for part in zip(*parts, strict=True))
    return Distribution(*(None if values is None else scattered(values, head.rows, targets) for values in joined))  # type: ignore[arg-type]


class LinearPolicyLoss(NamedTuple):
    """The result of `linear_policy_loss`."""

    loss: Tensor
    """0-d, differentiable once: what these tokens contribute to the loss of the optimizer step."""
    metrics: MetricSums
    logprobs: Tensor
    """[N] fp32, nats, without gradient."""
    entropy: Tensor | None
    """[N] fp32, nats, without gradient; None unless asked for."""


@opaque
def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    corrected: Corrected,
    *,
    scale: Tensor,
    reference_logprobs: Tensor | None = None,
    options: LossOptions = LossOptions(),
    head: HeadInputs = HeadInputs(),
    with_entropy: bool = False,
    top: TopIds | None = None,
    backend: str = "auto",
    upstream: float | Tensor | None = None,
) -> LinearPolicyLoss:
    """`policy_loss` of hidden states and the local shard of the head: its gradients are computed in forward.

    loss = sum_t scale_t [mask_t w_t L_t + kl_coef K_t - entropy_coef H_t], 6 N H V operations for both passes. The
    correction is given, so a token's part of the loss depends on its own row alone: the gradient of a chunk's logits
    follows at once, and the logits are overwritten. Backward multiplies dX and dW by the gradient by the loss, so it
    runs once. Under torch.no_grad() nothing but the loss is computed.

    dW needs [V_local, H] fp32 of memory from forward to backward. ``upstream`` is the gradient by the loss
    that backward will bring: for Megatron, what the schedule and the caller multiply the loss with, its loss scaler
    included. With it dW goes straight into weight.main_grad in forward. A backward must then follow, and no activation
    checkpointing may run this forward twice. fp16 needs upstream, since gradients below 6e-8 are lost before a factor
    that comes later.

    Args:
        hidden, weight, targets, head, backend: as in linear_logprobs.
        old_logprobs, advantages, corrected, scale, reference_logprobs, options: as in policy_loss, [N] each; scale is 0
            outside of head.rows.
        with_entropy: return the entropy and its metric; needed for options.entropy_coef.
        top: the sampler's most probable ids, needed for a correction with centering, as in `centered_logprobs`. The
            weights in corrected must be those of the log-probs here.
        upstream: 0-d or a number, as above.

    Raises:
        ValueError: as linear_logprobs and policy_loss; entropy_coef without with_entropy, fp16 without upstream; under
            set_debug_checks(True) also a gradient in backward that is not upstream, a scale outside of rows.
    """
    chunked = chunked_head(hidden, weight, targets, head, with_entropy=with_entropy, backend=backend)
    if options.entropy_coef and not with_entropy:
        raise ValueError(f"with_entropy must be True when entropy_coef is {options.entropy_coef!r}")
    centred = corrected.correction.centering
    if (top is None) != (centred == "none"):
        raise ValueError(f"top must be {'given' if top is None else 'None'} when correction.centering is {centred!r}")
    if top is not None:
        check_top(top, corrected.correction, targets.shape, head.support)
    inputs = LossInputs.of(old_logprobs, advantages, corrected, scale, reference_logprobs)
    # the log-probs will have the shape of the targets
    check_loss_arguments(inputs, options, corrected.correction, targets, "targets")
    if debug_checks() and head.rows is not None and scale.index_fill(0, head.rows, 0).any():
        raise ValueError("scale must be 0 outside of rows, whose log-probs are not computed")
    if not torch.is_grad_enabled():
        # autograd.Function does not say that gradients are off, and main_grad must stay as it is
        hidden, weight = hidden.detach(), weight.detach()
    if hidden.dtype == torch.float16 and upstream is None and (hidden.requires_grad or weight.requires_grad):
        raise ValueError("upstream must be given for fp16 hidden states: the loss scale must multiply before rounding")
    computed = policy_loss.computing(backend, hidden=hidden, **inputs.named())
    if head.rows is not None:
        inputs, top = inputs.of_tokens(head.rows), None if top is None else top.select(head.rows)
    given = (inputs, options, computed, factor_of(upstream, hidden.device), top, corrected.correction)
    loss, totals, *parts = _LinearPolicyLoss.apply(entered(hidden, head), weight, chunked, *given)
    logprobs, entropy, *terms = (part if part is None else scattered(part, head.rows, targets) for part in parts)
    metrics = loss_metrics(options, totals, kl=reference_logprobs is not None, entropy=with_entropy)
    if terms:
        metrics.merge(centering_metrics(Centering(*terms), scale).prefixed("centering/"))  # type: ignore[arg-type]
    return LinearPolicyLoss(loss, metrics, logprobs, entropy)  # type: ignore[arg-type]


def _joined(parts: list[Merged]) -> Merged:
    return Merged(*(None if own[0] is None else torch.cat(own) for own in zip(*parts, strict=True)))  # type: ignore[arg-type]


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, head: ChunkedHead) -> tuple[Tensor, Tensor | None]:
        merged = _joined([head.softmax(logits, rows) for _, rows, logits in head.chunks(hidden, weight)])
        ctx.save_for_backward(hidden, weight, *(part for part in head.rows if isinstance(part, Tensor)), *merged)
        ctx.head, ctx.weight = head, weight
        ctx.set_materialize_grads(False)
        return merged.logprobs, merged.entropy if head.with_entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logprobs: Tensor | None, by_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        if by_logprobs is None and by_entropy is None:
            return None, None, None
        # unpacking compares versions: a tensor that was written to since forward raises here
        hidden, weight, *_, logprobs, entropy, maximum, log_sum = ctx.saved_tensors
        merged, head = Merged(logprobs, entropy, maximum, log_sum), ctx.head
        by_hidden, by_weight, _ = ctx.needs_input_grad
        home = WeightGradient(ctx.weight, final=True) if by_weight else None
        gradients = Gradients(head, hidden, weight, by_hidden, home)
        for span, rows, logits in head.chunks(hidden, weight):
            own = Merged(*(None if part is None else part[span] for part in merged))  # type: ignore[arg-type]
            upstream = (None if part is None else part[span] for part in (by_logprobs, by_entropy))
            gradients.add(span, rows, logits, own, *upstream)
        by_inputs = gradients.hidden
        # or the gradient that `finish` may allocate would be in memory together with the chunk
        del rows, logits, gradients
        return by_inputs, None if home is None else home.finish(), None


class _LinearPolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        head: ChunkedHead,
        inputs: LossInputs,
        options: LossOptions,
        computed: LossBackend,
        upstream: Tensor | None,
        top: TopIds | None,
        correction: RolloutCorrection,
    ) -> tuple[Tensor | None, ...]:
        by_hidden, by_weight, *_ = ctx.needs_input_grad
        home = WeightGradient(weight, final=upstream is not None) if by_weight else None
        gradients = Gradients(head, hidden, weight, by_hidden, home)
        factor = torch.ones((), device=hidden.device) if upstream is None else upstream
        parts, totals, centerings = list[Merged](), list[Tensor](), list[Centering]()
        for span, rows, logits in head.chunks(hidden, weight):
            own, centred = inputs.of_tokens(span), None
            if top is None:
                merged = head.softmax(logits, rows)
            else:
                of_chunk = top.select(span)
                merged, centering, terms = softmax_and_terms(
                    logits, rows, of_chunk, correction, head.computed, head.tp_group, with_entropy=head.with_entropy
                )
                pull = torch.where(own.scale != 0, own.scale * own.advantages, 0)
                centred = (of_chunk, terms, factor * pull)
            entropy = merged.entropy if head.with_entropy else None
            total, *by_outputs = computed.policy_loss_gradient(merged.logprobs, entropy, own, options, factor)
            if centred is not None:
                total[:2] += (pull * centering.term).sum()
                centerings.append(centering)
            gradients.add(span, rows, logits, merged, *by_outputs, centred=centred)
            parts.append(merged)
            totals.append(total)
        merged, sums = _joined(parts), torch.stack(totals).sum(0)
        entropy = merged.entropy if head.with_entropy else None
        found = [torch.cat(values) for values in zip(*centerings, strict=True)]
        # only these outlive the call: the chunk buffer and the saved hidden states are freed
        ctx.by_hidden, ctx.home, ctx.upstream, ctx.used = gradients.hidden, home, upstream, False
        ctx.mark_non_differentiable(sums, merged.logprobs, *([] if entropy is None else [entropy]), *found)
        ctx.set_materialize_grads(False)
        return sums[0].to(merged.logprobs.dtype), sums, merged.logprobs, entropy, *found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if ctx.used:
            raise RuntimeError("linear_policy_loss computes its gradients once: backward cannot run again")
        by_hidden, home, ctx.used = ctx.by_hidden, ctx.home, True
        ctx.by_hidden = ctx.home = None
        if by_loss is None:
            return (None,) * 9
        if ctx.upstream is not None and debug_checks() and by_loss.item() != ctx.upstream.to(by_loss.dtype).item():
            raise ValueError(f"upstream must be the gradient by the loss, {by_loss.item()}, got {ctx.upstream.item()}")
        factor = by_loss if ctx.upstream is None else None
        if by_hidden is not None and factor is not None:
            by_hidden.mul_(factor)
        by_weight = None if home is None else home.finish(factor)
        return by_hidden, by_weight, *(None,) * 7
