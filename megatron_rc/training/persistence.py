"""Persistence: whether sampler and trainer differ at the same token ids in one rollout as in the one before."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rc.correction.metrics import MetricSums

SIZE = 256
"""Numbers of a sketch; a cosine of two sketches is off by about 1 / sqrt(SIZE), 6 %."""
LARGEST = 10.0
"""Ratio above which a token counts as this one, so that a few do not decide."""
_UNIT = 2.0**32
"""1 in whole numbers; 100 million tokens of the LARGEST ratio fit into 64 bits."""
_NAMES = tuple(f"sketch/{place}" for place in range(SIZE))


def sketch(train_logprobs: Tensor, rollout_logprobs: Tensor, targets: Tensor, loss_mask: Tensor) -> MetricSums:
    """Sums of rho - 1 by token id, in a sketch that ranks can add::

        s[bucket(v)] += sign(v) sum over the tokens of id v of (min(rho, LARGEST) - 1)

    Under mu its mean is pi(v) - mu(v), added up over the contexts of v: noise that is drawn anew leaves no direction in
    it, while the mean log-ratio is below 0 for every id. Sums are of whole numbers, so that no order of adding matters.

    Args:
        train_logprobs: [N] fp32, nats; rollout_logprobs: the same of the sampler; targets: [N] ids that they are of.
        loss_mask: [N] bool; tokens whose ratio is not finite count nowhere.

    Source: Charikar, Chen and Farach-Colton (2002), Finding frequent items in data streams (the count sketch).
    """
    rest = (train_logprobs - rollout_logprobs).double().exp().clamp(max=LARGEST) - 1
    mixed = targets.long() * 2_654_435_761 % 2**32
    sign = 1 - 2 * (mixed >> 23 & 1)
    whole = (torch.where(loss_mask & rest.isfinite(), rest, 0) * _UNIT).round().long() * sign
    sums = whole.new_zeros(SIZE).index_add_(0, mixed >> 24, whole).double() / _UNIT
    return MetricSums.of_vector(torch.cat([sums, torch.ones_like(sums)]), totals=_NAMES)


def add_persistence(metrics: dict[str, Any], before: Sequence[float]) -> tuple[float, ...]:
    """Replace the sketch among the metrics of a step by their cosine with the one of the step ``before``.

    Returns:
        The sketch of this step; ``before`` where it has none, because nothing was updated.
    """
    if _NAMES[0] not in metrics:
        return tuple(before)
    now = torch.tensor([metrics.pop(name) for name in _NAMES], dtype=torch.float64)
    if len(before) == SIZE:
        metrics["persistence"] = float(torch.cosine_similarity(now, now.new_tensor(before), dim=0, eps=1e-300))
    return tuple(now.tolist())
