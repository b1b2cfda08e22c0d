"""Log-probs of tokens, from logits whose vocabulary is split over ranks (`logits`) or from hidden states (`linear`).

`vocab_parallel_logprobs` in plain PyTorch, with the logits [N, V_local] of all ranks in one list:

    def simple_logprobs(shards, targets, temperature=1.0):
        gathered, start = [], 0
        for logits in shards:  # a rank reads its logits once, and sends these numbers of each row to all ranks
            largest = logits.amax(1)
            total = ((logits - largest[:, None]) / temperature).exp().sum(1)
            here = (targets >= start) & (targets < start + logits.shape[1])
            at_target = logits.gather(1, torch.where(here, targets - start, 0)[:, None])[:, 0]
            gathered.append(torch.stack([largest, total, torch.where(here, at_target, -torch.inf)]))
            start += logits.shape[1]
        largest, total, at_target = torch.stack(gathered, 1)  # [ranks, N] each: every rank joins them by itself
        maximum = largest.amax(0)
        log_sum = (((largest - maximum) / temperature).exp() * total).sum(0).log()
        return (at_target.amax(0) - maximum) / temperature - log_sum

Above this, the real one sends a fourth number for the entropy, and knows masks, padding and kept ids.
"""
