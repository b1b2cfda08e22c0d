"""The correction of a whole rollout batch of megatron/rl, at the first point where all its log-probs are known."""

import inspect
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rc.correction.correct import Corrected, correct
from megatron_rc.correction.inputs import Extras
from megatron_rc.correction.plan import Plan
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.integrations.log_names import checked, worth_logging
from megatron_rc.integrations.megatron_lm import lags
from megatron_rc.integrations.megatron_lm.session import Session
from megatron_rc.integrations.symbols import Function
from megatron_rc.learning_rate.rule import mismatch_signals


class RolloutRows(NamedTuple):
    """The rollout batch of one rank: rows, or bins under packing, of T - 1 log-probs each."""

    old_logprobs: Tensor
    """[rows, T - 1]."""
    rollout_logprobs: Tensor
    """[rows, T - 1]; NaN where the sampler returned none."""
    loss_mask: Tensor
    """[rows, T - 1], bool."""
    advantages: Tensor
    """[S], one per sequence; [rows] without packing."""
    starts: list[list[int]] | None
    """Where the sequences of each bin start; None without packing."""
    lags: Tensor | None = None
    """[rows, T - 1] int32, updates since each token was sampled."""


def corrected_rows(
    train_logprobs: Tensor, rows: RolloutRows, correction: RolloutCorrection, dp_group: Any = None
) -> tuple[Corrected, Tensor]:
    """`correct` in the layout of megatron/rl.

    A generated token whose rollout log-prob is missing belongs to no statistic and no unit. Its weight is 1, or 0 in a
    sequence that keeps no other token. ``train_logprobs`` are [rows, T - 1], fp32, nats.

    Returns:
        Corrected, flat under packing, and the weights [rows, T - 1].
    """
    known = rows.loss_mask & ~rows.rollout_logprobs.isnan()
    shape, cu_seqlens = known.shape, None
    if rows.starts is not None:
        # bins lie end to end; rows between two sequences, which have no loss, belong to the first
        firsts = [row * shape[1] + start for row, of_bin in enumerate(rows.starts) for start in (of_bin or [0])]
        cu_seqlens = torch.tensor([*firsts, known.numel()], dtype=torch.int32, device=known.device)
        shape = torch.Size([known.numel()])
    given = (each.view(shape) for each in (train_logprobs, rows.rollout_logprobs, known))
    extras = Extras(lags=None if rows.lags is None else rows.lags.view(shape))
    advantages = rows.advantages.to(train_logprobs.dtype)
    corrected = correct(
        *given, correction=correction, cu_seqlens=cu_seqlens, advantages=advantages, extras=extras, dp_group=dp_group
    )
    if cu_seqlens is None:
        kept_sequence = corrected.mask.any(1, keepdim=True).expand_as(known)
    else:
        bounds, total = cu_seqlens.long(), F.pad(corrected.mask.cumsum(0), (1, 0))
        kept = total[bounds].diff() > 0
        kept_sequence = torch.repeat_interleave(kept, bounds.diff(), output_size=known.numel()).view_as(known)
    missing = rows.loss_mask & ~known
    weights = torch.where(missing, kept_sequence.to(corrected.weights.dtype), corrected.weights.view_as(known))
    return corrected, weights


def prepare_data_for_update(original: Function, session: Session, *args: Any, **kwargs: Any) -> Any:
    """The host's function, which then puts what the loss needs into the tensor of the rollout log-probs.

    That is the weight of every token; with old="rollout" the rollout log-probs, NaN where one is missing.
    """
    from megatron.core import mpu
    from megatron.rl.rl_utils import get_rl_runtime_state

    iterator, group_stats, examples = original(*args, **kwargs)
    rollouts = inspect.signature(original).bind(*args, **kwargs).arguments["rollouts"]
    if session.correction is not None:
        packing = get_rl_runtime_state().packing_context
        group = mpu.get_data_parallel_group()
        epochs = _epochs(session.correction, rollouts, group_stats)
        if packing is not None:
            _correct_bins(session, packing, epochs, group)
        else:
            iterator = _correct_micro_batches(session, iterator, epochs, group)
        session.micro_batch = 0
    if session.attached is not None:
        session.attached.begin(session.signals._replace(length=mean_response_length(rollouts)))
    return iterator, group_stats, examples


def _epochs(correction: RolloutCorrection, rollouts: Any, group_stats: Any) -> list[list[int]] | None:
    """Epochs of the training rows of all ranks; None where no token is stale and nothing else reads lags."""
    reads_lags, segments = Plan.of(correction).reads_lags, getattr(group_stats, "policy_epoch_segments", None)
    if segments is None:
        if reads_lags:
            raise ValueError(
                "the correction depends on lags, and prepare_data_for_update of the host returns no "
                "policy_epoch_segments: use bounds that do not, or a newer Megatron-LM"
            )
        return None
    from megatron.rl import rl_utils
    from megatron.training.global_vars import get_args

    epochs = lags.epochs_of_rows(rollouts, segments, rl_utils._is_collapsible_rollout)
    return epochs if reads_lags or lags.is_stale(epochs, get_args().curr_iteration) else None


def _lags(epochs: list[list[int]] | None, starts: Any, sequences: Any, like: Tensor) -> Tensor | None:
    """[rows, T - 1] where ``like`` is."""
    from megatron.training.global_vars import get_args

    if epochs is None:
        return None
    return lags.lags_of(epochs, starts, sequences, like.shape, get_args().curr_iteration).to(like.device)


