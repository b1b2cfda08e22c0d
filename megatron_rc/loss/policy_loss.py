"""policy_loss(): the scalar that Megatron differentiates, and the metrics of its terms."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_rc.backend import use_triton
from megatron_rc.correction.correct import Corrected
from megatron_rc.correction.inputs import check_shape, check_type
from megatron_rc.correction.metrics import MetricSums
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.loss import reference
from megatron_rc.loss.options import LossOptions
from megatron_rc.loss.reference import LossInputs


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
    reference_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    centering: Tensor | None = None,
    options: LossOptions = LossOptions(),
    backend: str = "auto",
) -> PolicyLoss:
    """sum_t scale_t [mask_t w_t L_t + kl_coef K_t - entropy_coef H_t] over the tokens of one micro-batch.

    With r = current / old, ppo is -A r, cut off outside the trust region. L = -A min(r, 1 + clip_upper) for A > 0. For
    A < 0 it is L = -A max(r, 1 - clip_lower), where dual_clip bounds the max from above. reinforce is L = -A log
    current. w and mask come from `corrected` and apply to this term alone; K and H count wherever scale is not 0.

    K = r k(d), d = log reference - log current, estimates KL(pi||ref) from samples of old: k is -d (k1), d^2 / 2 (k2)
    or e^d - 1 - d (k3). Each has the gradient r log(pi / ref) grad log pi, that of KL(pi||ref). r k3 has it because r
    has a gradient too: without r in front, k3 would have that of KL(ref||pi). When mu is neither old nor pi, K leaves
    old / mu uncorrected.

    old_logprobs decides what old is: the policy before the update; None, which means current.detach() and r = 1 in
    value; or mu (two policies), which means r = pi / mu. log r and d are clamped to log_ratio_bound before exp. A
    clamped r stops the gradient of L, while that of K remains r log(pi / ref) with the clamped values, so that its sign
    is right at any distance. A token whose current log-prob is -inf, or whose old one is not finite, adds nothing. All
    tensors but current_logprobs and entropy are constants without gradient. No collective runs here, and nothing waits
    for the device.

    Args:
        current_logprobs: [N] packed or [B, T] padded, fp32, nats, with gradient.
        old_logprobs: the same shape or None, fp32, nats.
        advantages: the same shape, or [B] or [B, 1] in the padded layout; for the packed one
            `megatron_rc.loss.advantages.expand_to_tokens` makes [N] of [S].
        corrected: weights and mask (bool) of these tokens, and the settings that made them.
        scale: the same shape, fp32, from loss_scale; 0 where loss_mask is 0.
        reference_logprobs: the same shape, fp32, nats: the policy to stay close to; needed for kl_coef.
        entropy: the same shape, fp32, nats, with gradient, from vocab_parallel_logprobs; needed for entropy_coef.
        centering: the same shape, fp32, nats, with gradient, the term of `centered_logprobs`; needed where the
            correction has centering. It adds scale_t A_t term_t, also for tokens that the mask drops.
        options: surrogate, bounds of r, KL and entropy terms.
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
    check_type(Tensor, current_logprobs=current_logprobs, advantages=advantages)
    if current_logprobs.dim() == 2 and advantages.shape == (len(current_logprobs), 1):
        advantages = advantages[:, 0]
    inputs = LossInputs.of(old_logprobs, advantages, corrected, scale, reference_logprobs)
    check_loss_arguments(inputs, options, corrected.correction, current_logprobs, "current_logprobs")
    if entropy is not None:
        _check_like("entropy", entropy, current_logprobs, "current_logprobs")
    elif options.entropy_coef:
        raise ValueError(f"entropy must be given when entropy_coef is {options.entropy_coef!r}")
    if (corrected.correction.centering == "none") != (centering is None):
        must = "None" if centering is not None else "given, from centered_logprobs,"
        raise ValueError(f"centering must be {must} when correction.centering is {corrected.correction.centering!r}")
    computed = computing(backend, current_logprobs=current_logprobs, entropy=entropy, **inputs.named())
    loss, totals = computed.policy_loss(current_logprobs, entropy, inputs, options)
    if centering is not None:
        _check_like("centering", centering, current_logprobs, "current_logprobs")
        advantages = advantages[:, None] if advantages.dim() < centering.dim() else advantages
        added = torch.where(scale != 0, scale.detach() * advantages.detach() * centering, 0).sum()
        loss = loss + added
        # of the loss and of its policy term
        totals[:2] += added.detach()
    return PolicyLoss(
        loss, loss_metrics(options, totals, kl=reference_logprobs is not None, entropy=entropy is not None)
    )


class LossBackend(Protocol):
    """What `reference` and `fused` compute."""

    def policy_loss(
        self, current: Tensor, entropy: Tensor | None, inputs: LossInputs, options: LossOptions
    ) -> tuple[Tensor, Tensor]: ...

    def policy_loss_gradient(
        self, current: Tensor, entropy: Tensor | None, inputs: LossInputs, options: LossOptions, upstream: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]: ...


def computing(backend: str, **tensors: Tensor | None) -> LossBackend:
    """The backend for these tensors, as `use_triton` chooses it."""
    if not use_triton(backend, **tensors):
        return reference
    from megatron_rc.loss import fused

    return fused


def loss_metrics(options: LossOptions, totals: Tensor, *, kl: bool, entropy: bool) -> MetricSums:
    """The metrics of the tokens whose totals and divisors `reference.policy_loss` returns."""
    means = reference.means(options, kl=kl, entropy=entropy)
    return MetricSums.of_vector(totals, totals=("loss", "policy_loss"), means=means)


def check_loss_arguments(
    inputs: LossInputs, options: LossOptions, correction: RolloutCorrection, like: Tensor, of: str
) -> None:
    """Refuse tensors without the shape or the device of ``like``, which errors call ``of``, and bad settings."""
    check_type(LossOptions, options=options)
    options.check(correction)
    if (correction.old == "current") != (inputs.old is None):
        raise ValueError(
            f"old_logprobs must be {'None' if correction.old == 'current' else 'given'} when old is {correction.old!r}"
        )
    for name, value in inputs.named().items():
        if value is not None:
            _check_like(name, value, like, of)
    if inputs.mask.dtype != torch.bool:
        raise ValueError(f"corrected.mask must be bool, got {inputs.mask.dtype}")
    if options.kl_coef and inputs.reference_logprobs is None:
        raise ValueError(f"reference_logprobs must be given when kl_coef is {options.kl_coef!r}")


def _check_like(name: str, value: Tensor, like: Tensor, of: str) -> None:
    if name != "advantages" or value.shape != like.shape[:1]:
        check_shape(name, value, like.shape, of)
    if value.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, where {of} are, got {value.device}")
