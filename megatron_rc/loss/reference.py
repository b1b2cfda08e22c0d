"""The policy loss of a micro-batch (surrogate, KL to a reference policy, entropy) and the sums of its metrics."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rc.backend import compute_dtype
from megatron_rc.correction.settings import Surrogate


class LossInputs(NamedTuple):
    """The tensors of one micro-batch; log-probs and entropy in nats, of any float dtype."""

    current: Tensor
    """[N] or [B, T]; with entropy the only one that has a gradient."""
    old: Tensor | None
    """The same shape; None for the value of current."""
    advantages: Tensor
    """The same shape, or [B] for [B, T]."""
    weights: Tensor
    """The same shape."""
    mask: Tensor
    """The same shape, bool: tokens that count in the policy-gradient term."""
    scale: Tensor
    """The same shape; 0 where a token does not count at all."""
    reference_logprobs: Tensor | None
    """The same shape."""
    entropy: Tensor | None
    """The same shape."""

    def named(self) -> dict[str, Tensor | None]:
        """The tensors by the names of the arguments of `megatron_rc.policy_loss`."""
        return {
            "current_logprobs": self.current,
            "old_logprobs": self.old,
            "advantages": self.advantages,
            "corrected.weights": self.weights,
            "corrected.mask": self.mask,
            "scale": self.scale,
            "reference_logprobs": self.reference_logprobs,
            "entropy": self.entropy,
        }

    def of_tokens(self, where: Tensor | slice) -> "LossInputs":
        """The inputs of some tokens of a packed batch."""
        return LossInputs(*(None if tensor is None else tensor[where] for tensor in self))  # type: ignore[arg-type]


class LossOptions(NamedTuple):
    """The settings of the loss, as arguments of `megatron_rc.policy_loss`."""

    surrogate: Surrogate
    clip_lower: float
    clip_upper: float
    dual_clip: float | None
    kl_coef: float
    entropy_coef: float
    log_ratio_bound: float


def policy_loss(inputs: LossInputs, options: LossOptions) -> tuple[Tensor, Tensor]:
    """sum_t scale_t [mask_t w_t L_t + kl_coef K_t - entropy_coef H_t], as `megatron_rc.policy_loss` explains it.

    Returns:
        The loss, 0-d, fp32 (fp64 for fp64 log-probs); and [2 M] fp64, the totals of M metrics, then what divides each.
        loss, policy_loss, kl_ref (with reference_logprobs), entropy (when given): the sum of scale. For ppo
        clip_high, clip_low, dual_clip (when set): the number of kept tokens.
    """
    current = inputs.current.to(compute_dtype(inputs.current))
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
    clipped: list[Tensor] = []
    if options.surrogate == "ppo":
        ratio = torch.where(kept, log_ratio, 0).clamp(max=options.log_ratio_bound).exp()
        effective, clipped = _clipped_ratio(ratio, advantages, options)
        per_token = -advantages * effective
    else:
        per_token = -advantages * torch.where(kept, current, 0)
    loss = (scale * torch.where(kept, weights * per_token, 0)).sum()
    terms = [loss]
    if inputs.reference_logprobs is not None:
        distance = torch.where(usable, inputs.reference_logprobs.detach() - detached, 0)
        distance = distance.clamp(-options.log_ratio_bound, options.log_ratio_bound)
        ratio = torch.where(usable, log_ratio.detach(), 0).clamp(max=options.log_ratio_bound).exp()
        terms.append((scale * torch.where(usable, _DistanceToReference.apply(current, ratio, distance), 0)).sum())
        loss = loss + options.kl_coef * terms[-1]
    if inputs.entropy is not None:
        terms.append((scale * torch.where(counts, inputs.entropy.to(compute_dtype(inputs.entropy)), 0)).sum())
        loss = loss - options.entropy_coef * terms[-1]
    with torch.no_grad():
        totals = [loss, *terms, *((where & kept).sum() for where in clipped)]
        divisors = [scale.double().sum()] * (1 + len(terms)) + [kept.sum()] * len(clipped)
        return loss, torch.stack(totals + divisors).double()


def policy_loss_gradient(
    inputs: LossInputs, options: LossOptions, upstream: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The totals and divisors of policy_loss, and upstream times its gradient by current and by entropy.

    The gradient by entropy is None without an entropy term. Inputs are constants here.
    """
    current = inputs.current.detach().requires_grad_()
    entropy = inputs.entropy.detach().requires_grad_() if inputs.entropy is not None and options.entropy_coef else None
    leaves = [current] if entropy is None else [current, entropy]
    with torch.enable_grad():
        used = inputs._replace(current=current, entropy=inputs.entropy if entropy is None else entropy)
        loss, totals = policy_loss(used, options)
    gradients = torch.autograd.grad(loss, leaves, upstream.to(loss.dtype))
    return totals, gradients[0], None if entropy is None else gradients[1]


class _DistanceToReference(torch.autograd.Function):
    """K = r (e^d - 1 - d) of clamped r and d, with the gradient -r d that it has inside the clamps.

    Autograd would leave r alone with its gradient where d is clamped: r k3(d), which pushes away from the reference.
    """

    @staticmethod
    def forward(ctx: Any, current: Tensor, ratio: Tensor, distance: Tensor) -> Tensor:
        ctx.save_for_backward(ratio * distance)
        return ratio * (distance.expm1() - distance)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        return -upstream * ctx.saved_tensors[0], None, None


def _clipped_ratio(ratio: Tensor, advantages: Tensor, options: LossOptions) -> tuple[Tensor, list[Tensor]]:
    """(the ratio as it enters -A r, constant where it is cut off; the masks of each cut)."""
    good, bad = advantages > 0, advantages < 0
    highest, lowest = 1 + options.clip_upper, 1 - options.clip_lower
    cuts = [(good & (ratio > highest), highest), (bad & (ratio < lowest), lowest)]
    if options.dual_clip is not None:
        cuts.append((bad & (ratio > options.dual_clip), options.dual_clip))
    effective = ratio
    for where, limit in cuts:
        effective = torch.where(where, limit, effective)
    return effective, [where for where, _ in cuts]
