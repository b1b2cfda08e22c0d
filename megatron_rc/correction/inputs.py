"""The checked arguments of `correct` and `pair_metrics`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_rc.backend import debug_checks
from megatron_rc.collectives import Group, gathered_objects, is_alone
from megatron_rc.correction.plan import Plan
from megatron_rc.correction.settings import Unit


class Pair(NamedTuple):
    """Log-probs of two policies, packed or padded."""

    train_logprobs: Tensor
    """[N] or [B, T]."""
    rollout_logprobs: Tensor
    loss_mask: Tensor
    cu_seqlens: Tensor | None
    """[S + 1] for [N]; None for [B, T], whose rows are the sequences."""

    @property
    def num_sequences(self) -> int:
        return len(self.loss_mask) if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    @property
    def offsets(self) -> Tensor:
        """[S + 1], the row where each sequence starts after tokens are flattened."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens
        rows, length = self.loss_mask.shape
        return torch.arange(rows + 1, device=self.loss_mask.device) * length


@dataclass(frozen=True)
class Extras:
    """What some corrections read besides log-probs, mask and advantages; every field may be left out."""

    statistics: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> tensor of the shape of loss_mask, for rejections on that name."""
    positions: Tensor | None = None
    """The shape of loss_mask, int: index of each loss token among those of its sequence, made before the sequence was
    sliced. A weight of level "prefix" needs it under context parallelism. The part of a sequence on a rank may have one
    gap."""
    lags: Tensor | None = None
    """The shape of loss_mask, int, >= 0: updates of pi since each token was sampled. Rejections on "lag" and weights
    with growth="sqrt_lag" or upper_by_lag need them. They also split the metrics by lag."""
    sampling_logprobs: Tensor | None = None
    """The shape of loss_mask, fp32, nats: log pi of each token by the trainer's weights of the version that sampled it.
    Weights with staleness_upper need them. They also split the metrics into mismatch, sampling / rollout, and
    staleness, train / sampling. NaN, an infinity and what is above 0 are corruption."""
    mean_k3: Tensor | None = None
    """0-d on the same device, fp64 (another dtype is cast), nats: K of earlier batches, for the gate "standardized".
    Without it, K is that of this batch, in one all-reduce over dp_group. A caller that sees one micro-batch must give
    it."""
    measured_upper: float | None = None
    """The metric of that name of the previous rollout, for a weight with upper="measured". Its statistics pool like
    those of all metrics, and need advantages."""


class Inputs(NamedTuple):
    """The optional inputs that this correction uses, checked; the others are None."""

    segment_ids: Tensor | None
    """[N] or [B, T]; None where no turn is judged, or where turns are the runs of loss_mask."""
    num_segments: int | None
    advantages: Tensor | None
    """The shape of loss_mask, or one per sequence: see advantage_unit."""
    advantage_unit: Unit
    """What has one advantage: a token or a sequence."""
    statistics: Mapping[str, Tensor]
    """Name -> the shape of loss_mask, in the order in which the rejections name them."""
    lags: Tensor | None
    """The shape of loss_mask, int; updates since each token was sampled. Metrics read them where nothing else does."""
    positions: Tensor | None
    """The shape of loss_mask, int; None where sequences are whole or nothing depends on them."""
    sampling_logprobs: Tensor | None
    """The shape of loss_mask."""
    mean_k3: Tensor | None
    """0-d, fp64; None where no gate needs it, or where it is that of this batch."""

    def tensors(self) -> dict[str, Tensor | None]:
        """The tensors by the names that errors give them."""
        named = {f"statistics[{name!r}]": given for name, given in self.statistics.items()}
        rows = {"lags": self.lags, "positions": self.positions, "sampling_logprobs": self.sampling_logprobs}
        return {"segment_ids": self.segment_ids, "advantages": self.advantages, **rows, **named}


def check_type(kind: type, **given: object) -> None:
    for name, value in given.items():
        if not isinstance(value, kind):
            raise ValueError(f"{name} must be of type {kind.__name__}, got {type(value).__name__}")


def check_shape(name: str, value: Tensor, shape: torch.Size, of: str) -> None:
    check_type(Tensor, **{name: value})
    if value.shape != shape:
        raise ValueError(f"{name} must have the shape {tuple(shape)} of {of}, got {tuple(value.shape)}")


def check_tokens(train_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor) -> None:
    check_type(Tensor, train_logprobs=train_logprobs, rollout_logprobs=rollout_logprobs, loss_mask=loss_mask)
    shapes = [tuple(t.shape) for t in (train_logprobs, rollout_logprobs, loss_mask)]
    if len(shapes[0]) not in (1, 2) or len(set(shapes)) != 1:
        raise ValueError(
            "train_logprobs, rollout_logprobs and loss_mask must have one shape, [N] packed or [B, T] padded, got "
            + ", ".join(map(str, shapes))
        )


def check_pair(
    train_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, cu_seqlens: Tensor | None, cp_group: Group
) -> Pair:
    check_tokens(train_logprobs, rollout_logprobs, loss_mask)
    if cu_seqlens is not None:
        check_type(Tensor, cu_seqlens=cu_seqlens)
    if train_logprobs.dim() == 2:
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens must be None for padded [B, T] input, whose rows are the sequences")
    elif cu_seqlens is None:
        raise ValueError("cu_seqlens must be given for packed [N] input")
    elif cu_seqlens.dim() != 1 or len(cu_seqlens) == 0:
        raise ValueError(f"cu_seqlens must be [S + 1], got shape {tuple(cu_seqlens.shape)}")
    elif cu_seqlens.is_floating_point():
        raise ValueError(f"cu_seqlens must hold whole numbers, got {cu_seqlens.dtype}")
    elif len(cu_seqlens) == 1 and len(loss_mask):
        raise ValueError(f"cu_seqlens must hold at least one sequence for {len(loss_mask)} tokens, got [1] numbers")
    pair = Pair(train_logprobs, rollout_logprobs, loss_mask, cu_seqlens)
    if debug_checks():
        if cu_seqlens is not None:
            _check_offsets(cu_seqlens, len(loss_mask))
            _check_loss_is_covered(cu_seqlens, loss_mask)
        check_same_on_ranks("cu_seqlens must hold one number of sequences", pair.num_sequences, cp_group, "cp_group")
    return pair


def check_inputs(
    pair: Pair,
    plan: Plan,
    segment_ids: Tensor | None,
    num_segments: int | None,
    advantages: Tensor | None,
    extras: Extras,
    cp_group: Group,
) -> Inputs:
    """Those of the given inputs that the correction uses."""
    if "segment" in plan.units:
        _check_segments(pair, segment_ids, num_segments, cp_group)
    else:
        segment_ids, num_segments = None, None
    statistics = _needed_statistics(pair.loss_mask.shape, plan, extras.statistics)
    advantages, unit = _needed_advantages(pair, plan, advantages)
    _check_lags(pair, plan, extras.lags)
    return Inputs(
        segment_ids,
        num_segments,
        advantages,
        unit,
        statistics,
        extras.lags,
        _needed_positions(pair, plan, extras.positions, cp_group),
        _checked_sampling_logprobs(pair, plan, extras.sampling_logprobs),
        _needed_mean_k3(pair, plan, extras.mean_k3),
    )


def _needed_mean_k3(pair: Pair, plan: Plan, mean_k3: Tensor | None) -> Tensor | None:
    if plan.standardized is None or mean_k3 is None:
        return None
    check_type(Tensor, mean_k3=mean_k3)
    if mean_k3.dim() or mean_k3.device != pair.loss_mask.device:
        raise ValueError(
            f"mean_k3 must be 0-d and on {pair.loss_mask.device}, got {tuple(mean_k3.shape)} on {mean_k3.device}"
        )
    return mean_k3.double()


def _check_segments(pair: Pair, segment_ids: Tensor | None, num_segments: int | None, cp_group: Group) -> None:
    if (segment_ids is None) != (num_segments is None):
        raise ValueError("segment_ids and num_segments must be given together")
    if segment_ids is None or num_segments is None:
        if cp_group is not None and dist.get_world_size(cp_group) > 1:
            raise ValueError(
                "segment_ids and num_segments must be given with context parallelism: a rank sees only parts of turns"
            )
        return
    check_type(Tensor, segment_ids=segment_ids)
    if segment_ids.numel() != pair.loss_mask.numel():
        raise ValueError(f"segment_ids must have the shape of loss_mask, got {tuple(segment_ids.shape)}")
    if debug_checks():
        check_same_on_ranks("num_segments must be one number", num_segments, cp_group, "cp_group")
        _check_segment_ids(pair, segment_ids, num_segments, over_batch=not is_alone(cp_group))


def _needed_advantages(pair: Pair, plan: Plan, advantages: Tensor | None) -> tuple[Tensor | None, Unit]:
    """The advantages that a gate or a measured bound reads, and the unit that has one of them."""
    if not plan.measures_upper and not any(gate.reads_advantages for gate in plan.correction.reject):
        return None, "token"
    if advantages is None:
        raise ValueError("advantages must be given for upper='measured' and a rejection whose `when` is not 'always'")
    check_type(Tensor, advantages=advantages)
    shape, sequences = pair.loss_mask.shape, pair.num_sequences
    if advantages.shape == shape:
        return advantages, "token"
    if tuple(advantages.shape) in ((sequences,), (sequences, 1)):
        return advantages, "sequence"
    raise ValueError(
        f"advantages must be {tuple(shape)}, one per token, or ({sequences},) or ({sequences}, 1), one per sequence, "
        f"got {tuple(advantages.shape)}"
    )


def _needed_positions(pair: Pair, plan: Plan, positions: Tensor | None, cp_group: Group) -> Tensor | None:
    if not plan.sums_prefixes or is_alone(cp_group):
        return None
    if positions is None:
        raise ValueError(
            "positions must be given for level 'prefix' with context parallelism: a rank sees only parts of sequences"
        )
    check_shape("positions", positions, pair.loss_mask.shape, "loss_mask")
    return positions


def _checked_sampling_logprobs(pair: Pair, plan: Plan, sampling_logprobs: Tensor | None) -> Tensor | None:
    if sampling_logprobs is not None:
        check_shape("sampling_logprobs", sampling_logprobs, pair.loss_mask.shape, "loss_mask")
    elif plan.has_two_factors:
        raise ValueError(
            "sampling_logprobs must be given for a weight with staleness_upper: log-probs by the trainer's weights of "
            "the version that sampled, from a forward pass while they are loaded"
        )
    return sampling_logprobs


def _check_lags(pair: Pair, plan: Plan, lags: Tensor | None) -> None:
    if lags is None:
        if plan.reads_lags:
            raise ValueError("lags must be given for a rejection on 'lag' and for a weight whose bounds depend on them")
        return
    check_shape("lags", lags, pair.loss_mask.shape, "loss_mask")
    if lags.is_floating_point() or lags.dtype == torch.bool:
        raise ValueError(f"lags must be whole numbers of updates, got {lags.dtype}")
    if debug_checks() and (lags[pair.loss_mask.bool()] < 0).any():
        raise ValueError(f"lags of loss tokens must be >= 0, got {int(lags[pair.loss_mask.bool()].min())}")


def _needed_statistics(shape: torch.Size, plan: Plan, statistics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    for name in plan.statistics:
        if name not in statistics:
            raise ValueError(f"statistics must hold {name!r}, which a rejection uses, got {sorted(statistics)}")
        check_shape(f"statistics[{name!r}]", statistics[name], shape, "loss_mask")
    return {name: statistics[name] for name in plan.statistics}


def check_offsets_on_cpu(cu_seqlens: Tensor | None, loss_mask: Tensor) -> None:
    """Refuse cu_seqlens that do not ascend within the tokens, and lengths in their place, where no device must wait."""
    if cu_seqlens is None or cu_seqlens.device.type != "cpu":
        return
    if loss_mask.device.type == "cpu" and _look_like_lengths(cu_seqlens.numpy(), loss_mask):
        raise ValueError(
            f"cu_seqlens must hold where each sequence starts, got {cu_seqlens[0]} to {cu_seqlens[-1]}, which "
            "look like lengths: pass their cumulative sum, with 0 in front"
        )
    _check_offsets(cu_seqlens, len(loss_mask))


def _look_like_lengths(offsets: NDArray[Any], loss_mask: Tensor) -> bool:
    """Whether loss tokens are left out, and none would be if these were lengths."""
    first, last, total = offsets[0], offsets[-1], offsets.sum()
    if (first, last) == (0, len(loss_mask)) or total > len(loss_mask) or loss_mask[total:].any():
        return False
    return bool(loss_mask[:first].any() or loss_mask[last:].any())


def _check_offsets(cu_seqlens: Tensor, num_tokens: int) -> None:
    offsets = cu_seqlens.cpu().numpy()
    falls = (np.diff(offsets) < 0).nonzero()[0]
    if offsets[0] < 0 or offsets[-1] > num_tokens or len(falls):
        raise ValueError(
            f"cu_seqlens must ascend within [0, {num_tokens}], the number of tokens, got {offsets[0]} to "
            f"{offsets[-1]}" + (f", which descends after position {falls[0]}" if len(falls) else "")
        )


def _check_loss_is_covered(cu_seqlens: Tensor, loss_mask: Tensor) -> None:
    outside = loss_mask.bool().clone()
    outside[int(cu_seqlens[0]) : int(cu_seqlens[-1])] = False
    if outside.any():
        row = int(outside.nonzero()[0])
        raise ValueError(f"loss_mask must be 0 in rows that no sequence of cu_seqlens covers, got 1 in row {row}")


def _check_segment_ids(pair: Pair, segment_ids: Tensor, num_segments: int, *, over_batch: bool) -> None:
    loss_tokens = pair.loss_mask.flatten().bool()
    ids = segment_ids.flatten()[loss_tokens]
    if not len(ids):
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= num_segments:
        raise ValueError(
            f"segment_ids of loss tokens must be in [0, num_segments), num_segments={num_segments}, got {low} to {high}"
        )
    steps = ids.diff()
    rows = torch.arange(len(loss_tokens), device=ids.device)[loss_tokens]
    next_sequence = torch.searchsorted(pair.offsets.long(), rows, right=True).diff() > 0
    if ((steps < 0) & ~next_sequence).any():
        raise ValueError("segment_ids must ascend over the loss tokens of a sequence")
    if over_batch and ((steps <= 0) & next_sequence).any():
        raise ValueError(
            "segment_ids must ascend over the whole batch with context parallelism, where ranks tell turns apart by "
            "their ids alone, got ids that begin again in a sequence"
        )


def check_same_on_ranks(must: str, value: int, group: Group, name: str) -> None:
    values = gathered_objects(value, group)
    if len(set(values)) > 1:
        raise ValueError(f"{must} on all ranks of {name}, got {values}")
