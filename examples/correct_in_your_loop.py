"""Rollout correction inside a plain PyTorch loop: no Megatron, no engine, a few seconds on a CPU.

    python examples/correct_in_your_loop.py

A sampler draws answers with noisy weights, a trainer learns from them. Each step measures the gap between the two,
corrects for it, and prints what it did.
"""

import torch

from megatron_rc import RolloutCorrection, Weight, correct, loss_scale, policy_loss, vocab_parallel_logprobs
from megatron_rc.loss.advantages import expand_to_tokens, rloo_advantages

VOCABULARY, LENGTH, GROUPS, SAMPLES = 12, 6, 16, 8


def main() -> None:
    torch.manual_seed(0)
    theta = torch.zeros(LENGTH, VOCABULARY, requires_grad=True)  # one softmax per position: the smallest policy
    optimizer = torch.optim.Adam([theta], lr=0.1)
    correction = RolloutCorrection(Weight(upper=2.0), RolloutCorrection.preset("k3-reject").reject)
    cu_seqlens = torch.arange(GROUPS * SAMPLES + 1, dtype=torch.int32) * LENGTH
    groups = torch.arange(GROUPS).repeat_interleave(SAMPLES)
    position = torch.arange(LENGTH).repeat(GROUPS * SAMPLES)
    for step in range(1, 41):
        sampler = (theta.detach() + 0.1 * torch.randn_like(theta)).log_softmax(-1)
        tokens = torch.multinomial(sampler.exp()[position], 1)[:, 0]
        rollout_logprobs = sampler[position, tokens]
        rewards = (tokens.view(-1, LENGTH) == torch.arange(LENGTH)).float().mean(1)
        loss_mask = torch.ones_like(tokens, dtype=torch.bool)

        logits = theta[position]
        logprobs = vocab_parallel_logprobs(logits, tokens, mask=loss_mask)
        old_logprobs = logprobs.detach()
        corrected = correct(old_logprobs, rollout_logprobs, loss_mask, correction=correction, cu_seqlens=cu_seqlens)
        corrected.metrics.check()
        scale = loss_scale(loss_mask, corrected.mask, cu_seqlens=cu_seqlens)
        advantages = expand_to_tokens(rloo_advantages(rewards, groups), cu_seqlens, len(tokens))
        loss, _ = policy_loss(logprobs, old_logprobs, advantages, corrected, scale=scale)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            m = corrected.metrics.values()
            print(
                f"step {step}: reward {rewards.mean():.2f}, k3 {m['k3']:.4f}, ESS {m['ess_token']:.3f}, "
                f"masked {m['masked_token']:.1%}"
            )


if __name__ == "__main__":
    main()
