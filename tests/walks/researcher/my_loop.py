"""The researcher's own loop: a small language model of PyTorch, sampled with noise, on padded batches."""

import torch

from megatron_rc import RolloutCorrection, correct, loss_scale, policy_loss, vocab_parallel_logprobs

torch.manual_seed(0)
ROWS, LENGTH, VOCABULARY = 32, 8, 32
model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 24), torch.nn.Linear(24, VOCABULARY))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
correction = RolloutCorrection.preset("token-tis")
for step in range(1, 61):
    tokens, sampled = torch.randint(VOCABULARY, (ROWS, 1)), []
    for _ in range(LENGTH):
        logits = model(tokens[:, -1]).detach()
        sampler = (logits + 0.1 * torch.randn_like(logits)).log_softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(sampler.exp(), 1)], 1)
        sampled.append(sampler.gather(1, tokens[:, -1:]))
    loss_mask = torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (ROWS, 1))
    rewards = ((tokens[:, 1:] < 4) & loss_mask).sum(1) / loss_mask.sum(1)
    logprobs = vocab_parallel_logprobs(model(tokens[:, :-1]), tokens[:, 1:], mask=loss_mask)
    assert isinstance(logprobs, torch.Tensor)
    corrected = correct(logprobs.detach(), torch.cat(sampled, 1), loss_mask, correction=correction)
    scale = loss_scale(loss_mask, corrected.mask)
    advantages = (rewards - rewards.mean())[:, None].expand(ROWS, LENGTH)
    loss, _ = policy_loss(logprobs, logprobs.detach(), advantages, corrected, scale=scale)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step in (1, 60):
        print(f"step {step}: reward {rewards.mean():.2f}, k3 {corrected.metrics.values()['k3']:.4f}")
