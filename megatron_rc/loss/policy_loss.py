"""policy_loss(): the scalar that Megatron differentiates; loss_scale(): the factor of every token in it."""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.backend import backend_module
from megatron_rc.collectives import all_reduced
from megatron_rc.correction.correct import Corrected
from megatron_rc.correction.inputs import check_shape
from megatron_rc.correction.metrics import MetricSums
from megatron_rc.correction.settings import Aggregation, Denominator, RolloutCorrection, Surrogate, check_clipping
from megatron_rc.loss.advantages import expand_to_tokens
from megatron_rc.loss.reference import LossInputs, LossOptions
from megatron_rc.schema.limits import check_one_of


def loss_scale(
    loss_mask: Tensor,
    kept_mask: Tensor,
    *,
    aggregation: Aggregation = "token-mean",
    denominator: Denominator = "original",
    cu_seqlens: Tensor | None = None,
    dp_group: dist.ProcessGroup | None = None,
    cp_group: dist.ProcessGroup | None = None,
    max_length: int | None = None,
) -> Tensor:
    """The factor of each token's loss, such that the plain sum over all tokens, micro-batches and ranks is the loss.

    With T_i the counted tokens of sequence i and S the sequences with T_i > 0, over all ranks:
    token-mean 1 / sum_i T_i; seq-mean-token-mean 1 / (S T_i); seq-mean-token-sum 1 / S;
    seq-mean-token-sum-norm 1 / (S max_length). Call it once per optimizer step, then slice; it may communicate.

    Args:
        loss_mask: [N] packed or [B, T] padded, bool; tokens of this optimizer step on this rank.
        kept_mask: the same shape, `Corrected.mask`.
        aggregation: one of these four.
        denominator: "original" counts loss_mask, "kept" loss_mask & kept_mask. With "original" the step does not grow
            when more tokens are rejected.
        cu_seqlens: [S + 1] int32, packed layout only.
        dp_group: ranks with other sequences.
        cp_group: ranks with other tokens of the same sequences, in the same order.
        max_length: in tokens, for seq-mean-token-sum-norm only.

    Returns:
        fp32, the shape of loss_mask; positive on loss_mask (also on rejected tokens, where the KL and entropy terms
        still count) and 0 elsewhere. A sequence with no counted token is 0 throughout, unless token-mean.

    Raises:
        ValueError: an unknown aggregation or denominator; max_length or cu_seqlens missing.
    """
    check_one_of("aggregation", aggregation, Aggregation)
    check_one_of("denominator", denominator, Denominator)
    check_shape("kept_mask", kept_mask, loss_mask.shape, "loss_mask")
    loss_mask = loss_mask.bool()
    counted = loss_mask & kept_mask.bool() if denominator == "kept" else loss_mask
    if aggregation == "token-mean":
        tokens = all_reduced(all_reduced(counted.sum(), cp_group), dp_group)
        return torch.where(loss_mask & (tokens > 0), 1 / tokens.double(), 0).float()
    lengths = all_reduced(_tokens_per_sequence(counted, cu_seqlens), cp_group)
    # every context-parallel rank sees every sequence, so sequences are added over dp_group alone
    sequences = all_reduced((lengths > 0).sum(), dp_group)
    per_token = torch.ones_like(lengths)
    if aggregation == "seq-mean-token-mean":
        per_token = lengths
    elif aggregation == "seq-mean-token-sum-norm":
        if max_length is None or max_length < 1:
            raise ValueError(f"max_length must be >= 1 for 'seq-mean-token-sum-norm', got {max_length!r}")
        per_token = per_token * max_length
    scale = torch.where(lengths > 0, 1 / (sequences * per_token).double(), 0).float()
    if cu_seqlens is None:
        return scale[:, None] * loss_mask
    return expand_to_tokens(scale, cu_seqlens, loss_mask.shape[0]) * loss_mask


class PolicyLoss(NamedTuple):
    loss: Tensor
    """0-d, differentiable: what these tokens contribute to the loss of the optimizer step."""
    metrics: MetricSums


