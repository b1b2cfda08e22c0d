"""centered_logprobs and linear_centered_logprobs: log-probs with the term of score centering, over all shards."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rc.backend import opaque
from megatron_rc.batch import Support, TopIds
from megatron_rc.collectives import Group
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.logprobs.backends import RowsBackend, computing
from megatron_rc.logprobs.centering import Centering, TopTerms, check_top, softmax_and_terms, write_centered_gradient
from megatron_rc.logprobs.checks import check_logits
from megatron_rc.logprobs.gradient import WeightGradient
from megatron_rc.logprobs.inputs import ChunkedHead, Gradients, HeadInputs, chunked_head, entered, scattered
from megatron_rc.logprobs.logits import shard_rows, shard_widths
from megatron_rc.logprobs.reference.rows import Merged, Rows


class CenteredLogprobs(NamedTuple):
    """The result of both functions; every tensor in the shape of the targets."""

    logprobs: Tensor
    """fp32, nats, with gradient."""
    entropy: Tensor | None
    """fp32, nats, with gradient; None unless asked for."""
    centering: Centering


def centered_logprobs(
    logits: Tensor,
    targets: Tensor,
    top: TopIds,
    correction: RolloutCorrection,
    *,
    tp_group: Group = None,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    vocab_size: int | None = None,
    support: Support | None = None,
    with_entropy: bool = False,
    inplace_backward: bool = False,
    backend: str = "auto",
) -> CenteredLogprobs:
    """`vocab_parallel_logprobs`, and the term sum_v c_v log pi(v) that `policy_loss` takes as ``centering``.

    With q the sampler's and p the current policy at a row, w_v = f(p_v, q_v) the weight of ``correction``, H the top
    ids, and alpha = (1 - sum_H q) / (1 - sum_H p)::

        c_v = q_v w_v - alpha f(1 / alpha) p_v,   term = sum_{v in H} c_v log p_v,   c_v without gradient

    Its gradient is the mean of w_v grad log p_v under q where q is alpha p outside of H, and always where H is the
    whole vocabulary. With ``support``, p and q are distributions over the kept ids, which take its place. The weights
    of the drawn tokens must be of the current log-probs, too: `correct` them in each mini-batch. With weights of an
    older policy the mean would not vanish after the first optimizer step.

    The all-gather of `vocab_parallel_logprobs` has 28 bytes per row more; with a weight or gate they travel in one of
    their own. Backward has none. Every shard reads k logits per row besides, and writes k + 1 gradients again; nothing
    of the size of the logits is allocated.

    Args:
        logits, targets, tp_group, temperature, mask, vocab_size, support, with_entropy, inplace_backward, backend: as
            there.
        top: the sampler's most probable ids, [N, k] or [B, T, k], and their log-probs after the temperature, with the
            mass of the whole vocabulary, or of the kept ids. An id outside of the vocabulary is ignored; a row without
            finite log-probs, or whose target has logprob -inf, has the term 0.
        correction: with centering "top", or "support" and a support: its weight and gates are f.

    Raises:
        ValueError: as `vocab_parallel_logprobs`; top ids of other rows, a correction without centering.

    Source: score centering (arXiv 2609.20807), with f of any token-level weight.
    """
    check_logits(logits, targets, temperature, mask, support, inplace_backward=inplace_backward)
    check_top(top, correction, targets.shape, support)
    computed = computing(backend, logits=logits)
    widths = shard_widths(logits.shape[-1], logits.device, tp_group, vocab_size)
    rows = shard_rows(targets, temperature, mask, support, vocab_size, widths, tp_group)
    logprobs, entropy, *parts = _Centered.apply(
        logits, rows, top, correction, computed, tp_group, with_entropy, inplace_backward
    )
    return CenteredLogprobs(logprobs, entropy, Centering(*parts))


@opaque
def linear_centered_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    top: TopIds,
    correction: RolloutCorrection,
    *,
    head: HeadInputs = HeadInputs(),
    with_entropy: bool = False,
    backend: str = "auto",
) -> CenteredLogprobs:
    """`centered_logprobs` of the logits hidden @ weight^T, computed one chunk of tokens at a time.

    Args:
        hidden, weight, targets, head, with_entropy, backend: as in `linear_logprobs`.
        top, correction: as in `centered_logprobs`.

    Raises:
        ValueError: as both of them.
    """
    check_top(top, correction, targets.shape, head.support)
    chunked = chunked_head(hidden, weight, targets, head, with_entropy=with_entropy, backend=backend)
    if head.rows is not None:
        top = top.select(head.rows)
    logprobs, entropy, *parts = _LinearCentered.apply(entered(hidden, head), weight, chunked, top, correction)
    entropy = None if entropy is None else scattered(entropy, head.rows, targets)
    parts = [scattered(part, head.rows, targets) for part in parts]
    return CenteredLogprobs(scattered(logprobs, head.rows, targets), entropy, Centering(*parts))


class _Centered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        rows: Rows,
        top: TopIds,
        correction: RolloutCorrection,
        computed: RowsBackend,
        tp_group: Group,
        with_entropy: bool,
        inplace_backward: bool,
    ) -> tuple[Tensor | None, ...]:
        given = (logits, rows, top, correction, computed, tp_group)
        merged, centering, terms = softmax_and_terms(*given, with_entropy=with_entropy)
        ctx.save_for_backward(logits, *merged)
        ctx.rows, ctx.top, ctx.terms = rows, top, terms
        ctx.computed, ctx.inplace_backward = computed, inplace_backward
        ctx.mark_non_differentiable(*centering[1:])
        ctx.set_materialize_grads(False)
        return merged.logprobs, merged.entropy if with_entropy else None, *centering

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        by = upstream[:3]
        if all(one is None for one in by):
            return (None,) * 8
        # unpacking compares versions: a tensor that was written to since forward raises here
        logits, *merged = ctx.saved_tensors
        out = logits.detach() if ctx.inplace_backward else torch.empty_like(logits)
        write_centered_gradient(ctx.computed, out, logits, ctx.rows, Merged(*merged), ctx.top, ctx.terms, by)
        if ctx.inplace_backward:
            torch.autograd.graph.increment_version(logits)
        return out, *(None,) * 7


class _LinearCentered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, head: ChunkedHead, top: TopIds, correction: RolloutCorrection
    ) -> tuple[Tensor | None, ...]:
        parts = list[tuple[Merged, Centering, TopTerms]]()
        for span, rows, logits in head.chunks(hidden, weight):
            given = (logits, rows, top.select(span), correction, head.computed, head.tp_group)
            parts.append(softmax_and_terms(*given, with_entropy=head.with_entropy))
        ctx.save_for_backward(hidden, weight)
        ctx.head, ctx.top, ctx.weight = head, top, weight
        ctx.parts = [(merged, terms) for merged, _, terms in parts]
        logprobs = torch.cat([merged.logprobs for merged, _, _ in parts])
        entropies = [merged.entropy for merged, _, _ in parts if merged.entropy is not None]
        centering = [torch.cat(values) for values in zip(*(part for _, part, _ in parts), strict=True)]
        ctx.mark_non_differentiable(*centering[1:])
        ctx.set_materialize_grads(False)
        return logprobs, torch.cat(entropies) if head.with_entropy else None, *centering

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(one is None for one in upstream[:3]):
            return (None,) * 5
        hidden, weight = ctx.saved_tensors
        head, (by_hidden, by_weight, *_) = ctx.head, ctx.needs_input_grad
        home = WeightGradient(ctx.weight, final=True) if by_weight else None
        gradients = Gradients(head, hidden, weight, by_hidden, home)
        for (span, rows, logits), (merged, terms) in zip(head.chunks(hidden, weight), ctx.parts, strict=True):
            *by, by_term = (None if one is None else one[span] for one in upstream[:3])
            gradients.add(span, rows, logits, merged, *by, centred=(ctx.top.select(span), terms, by_term))
        by_inputs = gradients.hidden
        # or the gradient that `finish` may allocate would be in memory together with the chunk
        del rows, logits, gradients
        return by_inputs, None if home is None else home.finish(), None, None, None
