"""Correct one batch: the code of the README, as it stands there.

python examples/correct_a_batch.py
"""

import torch

from megatron_rc import correct, loss_scale, policy_loss, vocab_parallel_logprobs

# Made up here: B = 4 responses of T = 6 tokens each, out of V = 32 ids.
torch.manual_seed(0)
logits = torch.randn(4, 6, 32, requires_grad=True)  # [B, T, V], the trainer's
tokens = torch.randint(32, (4, 6))  # [B, T], as the sampler drew them
loss_mask = torch.ones(4, 6, dtype=torch.bool)  # [B, T], False for prompts and padding
advantages = torch.randn(4)  # [B]
old_logprobs = vocab_parallel_logprobs(logits, tokens).detach()  # [B, T], before the update
noise = 0.1 * torch.randn(4, 6)
rollout_logprobs = (old_logprobs + noise).clamp(max=0)  # [B, T], as the sampler logged them

# Once per rollout batch: the weight of each token, and the metrics of the gap.
corrected = correct(old_logprobs, rollout_logprobs, loss_mask, correction="token-tis")
corrected.metrics.check()  # raises on NaN and on log-probs above 0
gap = corrected.metrics.values()
print(f"k3 {gap['k3']:.4f}, ESS {gap['ess_token']:.3f}")

# Per micro-batch: PPO's loss with these weights.
scale = loss_scale(loss_mask, corrected.mask)
logprobs = vocab_parallel_logprobs(logits, tokens, mask=loss_mask)
loss, metrics = policy_loss(logprobs, old_logprobs, advantages, corrected, scale=scale)
loss.backward()
