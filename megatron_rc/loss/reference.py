"""The policy loss of a micro-batch (surrogate, KL to a reference policy, entropy) and the sums of its metrics."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rc.backend import compute_dtype
from megatron_rc.correction.correct import Corrected
from megatron_rc.correction.inputs import check_type
from megatron_rc.correction.reference.log_ratio import k3
from megatron_rc.loss.options import SURROGATES, LossOptions


class LossInputs(NamedTuple):
    """What the loss of a micro-batch needs besides its log-probs and entropies: constants, without gradient."""

    old: Tensor | None
    """[N] or [B, T] like the log-probs, nats; None for the value of the current ones."""
    advantages: Tensor
    """The same shape, or [B] for [B, T]."""
    weights: Tensor
    """The same shape."""
    mask: Tensor
    """The same shape, bool: tokens that count in the policy-gradient term."""
    scale: Tensor
    """The same shape; 0 where a token does not count at all."""
    reference_logprobs: Tensor | None
    """The same shape, nats."""
    log_ratio_bound: float
    """Log-ratios are clamped to this before exp, nats."""

    @classmethod
    def of(
        cls,
        old_logprobs: Tensor | None,
        advantages: Tensor,
        corrected: Corrected,
        scale: Tensor,
        reference_logprobs: Tensor | None,
    ) -> "LossInputs":
        """From arguments of `megatron_rc.policy_loss`."""
        check_type(Corrected, corrected=corrected)
        bound = corrected.correction.log_ratio_bound
        return cls(old_logprobs, advantages, corrected.weights, corrected.mask, scale, reference_logprobs, bound)

    def named(self) -> dict[str, Tensor | None]:
        """The tensors by the names of the arguments of `megatron_rc.policy_loss`."""
        return {
            "old_logprobs": self.old,
            "advantages": self.advantages,
            "corrected.weights": self.weights,
            "corrected.mask": self.mask,
            "scale": self.scale,
            "reference_logprobs": self.reference_logprobs,
        }

    def of_tokens(self, where: Tensor | slice) -> "LossInputs":
        """The inputs of some tokens of a packed batch."""
        return LossInputs(
            None if self.old is None else self.old[where],
            self.advantages[where],
            self.weights[where],
            self.mask[where],
            self.scale[where],
            None if self.reference_logprobs is None else self.reference_logprobs[where],
            self.log_ratio_bound,
        )


def policy_loss(
    current: Tensor, entropy: Tensor | None, inputs: LossInputs, options: LossOptions
) -> tuple[Tensor, Tensor]:
    """sum_t scale_t [mask_t w_t L_t + kl_coef K_t - entropy_coef H_t], as `megatron_rc.policy_loss` explains it.

    Returns:
        The loss, 0-d, fp32 (fp64 for fp64 log-probs); and [2 M] fp64, the totals of M metrics, then what divides each.
        loss, policy_loss, kl_ref (with reference_logprobs), entropy (when given): the sum of scale. For
        ppo clip_high, clip_low, dual_clip (when set): the number of kept tokens.
    """
    current, bound = current.to(compute_dtype(current)), inputs.log_ratio_bound
    detached, advantages, weights, scale = (
        tensor.detach() for tensor in (current, inputs.advantages, inputs.weights, inputs.scale)
    )
    old = detached if inputs.old is None else inputs.old.detach()
    advantages = advantages[:, None] if advantages.dim() < current.dim() else advantages
    counts = scale != 0
    usable = counts & old.isfinite() & (detached != -torch.inf)
    kept = usable & inputs.mask
    # where() comes before every function of a log-prob: a dropped token has a gradient of exactly 0, even if it is NaN
    log_ratio = current - old
    tokens = _Tokens(current, log_ratio, kept, advantages, bound)
    gained, clipped = _SURROGATES[options.surrogate](tokens, options)
    loss = (scale * torch.where(kept, weights * (-advantages * gained), 0)).sum()
    terms = [loss]
    if inputs.reference_logprobs is not None:
        distance = torch.where(usable, inputs.reference_logprobs.detach() - detached, 0).clamp(-bound, bound)
        ratio = torch.where(usable, log_ratio.detach(), 0).clamp(max=bound).exp()
        kl = _DistanceToReference.apply(current, ratio, distance, _KL_ESTIMATORS[options.kl_estimator])
        terms.append((scale * torch.where(usable, kl, 0)).sum())
        loss = loss + options.kl_coef * terms[-1]
    if entropy is not None:
        terms.append((scale * torch.where(counts, entropy.to(compute_dtype(entropy)), 0)).sum())
        loss = loss - options.entropy_coef * terms[-1]
    with torch.no_grad():
        totals = [loss, *terms, *((where & kept).sum() for where in clipped)]
        divisors = [scale.double().sum()] * (1 + len(terms)) + [kept.sum()] * len(clipped)
        return loss, torch.stack(totals + divisors).double()


def means(options: LossOptions, *, kl: bool, entropy: bool) -> tuple[str, ...]:
    """The metrics after loss and policy_loss, in the order of the totals."""
    names = ["kl_ref"] * kl + ["entropy"] * entropy
    if SURROGATES[options.surrogate].clips:
        names += ["clip_high", "clip_low"] + ["dual_clip"] * (options.dual_clip is not None)
    return tuple(names)


def policy_loss_gradient(
    current: Tensor, entropy: Tensor | None, inputs: LossInputs, options: LossOptions, upstream: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The totals and divisors of policy_loss, and upstream times its gradient by current and by entropy.

    The gradient by entropy is None without an entropy term. All arguments are constants here.
    """
    current = current.detach().requires_grad_()
    leaves = [current]
    if entropy is not None and options.entropy_coef:
        entropy = entropy.detach().requires_grad_()
        leaves.append(entropy)
    with torch.enable_grad():
        loss, totals = policy_loss(current, entropy, inputs, options)
    by_current, *by_entropy = torch.autograd.grad(loss, leaves, upstream.to(loss.dtype))
    return totals, by_current, by_entropy[0] if by_entropy else None


