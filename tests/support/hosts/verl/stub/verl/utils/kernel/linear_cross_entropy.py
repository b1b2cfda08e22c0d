import torch
import torch.distributed as dist


def linear_cross_entropy(hidden, weight, labels, temperature, reduction, dist_process_group):
    assert reduction == "none"
    logits = hidden.flatten(0, -2) @ weight.T
    shards = [torch.empty_like(logits) for _ in range(dist_process_group.size())]
    dist.all_gather(shards, logits.detach(), group=dist_process_group)
    shards[dist_process_group.rank()] = logits
    log_softmax = (torch.cat(shards, -1) / temperature).log_softmax(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return log_softmax.gather(-1, labels.view(-1, 1)).squeeze(-1), entropy
