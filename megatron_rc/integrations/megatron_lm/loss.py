"""The GRPO loss of megatron/rl with the weights of a rollout correction, and the denominator of a training step."""

from collections.abc import Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from megatron_rc.correction.reference.log_ratio import k3
from megatron_rc.integrations.log_names import prefixed
from megatron_rc.integrations.megatron_lm.rollouts import RolloutRows, corrected_rows
from megatron_rc.integrations.megatron_lm.session import Session
from megatron_rc.integrations.symbols import Function


def calculate_grpo_loss(
    original: Function,
    session: Session,
    current_logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    advantages: Tensor,
    clamp_eps_lower: float,
    clamp_eps_upper: float,
    kl_beta: float,
    entropy_weight: float,
    inference_logprobs: Tensor | None = None,
    is_truncation_coef: float | None = None,
    seq_starts: Sequence[int] | None = None,
    seq_lengths: Sequence[int] | None = None,
) -> tuple[Tensor, ...]:
    """The host's loss, weighted by the tensor that our prepare_data_for_update put into `inference_logprobs`.

    That tensor holds correction weights w, not log-probs; with old="rollout" it holds log mu, and w comes from the
    rejections on pi / mu.

    loss = w PG + kl_beta KL - entropy_weight H. The host's own function computes all three, in two calls: one for KL
    and H, and one for PG alone. In the second call tokens of weight 0 have a ratio of 1, so that a rejected token is
    never infinite or NaN.
    """
    assert session.correction is not None
    if inference_logprobs is None:
        raise ValueError("add --rl-inference-logprobs-is-correction: the loss was given no rollout log-probs")
    weights = inference_logprobs
    session.micro_batch_log = {}
    if session.correction.old == "rollout":
        starts = None if seq_starts is None or seq_lengths is None else [list(seq_starts)[: len(seq_lengths)]]
        known = ~inference_logprobs.isnan()
        # an empty bin counts as one sequence
        of_sequences = advantages if starts is None or starts[0] else advantages.new_zeros(1)
        rows = RolloutRows(old_logprobs, inference_logprobs, torch.ones_like(known), of_sequences, starts)
        current = current_logprobs.detach()
        corrected, weights = corrected_rows(current, rows, session.correction)
        session.micro_batch_log = _two_policy_log(current, inference_logprobs, corrected.mask.view_as(known), known)
        old_logprobs = torch.where(known, inference_logprobs, old_logprobs)
    call = partial(
        original,
        ref_logprobs=ref_logprobs,
        advantages=advantages,
        clamp_eps_lower=clamp_eps_lower,
        clamp_eps_upper=clamp_eps_upper,
        seq_starts=seq_starts,
        seq_lengths=seq_lengths,
    )
    _, kl_term, ratios, entropy_term, above, below = call(
        current_logprobs, old_logprobs, kl_beta=kl_beta, entropy_weight=entropy_weight
    )
    kept = weights > 0
    gradient_term, *_ = call(
        torch.where(kept, current_logprobs, 0), torch.where(kept, old_logprobs, 0), kl_beta=0.0, entropy_weight=0.0
    )
    loss = weights * gradient_term + kl_beta * kl_term - entropy_weight * entropy_term
    return loss, kl_term, ratios, entropy_term, above, below


def _two_policy_log(current: Tensor, rollout: Tensor, kept: Tensor, known: Tensor) -> dict[str, Tensor]:
    log_ratio = torch.where(known, current - rollout, 0)
    tokens = known.sum().float()
    sums = {"current/k3": k3(log_ratio).sum(), "current/masked_token": tokens - kept.sum()}
    return {name: torch.stack([total, tokens]) for name, total in sums.items()}


def train_step(original: Function, session: Session, forward_step_func: Function, *args: Any, **kwargs: Any) -> Any:
    """The host's function, which gives every token of the step the same weight and logs the metrics of the correction.

    The host divides the loss of a micro-batch by the tokens of that micro-batch, then by the number of micro-batches,
    and averages gradients over data-parallel ranks. Our loss function undoes that and divides by the tokens of all
    micro-batches and ranks; with --calculate-per-token-loss the host does so itself.
    """
    from megatron.training.global_vars import get_args

    factor = None if get_args().calculate_per_token_loss else _tokens_to_step(session)

    @wraps(forward_step_func)
    def forward_step(*step_args: Any, **step_kwargs: Any) -> Any:
        output, loss_func = forward_step_func(*step_args, **step_kwargs)
        return output, partial(_logged_loss, loss_func, factor, {**session.rollout_log, **session.micro_batch_log})

    return original(forward_step, *args, **kwargs)


def _tokens_to_step(session: Session) -> Tensor:
    """0-d fp32 factor from the summed loss of a micro-batch to its share of the step, before the host rescales it."""
    from megatron.core import mpu
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    count, ranks = get_num_microbatches(), mpu.get_data_parallel_world_size()
    of_step = [session.tokens[(session.micro_batch + i) % len(session.tokens)] for i in range(count)]
    session.micro_batch += count
    tokens = torch.tensor(float(sum(of_step)), device=torch.cuda.current_device())
    torch.distributed.all_reduce(tokens, group=mpu.get_data_parallel_group())
    return count * ranks / tokens.clamp(min=1)


def _logged_loss(
    loss_func: Function, factor: Tensor | None, pairs: dict[str, Tensor], output_tensor: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    loss, tokens, log = loss_func(output_tensor)
    log = log | prefixed({name: pair.to(loss.device) for name, pair in pairs.items()})
    if factor is None:
        return loss, tokens, log
    # the host divides by this number of tokens
    return loss * factor, torch.ones_like(tokens), log