class _Tokens(NamedTuple):
    """What a surrogate is made of."""

    logprobs: Tensor
    log_ratio: Tensor
    """log(current / old)."""
    kept: Tensor
    """bool; where it is False, nothing that depends on a log-prob may be computed."""
    advantages: Tensor
    log_ratio_bound: float


Surrogate = Callable[[_Tokens, LossOptions], tuple[Tensor, list[Tensor]]]
"""(tokens, options) -> the factor of -advantage, and for the metrics the tokens that each bound cuts off."""


def _ppo(tokens: _Tokens, options: LossOptions) -> tuple[Tensor, list[Tensor]]:
    """The ratio, constant where it is cut off."""
    ratio = torch.where(tokens.kept, tokens.log_ratio, 0).clamp(max=tokens.log_ratio_bound).exp()
    good, bad = tokens.advantages > 0, tokens.advantages < 0
    highest, lowest = 1 + options.clip_upper, 1 - options.clip_lower
    cuts = [(good & (ratio > highest), highest), (bad & (ratio < lowest), lowest)]
    if options.dual_clip is not None:
        cuts.append((bad & (ratio > options.dual_clip), options.dual_clip))
    effective = ratio
    for where, limit in cuts:
        effective = torch.where(where, limit, effective)
    return effective, [where for where, _ in cuts]


def _reinforce(tokens: _Tokens, options: LossOptions) -> tuple[Tensor, list[Tensor]]:
    return torch.where(tokens.kept, tokens.logprobs, 0), []


def _cispo(tokens: _Tokens, options: LossOptions) -> tuple[Tensor, list[Tensor]]:
    """log current times the clipped ratio, which has no gradient."""
    ratio = torch.where(tokens.kept, tokens.log_ratio.detach(), 0).clamp(max=tokens.log_ratio_bound).exp()
    highest, lowest = 1 + options.clip_upper, 1 - options.clip_lower
    clipped = ratio.clamp(lowest, highest)
    return clipped * torch.where(tokens.kept, tokens.logprobs, 0), [ratio > highest, ratio < lowest]


_SURROGATES: dict[str, Surrogate] = {"ppo": _ppo, "cispo": _cispo, "reinforce": _reinforce}


KLEstimator = Callable[[Tensor], Tensor]
"""log reference - log current -> an estimate of KL(current || reference), token by token."""
_KL_ESTIMATORS: dict[str, KLEstimator] = {"k1": torch.neg, "k2": lambda distance: distance.square() / 2, "k3": k3}


class _DistanceToReference(torch.autograd.Function):
    """K = r k(d) of clamped r and d, with the gradient -r d, that of KL(current || reference), for every k.

    It is that of r k3(d) inside the clamps. Autograd would leave r alone with its gradient where d is clamped: r k3(d),
    which pushes away from the reference, as r k2(d) does where d > 2.
    """

    @staticmethod
    def forward(ctx: Any, current: Tensor, ratio: Tensor, distance: Tensor, estimator: KLEstimator) -> Tensor:
        ctx.save_for_backward(ratio * distance)
        return ratio * estimator(distance)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        return -upstream * ctx.saved_tensors[0], None, None, None