def policy_loss(
    current_logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    corrected: Corrected,
    *,
    scale: Tensor,
    surrogate: Surrogate = "ppo",
    clip_lower: float = 0.2,
    clip_upper: float = 0.28,
    dual_clip: float | None = None,
    reference_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    backend: str = "auto",
) -> PolicyLoss:
    """sum_t scale_t [mask_t w_t L_t + kl_coef K_t - entropy_coef H_t] over the tokens of one micro-batch.

    With r = current / old, ppo is -A r, cut off outside the trust region. L = -A min(r, 1 + clip_upper) for A > 0. For
    A < 0 it is L = -A max(r, 1 - clip_lower), where dual_clip bounds the max from above. reinforce is L = -A log
    current. w and mask come from `corrected` and apply to this term alone; K and H count wherever scale is not 0.

    K = r (e^d - 1 - d), d = log reference - log current, estimates KL(pi||ref) from samples of old. Since r has a
    gradient too, that of K is r log(pi / ref) grad log pi: the gradient of KL(pi||ref). Without r in front, k3 would
    have the gradient of KL(ref||pi). When mu is neither old nor pi, K leaves old / mu uncorrected.

    old_logprobs decides what old is: the policy before the update; None, which means current.detach() and r = 1 in
    value; or mu (two policies), which means r = pi / mu. log r and d are clamped to log_ratio_bound before exp. A
    clamped r stops the gradient of L, while that of K remains r log(pi / ref) with the clamped values, so that its sign
    is right at any distance. A token whose current log-prob is -inf, or whose old one is not finite, adds nothing. All
    tensors but current_logprobs and entropy are constants without gradient. No collective runs here, and nothing waits
    for the device.

    Args:
        current_logprobs: [N] packed or [B, T] padded, fp32, nats, with gradient.
        old_logprobs: the same shape or None, fp32, nats.
        advantages: the same shape, or [B] in the padded layout (`expand_to_tokens` for the packed one).
        corrected: weights and mask (bool) of these tokens, and the settings that made them.
        scale: the same shape, fp32, from loss_scale; 0 where loss_mask is 0.
        clip_lower, clip_upper, dual_clip: bounds of r, on the scale of r - 1, r - 1 and r.
        reference_logprobs: the same shape, fp32, nats: the policy to stay close to.
        entropy: the same shape, fp32, nats, with gradient, from vocab_parallel_logprobs.
        backend: "auto", "torch" or "triton".

    Returns:
        PolicyLoss. Without any token the loss is 0 and differentiable. Metrics: loss and its policy_loss, added up over
        whatever is merged and pooled: the micro-batches and ranks of one optimizer step give the loss of the step.
        kl_ref and entropy are means weighted by scale, clip_low, clip_high and dual_clip shares of kept tokens.
        `pair_metrics` compares current with old.

    Raises:
        ValueError: a shape, dtype, bound or missing argument; a weight on the ppo ratio of two policies.

    Source: PPO (arXiv 1707.06347); dual clip (arXiv 1912.09729); clip-higher (DAPO, arXiv 2503.14476);
        the ratio in K (DeepSeek-V3.2).
    """
    weights, mask = corrected.weights, corrected.mask
    inputs = LossInputs(current_logprobs, old_logprobs, advantages, weights, mask, scale, reference_logprobs, entropy)
    options = LossOptions(
        surrogate, clip_lower, clip_upper, dual_clip, kl_coef, entropy_coef, corrected.correction.log_ratio_bound
    )
    computed = backend_module("policy_loss", backend, **inputs.named())
    check_loss_arguments(inputs, options, corrected.correction)
    loss, totals = computed.policy_loss(inputs, options)
    return PolicyLoss(loss, loss_metrics(inputs, options, totals))


def loss_metrics(inputs: LossInputs, options: LossOptions, totals: Tensor) -> MetricSums:
    """The metrics of the tokens whose totals and divisors `reference.policy_loss.policy_loss` returns."""
    means = ["kl_ref"] * (inputs.reference_logprobs is not None) + ["entropy"] * (inputs.entropy is not None)
    if options.surrogate == "ppo":
        means += ["clip_high", "clip_low"] + ["dual_clip"] * (options.dual_clip is not None)
    return MetricSums.of_vector(totals, totals=("loss", "policy_loss"), means=tuple(means))


def check_loss_arguments(
    inputs: LossInputs, options: LossOptions, correction: RolloutCorrection, of: str = "current_logprobs"
) -> None:
    """Refuse tensors without the shape or the device of inputs.current, which errors call ``of``, and bad settings."""
    correction.check_surrogate(options.surrogate)
    check_clipping(options.clip_lower, options.clip_upper, options.dual_clip)
    if options.surrogate == "ppo":
        _check_log_ratio_bound(options)
    if (correction.old == "current") != (inputs.old is None):
        raise ValueError(
            f"old_logprobs must be {'None' if correction.old == 'current' else 'given'} when old is {correction.old!r}"
        )
    shape = inputs.current.shape
    for name, value in inputs.named().items():
        one_per_row = name == "advantages" and value is not None and value.shape == shape[:1]
        if value is not None and not one_per_row:
            check_shape(name, value, shape, of)
        if value is not None and value.device != inputs.current.device:
            raise ValueError(f"{name} must be on {inputs.current.device}, where {of} are, got {value.device}")
    if inputs.mask.dtype != torch.bool:
        raise ValueError(f"corrected.mask must be bool, got {inputs.mask.dtype}")
    for name, value, coefficient in (
        ("reference_logprobs", inputs.reference_logprobs, options.kl_coef),
        ("entropy", inputs.entropy, options.entropy_coef),
    ):
        if coefficient and value is None:
            raise ValueError(f"{name} must be given when its coefficient is {coefficient!r}")


def _check_log_ratio_bound(options: LossOptions) -> None:
    """Refuse a clamp that would stop the gradient of ratios below a finite bound of the clipping."""
    for name, limit in (("1 + clip_upper", 1 + options.clip_upper), ("dual_clip", options.dual_clip or 1.0)):
        if options.log_ratio_bound < math.log(limit) < math.inf:
            raise ValueError(
                f"log_ratio_bound must be >= log({name}) = {math.log(limit):.2f}, got {options.log_ratio_bound!r}"
            )


def _tokens_per_sequence(counted: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    if counted.dim() == 2:
        return counted.sum(1)
    if cu_seqlens is None:
        raise ValueError("cu_seqlens must be given for packed tensors: this aggregation needs the sequences")
    # int64 differences are exact
    before = torch.cat([cu_seqlens.new_zeros(1, dtype=torch.int64), counted.cumsum(0)])
    return before[cu_seqlens.long()].diff()
