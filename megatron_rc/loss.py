"""From rewards to the scalar that Megatron differentiates: advantages, the scale of every token, the policy loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.config import RolloutCorrection, Surrogate
from megatron_rc.logprobs import check_backend
from megatron_rc.metrics import MetricSums

if TYPE_CHECKING:
    from megatron_rc.correction import Corrected

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
Denominator = Literal["original", "kept"]
_AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def rloo_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """A_i = r_i - mean of the other rewards of its group: REINFORCE with a leave-one-out baseline, unbiased.

    All finite rewards of a group enter the baseline, those of rejected samples too. A sample without a finite reward,
    or alone in its group, gets 0: there is nothing to compare it with.

    Args:
        rewards: [S] float.
        groups: [S] int64, samples of one prompt share a number.

    Returns:
        [S] fp32, exactly 0 in a group of equal rewards.

    Source: Kool et al. 2019; Ahmadian et al. 2024 (arXiv 2402.14740).
    """
    group = _Groups.of(rewards, groups)
    count, total = group.sums(group.finite), group.sums(group.rewards)
    others = (total - group.rewards) / (count - 1).clamp(min=1)
    return torch.where(group.finite & (count > 1), group.rewards - others, 0).float()


def grpo_advantages(rewards: Tensor, groups: Tensor, *, divide_by_std: bool = True, epsilon: float = 1e-6) -> Tensor:
    """A_i = (r_i - mean) / (std + epsilon) over the finite rewards of its group, std with n - 1 in the denominator.

    Args:
        rewards, groups: as in rloo_advantages; the same samples get 0.
        divide_by_std: False leaves r_i - mean (Dr. GRPO).
        epsilon: in units of the reward.

    Returns:
        [S] fp32, exactly 0 in a group of equal rewards.

    Source: DeepSeekMath (arXiv 2402.03300); Dr. GRPO (arXiv 2503.20783).
    """
    group = _Groups.of(rewards, groups)
    count = group.sums(group.finite)
    deviation = torch.where(group.finite, group.rewards - group.sums(group.rewards) / count.clamp(min=1), 0)
    if divide_by_std:
        variance = group.sums(deviation.square()) / (count - 1).clamp(min=1)
        deviation = deviation / (variance.sqrt() + epsilon)
    return torch.where(count > 1, deviation, 0).float()


def equal_reward_groups(rewards: Tensor, groups: Tensor) -> Tensor:
    """[S] bool: the finite rewards of the sample's group are all equal, so that the group teaches nothing.

    True also where a group has one or no finite reward. Args as in rloo_advantages.
    """
    group = _Groups.of(rewards, groups)
    largest = group.reduce(torch.where(group.finite, group.rewards, -torch.inf), "max")
    smallest = group.reduce(torch.where(group.finite, group.rewards, torch.inf), "min")
    return largest <= smallest


def expand_to_tokens(values: Tensor, cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """[S] one value a sequence -> [N] packed: each token gets that of its sequence."""
    return values.repeat_interleave(cu_seqlens.diff(), output_size=num_tokens)


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
    """What multiplies each token's loss, so that the plain sum over all tokens, micro-batches and ranks is the loss.

    With T_i the counted tokens of sequence i and S the sequences with T_i > 0, over all ranks:
    token-mean 1 / sum_i T_i; seq-mean-token-mean 1 / (S T_i); seq-mean-token-sum 1 / S;
    seq-mean-token-sum-norm 1 / (S max_length). Call it once an optimizer step and slice; it may communicate.

    Args:
        loss_mask: [N] packed or [B, T] padded, bool; tokens of this optimizer step on this rank.
        kept_mask: the same shape, `Corrected.mask`.
        aggregation: one of the four.
        denominator: "original" counts loss_mask, "kept" the tokens of loss_mask & kept_mask. "original" does not make
            the step larger when more is rejected.
        cu_seqlens: [S + 1] int32, packed layout only.
        dp_group: ranks with other sequences.
        cp_group: ranks with other tokens of the same sequences, in the same order.
        max_length: tokens, for seq-mean-token-sum-norm only.

    Returns:
        fp32, the shape of loss_mask; positive on loss_mask (also on rejected tokens, where the KL and entropy terms
        still count) and 0 elsewhere. A sequence with no counted token is 0 throughout, unless token-mean.

    Raises:
        ValueError: an unknown aggregation or denominator; max_length or cu_seqlens missing.
    """
    if aggregation not in _AGGREGATIONS:
        raise ValueError(f"aggregation must be one of {', '.join(map(repr, _AGGREGATIONS))}, got {aggregation!r}")
    if denominator not in ("original", "kept"):
        raise ValueError(f"denominator must be 'original' or 'kept', got {denominator!r}")
    if kept_mask.shape != loss_mask.shape:
        shapes = f"{tuple(loss_mask.shape)} of loss_mask, got {tuple(kept_mask.shape)}"
        raise ValueError(f"kept_mask must have the shape {shapes}")
    loss_mask = loss_mask.bool()
    counted = loss_mask & kept_mask.bool() if denominator == "kept" else loss_mask
    if aggregation == "token-mean":
        tokens = _all_reduced(_all_reduced(counted.sum(), cp_group), dp_group)
        return torch.where(loss_mask & (tokens > 0), 1 / tokens.double(), 0).float()
    lengths = _all_reduced(_tokens_per_sequence(counted, cu_seqlens), cp_group)
    # every context-parallel rank sees every sequence, so sequences are added over dp_group alone
    sequences = _all_reduced((lengths > 0).sum(), dp_group)
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
    """0-d, differentiable; the share of these tokens in the loss of the optimizer step."""
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

    With r = current / old: ppo is L = -A r outside the trust region cut off, that is -A min(r, 1 + clip_upper) for
    A > 0 and -A max(r, 1 - clip_lower) for A < 0, there also -A min(., dual_clip). reinforce is L = -A log current.
    w, mask are `corrected`'s, and touch this term alone; K and H count wherever scale is not 0.

    K = r (e^d - 1 - d), d = log reference - log current, estimates KL(pi||ref) from samples of old. As r has a gradient
    too, that of K is r log(pi / ref) grad log pi: the gradient of KL(pi||ref). Without r in front, k3 has the gradient
    of KL(ref||pi). When mu is neither old nor pi, K leaves old / mu uncorrected.

    old_logprobs chooses the old policy: log-probs before the update; None, old = current.detach(), r = 1 in value; or
    those of mu, two policies, r = pi / mu. log r and d are clamped to log_ratio_bound before exp. A token whose current
    log-prob is -inf, or whose old one is not finite, adds nothing. No collective runs here, and nothing waits for the
    device.

    Args:
        current_logprobs: [N] packed or [B, T] padded, fp32, nats, with gradient.
        old_logprobs: the same shape or None, fp32, nats.
        advantages: the same shape, or [B] in the padded layout (`expand_to_tokens` for the packed one).
        corrected: weights and mask of these tokens, and the settings that made them.
        scale: the same shape, fp32, from loss_scale; 0 where loss_mask is 0.
        clip_lower, clip_upper, dual_clip: bounds of r, on the scale of r - 1, r - 1 and r.
        reference_logprobs: the same shape, fp32, nats, of the policy to stay close to.
        entropy: the same shape, fp32, nats, with gradient, from vocab_parallel_logprobs.
        backend: "torch" or "auto".

    Returns:
        PolicyLoss. The loss of no token at all is 0 and differentiable. Metrics: loss, policy_loss, kl_ref and entropy
        weighted by scale; clip_low, clip_high and dual_clip as shares of kept tokens. For current
        against old there is `pair_metrics`.

    Raises:
        ValueError: a shape, bound or missing argument; a weight on the ppo ratio of two policies.

    Source: PPO (arXiv 1707.06347); dual clip (arXiv 1912.09729); clip-higher (DAPO, arXiv 2503.14476);
        the ratio in K (DeepSeek-V3.2).
    """
    check_backend(backend)
    _check_loss_arguments(surrogate, clip_lower, clip_upper, dual_clip, corrected.correction, old_logprobs)
    tensors = {"scale": scale, "corrected.mask": corrected.mask, "corrected.weights": corrected.weights}
    optional = {"old_logprobs": old_logprobs, "reference_logprobs": reference_logprobs, "entropy": entropy}
    if advantages.dim() == 1 and current_logprobs.dim() == 2:
        advantages = advantages[:, None].expand(len(advantages), current_logprobs.shape[1])
    for name, value in {**tensors, **optional, "advantages": advantages}.items():
        if value is not None and value.shape != current_logprobs.shape:
            shape = tuple(current_logprobs.shape)
            raise ValueError(f"{name} must have the shape {shape} of current_logprobs, got {tuple(value.shape)}")
    for name, value, coefficient in (
        ("reference_logprobs", reference_logprobs, kl_coef),
        ("entropy", entropy, entropy_coef),
    ):
        if coefficient and value is None:
            raise ValueError(f"{name} must be given when its coefficient is {coefficient!r}")
    bound = corrected.correction.log_ratio_bound
    detached = current_logprobs.detach()
    old = detached if old_logprobs is None else old_logprobs
    counts = scale != 0
    usable = counts & old.isfinite() & (detached != -torch.inf)
    kept = usable & corrected.mask
    # where comes before every function of a log-prob: what is dropped has a gradient of exactly 0, NaN or not
    log_ratio = current_logprobs - old
    clipped: dict[str, Tensor] = {}
    if surrogate == "ppo":
        ratio = torch.where(kept, log_ratio, 0).clamp(max=bound).exp()
        effective, clipped = _clipped_ratio(ratio, advantages, clip_lower, clip_upper, dual_clip)
        per_token = -advantages * effective
    else:
        per_token = -advantages * torch.where(kept, current_logprobs, 0)
    per_token = torch.where(kept, corrected.weights.detach() * per_token, 0)
    means = {"policy_loss": (scale * per_token).sum()}
    loss = means["policy_loss"]
    if reference_logprobs is not None:
        distance = torch.where(usable, reference_logprobs - current_logprobs, 0).clamp(-bound, bound)
        ratio = torch.where(usable, log_ratio, 0).clamp(max=bound).exp()
        means["kl_ref"] = (scale * torch.where(usable, ratio * (distance.expm1() - distance), 0)).sum()
        loss = loss + kl_coef * means["kl_ref"]
    if entropy is not None:
        means["entropy"] = (scale * torch.where(counts, entropy, 0)).sum()
        loss = loss - entropy_coef * means["entropy"]
    with torch.no_grad():
        total, kept_tokens = scale.double().sum(), kept.sum()
        pooled = {name: (value.detach(), total) for name, value in {"loss": loss, **means}.items()}
        pooled |= {name: ((where & kept).sum(), kept_tokens) for name, where in clipped.items()}
        metrics = MetricSums.of_means(pooled)
    return PolicyLoss(loss, metrics)


