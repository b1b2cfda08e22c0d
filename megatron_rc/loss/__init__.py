"""The policy loss of tokens that were sampled before, the scale of each token in it, and the advantages.

`loss_scale` and `policy_loss` with their defaults, in plain PyTorch; every tensor is [N], a value per token:

    def simple_policy_loss(current_logprobs, old_logprobs, advantages, corrected, loss_mask):
        scale = loss_mask / loss_mask.sum()  # rejected tokens stay in the denominator
        ratio = (current_logprobs - old_logprobs).exp()
        clipped = ratio.clamp(1 - 0.2, 1 + 0.28)
        # the worse of the two: clipping takes the gradient of a gain that went far enough, not that of a loss
        per_token = -torch.minimum(advantages * ratio, advantages * clipped)
        return (scale * corrected.weights * corrected.mask * per_token).sum()

Above this, the real ones drop tokens without a finite log-prob, add KL and entropy terms and metrics, and work over
ranks. `options` has the tables of what can be chosen.
"""
