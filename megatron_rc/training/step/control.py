"""Controls of a correction: its weights and drops, laid on other tokens than those that earned them."""

import dataclasses

import torch
from torch import Tensor

from megatron_rc.correction.correct import Corrected
from megatron_rc.correction.plan import Plan
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.settings.train import Control
from megatron_rc.training.microbatches import Share

_FROM_SMALL = ("token", "segment", "sequence")


def controlled(
    corrected: Corrected, share: Share, old_logprobs: Tensor, *, parts: int, control: Control, seed: int
) -> Corrected:
    """The correction that ``control`` trains with in place of ``corrected``.

    Units are tokens, or the turns or sequences that share a weight or are dropped as a whole. With n units:
    random-mask: as many units are dropped, chosen at random, and the others have weight 1
    shuffled-weights: unit i takes weight and mask of unit p(i), p a random permutation of 1..n
    mean-weight: every token is kept with sum w / n, n counting tokens, dropped ones with their w = 0

    Sequences with a log-prob that is not finite take no part and keep what they have.

    Args:
        corrected: of the batch of ``share``.
        share: all sequences of the rollout batch, in any order; the result depends on their numbers alone.
        old_logprobs: [N] fp32, nats.
        parts: number of parts of the share, from the first, that are trained on; the others are left out.
        seed: of the random choices.
    """
    rows = _eligible_rows(corrected, share, old_logprobs, parts)
    weights, mask = corrected.weights.clone(), corrected.mask.clone()
    if control == "mean-weight":
        weights[rows] = weights[rows].double().mean().to(weights.dtype)
        mask[rows] = True
        return dataclasses.replace(corrected, weights=weights, mask=mask)
    units = _dropping_units(corrected.correction) if control == "random-mask" else Plan.of(corrected.correction).units
    numbers = _unit_numbers(next(unit for unit in _FROM_SMALL if unit in units), share)[rows]
    _, unit, sizes = torch.unique_consecutive(numbers, return_inverse=True, return_counts=True)
    first = rows[sizes.cumsum(0) - sizes]
    order = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(seed)).to(rows.device)
    if control == "random-mask":
        kept = order >= (~mask[first]).sum()
        weights[rows], mask[rows] = kept[unit].to(weights.dtype), kept[unit]
    else:
        source = first[order]
        weights[rows], mask[rows] = weights[source][unit], mask[source][unit]
    return dataclasses.replace(corrected, weights=weights, mask=mask)


def _dropping_units(correction: RolloutCorrection) -> frozenset[str]:
    planned = Plan.of(correction).weight
    of_weight = {planned.unit} if planned is not None and planned.drops else set()
    return frozenset({gate.level for gate in correction.reject} | of_weight)


def _eligible_rows(corrected: Corrected, share: Share, old_logprobs: Tensor, parts: int) -> Tensor:
    """[n] rows of the loss tokens that take part, sequences in the order of their numbers."""
    batch, trained = share.batch, sum(len(members) for part in share.micro_batches[:parts] for members in part)
    broken = batch.loss_mask & ~old_logprobs.isfinite()
    bounds = batch.cu_seqlens.tolist()
    rows = [torch.arange(0)]
    for sequence in sorted(range(trained), key=lambda i: share.sequences[i]):
        own = slice(bounds[sequence], bounds[sequence + 1])
        if not (corrected.bad_sequences[sequence] or broken[own].any()):
            rows.append(bounds[sequence] + batch.loss_mask[own].nonzero()[:, 0].cpu())
    return torch.cat(rows).to(batch.loss_mask.device)


def _unit_numbers(unit: str, share: Share) -> Tensor:
    """[N] a number per row, the same within a unit and another in the next one."""
    batch = share.batch
    if unit == "token":
        return torch.arange(batch.num_tokens, device=batch.loss_mask.device)
    if unit == "segment":
        return batch.segment_ids
    lengths = torch.tensor(batch.lengths)
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(batch.loss_mask.device)