def _clipped_ratio(
    ratio: Tensor, advantages: Tensor, clip_lower: float, clip_upper: float, dual_clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The ratio as it enters -A r, constant where it is cut off, and where that is."""
    good, bad = advantages > 0, advantages < 0
    cut = {"clip_high": (good & (ratio > 1 + clip_upper), 1 + clip_upper)}
    cut["clip_low"] = (bad & (ratio < 1 - clip_lower), 1 - clip_lower)
    if dual_clip is not None:
        cut["dual_clip"] = (bad & (ratio > dual_clip), dual_clip)
    for where, limit in cut.values():
        ratio = torch.where(where, limit, ratio)
    return ratio, {name: where for name, (where, _) in cut.items()}


def _check_loss_arguments(
    surrogate: Surrogate,
    clip_lower: float,
    clip_upper: float,
    dual_clip: float | None,
    correction: RolloutCorrection,
    old_logprobs: Tensor | None,
) -> None:
    correction.check_surrogate(surrogate)
    if not 0 <= clip_lower <= 1 or not clip_upper >= 0:
        raise ValueError(
            f"clip_lower must be in [0, 1] and clip_upper >= 0, got clip_lower={clip_lower!r} clip_upper={clip_upper!r}"
        )
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be > 1, got {dual_clip!r}")
    if (correction.old == "current") != (old_logprobs is None):
        raise ValueError(
            f"old_logprobs must be {'None' if correction.old == 'current' else 'given'} when old is {correction.old!r}"
        )


class _Groups(NamedTuple):
    """Rewards by group without leaving the device: [S] everywhere, the answer of a group at each of its samples."""

    rewards: Tensor
    """fp64; 0 where not finite."""
    finite: Tensor
    order: Tensor
    number: Tensor
    """int64, dense number of the sample's group."""
    offsets: Tensor
    """[S + 1], where each group starts in `order`; the unused ones are empty."""

    @classmethod
    def of(cls, rewards: Tensor, groups: Tensor) -> _Groups:
        if rewards.dim() != 1 or groups.shape != rewards.shape:
            raise ValueError(f"rewards and groups must both be [S], got {tuple(rewards.shape)}, {tuple(groups.shape)}")
        ordered, order = groups.sort(stable=True)
        sorted_number = torch.cat([ordered.new_zeros(1), (ordered[1:] != ordered[:-1]).cumsum(0)])[: len(groups)]
        number = torch.empty_like(sorted_number).scatter_(0, order, sorted_number)
        edges = torch.arange(len(groups) + 1, device=groups.device)
        finite = rewards.isfinite()
        offsets = torch.searchsorted(sorted_number, edges)
        return cls(torch.where(finite, rewards.double(), 0), finite, order, number, offsets)

    def reduce(self, values: Tensor, how: str) -> Tensor:
        # segment by segment in a fixed order: no atomics; unsafe skips checks that would wait for the device
        return torch.segment_reduce(values[self.order], how, offsets=self.offsets, unsafe=True)[self.number]

    def sums(self, values: Tensor) -> Tensor:
        return self.reduce(values.double(), "sum")


def _tokens_per_sequence(counted: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    if counted.dim() == 2:
        return counted.sum(1)
    if cu_seqlens is None:
        raise ValueError("cu_seqlens must be given for packed tensors: this aggregation needs the sequences")
    # int64 differences are exact
    before = torch.cat([cu_seqlens.new_zeros(1, dtype=torch.int64), counted.cumsum(0)])
    return before[cu_seqlens.long()].diff()


def _all_reduced(count: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(count, group=group)
    return count
