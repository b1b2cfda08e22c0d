"""correct_micro_batch: the call that a patched program makes in its own loss function."""

from torch import Tensor

from megatron_rc.correction.correct import Corrected, correct
from megatron_rc.correction.inputs import Extras
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.integrations.installed import session_of
from megatron_rc.integrations.megatron_training.flag_rules import NAME
from megatron_rc.integrations.parallel import parallel


def correct_micro_batch(
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    segment_ids: Tensor | None = None,
    num_segments: int | None = None,
    advantages: Tensor | None = None,
    mean_k3: Tensor | None = None,
    response_lengths: Tensor | None = None,
    truncated: Tensor | None = None,
    new_rollout: bool = True,
    backend: str = "auto",
) -> Corrected:
    """`correct` for the loss function of a forward_step: with the correction of `patch("megatron-training")`.

    Inside a training step, metrics and response lengths are kept. After the last micro-batch and before the optimizer
    step they are pooled over micro-batches and data-parallel ranks; the length decay advances by one rollout, and the
    metrics join Megatron's log. Without the patch nothing is kept, and the correction is "none": all weights are 1.

    Args:
        train_logprobs, rollout_logprobs, loss_mask, cu_seqlens, segment_ids, num_segments, advantages, backend: as in
            `correct`; under context parallelism this rank's slice.
        mean_k3: as in `Extras`; required by the gate "standardized", for which the metric mean_k3 of an earlier
            rollout may serve.
        response_lengths: [S], tokens of every response that was sampled, before any was filtered out of the batch;
            None: the loss tokens of this batch.
        truncated: [S], bool, whether each of those responses was cut off at the length limit; it lets the length decay
            see a surge into that limit.
        new_rollout: False in the second and later optimizer steps of one rollout, whose lengths are known already.

    Returns:
        Corrected. Its metrics are those of the micro-batch.

    Raises:
        ValueError: as `correct`; the gate "standardized" without mean_k3.
    """
    state = session_of(NAME)
    correction = state.correction if state else RolloutCorrection()
    if mean_k3 is None:
        correction.check_one_micro_batch("correct_micro_batch")
    ranks = parallel()
    corrected = correct(
        train_logprobs,
        rollout_logprobs,
        loss_mask,
        correction=correction,
        cu_seqlens=cu_seqlens,
        segment_ids=segment_ids,
        num_segments=num_segments,
        advantages=advantages,
        extras=Extras(mean_k3=mean_k3),
        cp_group=ranks.cp_group if ranks.cp_size > 1 else None,
        backend=backend,
    )
    if state is not None and state.step is not None:
        state.step.take(corrected.metrics, response_lengths, truncated, new_rollout)
    return corrected