def _correct_bins(session: Session, packing: Any, epochs: list[list[int]] | None, dp_group: Any) -> None:
    info, device = packing.packing_info, packing.old_logprobs.device
    if getattr(packing, "packed_inference_logprobs", None) is None:
        raise ValueError(_NO_LOGPROBS)
    # an empty bin counts as one sequence
    bins = (of_bin if len(of_bin) else torch.zeros(1) for of_bin in packing.bin_advantages)
    # the host adds the end of the last sequence to the starts of a bin
    starts = [list(info.seq_starts[b])[: len(sequences)] for b, sequences in enumerate(info.bin_seq_indices)]
    rows = RolloutRows(
        packing.old_logprobs.float(),
        packing.packed_inference_logprobs.to(device),
        packing.packed_loss_mask[:, 1:].bool().to(device),
        torch.cat([of_bin.to(device).float() for of_bin in bins]),
        starts,
        _lags(epochs, starts, info.bin_seq_indices, packing.old_logprobs),
    )
    packing.packed_inference_logprobs = _for_the_loss(session, rows, dp_group)
    session.tokens = rows.loss_mask.sum(1).tolist()


def _correct_micro_batches(session: Session, iterator: Any, epochs: list[list[int]] | None, dp_group: Any) -> Any:
    """The iterator over the same micro-batches, whose last tensor now holds what the loss needs."""
    batches: list[list[Tensor]] = []
    while sum(len(batch[0]) for batch in batches) < session.num_rows:
        batches.append(list(next(iterator)))
    _, advantages, old_logprobs, loss_mask, _, _, rollout_logprobs = map(torch.cat, zip(*batches, strict=True))
    device = advantages.device
    first = torch.distributed.get_rank(dp_group) * session.num_rows
    sequences = [[first + row] for row in range(session.num_rows)]
    rows = RolloutRows(
        old_logprobs.float().to(device),
        rollout_logprobs.to(device),
        loss_mask[:, 1:].bool().to(device),
        advantages.float(),
        None,
        _lags(epochs, [[0]] * session.num_rows, sequences, old_logprobs.to(device)),
    )
    sizes = [len(batch[0]) for batch in batches]
    parts = _for_the_loss(session, rows, dp_group).to(rollout_logprobs.device).split(sizes)
    session.tokens = [int(part.sum()) for part in rows.loss_mask.split(sizes)]
    return type(iterator)(itertools.cycle([[*batch[:-1], part] for batch, part in zip(batches, parts, strict=True)]))


def _for_the_loss(session: Session, rows: RolloutRows, dp_group: Any) -> Tensor:
    """[rows, T - 1] weights, or rollout log-probs with old="rollout"; metrics of the batch go into the session."""
    from megatron.core import mpu

    assert session.correction is not None
    tp_group = mpu.get_tensor_model_parallel_group(check_initialized=False)
    corrected, weights = corrected_rows(rows.old_logprobs, rows, session.correction, dp_group)
    counts = torch.stack([(rows.loss_mask & ~rows.rollout_logprobs.isnan()).sum(), rows.loss_mask.sum()]).double()
    torch.distributed.all_reduce(counts, group=dp_group)
    known, total = counts.tolist()
    if total and not known:
        raise ValueError(_NO_LOGPROBS)
    metrics = corrected.metrics.all_reduce(dp_group)
    pooled = checked(metrics, session.correction, session.lost_batch, dp_group, tp_group)
    session.signals = mismatch_signals(pooled, session.correction)
    values = worth_logging(pooled)
    values["missing"] = 1 - known / max(total, 1)
    session.rollout_log = {f"old/{name}": rows.old_logprobs.new_tensor([value, 1]) for name, value in values.items()}
    if session.correction.old == "rollout":
        return rows.rollout_logprobs.masked_fill(~rows.loss_mask, torch.nan)
    return weights


_NO_LOGPROBS = (
    "no token of the rollout batch has a rollout log-prob: add --rl-inference-logprobs-is-correction, and sample with "
    "an agent whose rollouts are TokenRollout"
)


def mean_response_length(rollouts: Sequence[Sequence[Any]]) -> float | None:
    """Mean number of generated tokens over the groups of a rollout batch, which every rank holds whole.

    Rollouts without a generation mask (failed episodes, text without tokens) have no length and are left out.
    """
    masks = (getattr(rollout, "generation_mask", None) for rollout in itertools.chain(*rollouts))
    lengths = [sum(map(sum, mask)) for mask in masks if mask]
    return sum(lengths) / len(lengths) if lengths else None


def _pad_nonnull_with_zeros(original: Function, session: Session, data: Sequence[Any], max_len: int) -> Tensor:
    """The host's function, which pads with NaN: a log-prob of 0 would be a probability of 1."""
    padded: Tensor = original(data, max_len).clone()
    for row, logprobs in zip(padded, data, strict=True):
        row[0 if logprobs is None else len(logprobs) :] = torch.nan
    return padded


def pack_inference_logprobs(original: Function, session: Session, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """The host's function, which marks missing log-probs as not filled, and as NaN."""
    packed, filled = original(*args, **kwargs)
    filled = filled & ~packed.isnan()
    return packed.masked_fill(~filled, torch.nan), filled


def align_unpacked_inference_logprobs(original: Function, session: Session, *args: Any, **kwargs: Any) -> Any:
    """The host's function, with NaN for missing log-probs."""
    aligned = original(*args, **kwargs)
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    for row, logprobs, generated in zip(aligned, given["inference_logprobs"], given["generation_masks"], strict=True):
        targets = generated.nonzero().flatten() - 1
        missing = targets[0 if logprobs is None else len(logprobs) :]
        row[missing[(missing >= 0) & (missing < len(row))]] = torch.nan
    return aligned
