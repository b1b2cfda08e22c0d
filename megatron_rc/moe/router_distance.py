"""Distances of two routers: of their gate weights, and of their distributions over the experts."""

import torch
from torch import Tensor

from megatron_rc.moe.tables import RouteTable


def gate_distance(mine: RouteTable, theirs: RouteTable) -> Tensor:
    """sum_e |g(e) - g'(e)| over all experts, a gate being 0 outside of the selected ones.

    If the log-probs of the other engine are known, its gates follow from them. Otherwise they are those that the router
    of this table would give to its experts, and only the change of experts is measured.

    Returns:
        [n, L] fp64.
    """
    assert mine.logprobs is not None and mine.reference_logprobs is not None
    known = mine.reference_logprobs if theirs.logprobs is None else theirs.logprobs
    # a gate is the probability by the router, or its softmax over the selected experts
    normalized, both = mine.shape.normalized, (mine.logprobs.double(), known.double())
    g, other = (part.softmax(-1) if normalized else part.exp() for part in both)
    at_mine, unmatched = torch.zeros_like(g), torch.zeros_like(g[..., 0])
    for ids, weight in zip(theirs.ids.to(mine.ids.dtype).unbind(-1), other.unbind(-1), strict=True):
        same = mine.ids == ids[..., None]
        at_mine += same * weight[..., None]
        unmatched += weight * ~same.any(-1)
    return (g - at_mine).abs().sum(-1) + unmatched


def router_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p||q) of two routers over k experts and one cell for all others: a lower bound of KL(p||q) over all experts.

    sum_i p_i (log p_i - log q_i) + p_rest (log p_rest - log q_rest), rest = 1 - sum_i

    Args:
        p, q: [..., k] fp32, nats: log-probs of the same k experts by each router.

    Returns:
        [...] fp64; exact when k is the number of experts.
    """
    p, q = p.double(), q.double()
    # rounding may make the rest -1e-8: it is at least the smallest fp32 step below 1
    rest_p, rest_q = ((1 - part.exp().sum(-1)).clamp(min=2**-24) for part in (p, q))
    inside = (p.exp() * (p - q)).sum(-1)
    return inside + rest_p * (rest_p.log() - rest_q.log())
