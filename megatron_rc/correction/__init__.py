"""Rollout correction: a batch that policy mu sampled trains policy pi, by the ratio of their probabilities.

This is the preset `token-tis` and its loss, for finite log-probs. All tensors are [N]: one number per token::

    log_ratio = old_logprobs - rollout_logprobs                       # log pi - log mu, before the update
    weights = log_ratio.exp().clamp(max=2.0) * loss_mask              # pi / mu, truncated; it has no gradient
    mask = loss_mask                                                  # a gate would drop tokens here
    ratio = (current_logprobs - old_logprobs).exp()                   # how far the update has moved pi
    clipped = ratio.clamp(1 - 0.2, 1 + 0.28)
    gain = torch.minimum(ratio * advantages, clipped * advantages)    # PPO
    loss = -(weights * gain * mask).sum() / loss_mask.sum()           # dropped tokens stay in the denominator

`correct` computes ``weights`` and ``mask``, `policy_loss` the rest. They add the other levels of a weight, gates,
corrupt log-probs, metrics, packed and padded layouts, groups of ranks, and kernels.
"""
