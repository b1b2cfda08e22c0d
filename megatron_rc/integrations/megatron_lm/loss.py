"""The GRPO loss of megatron/rl with the weights of a rollout correction, and the denominator of a training step."""

import inspect
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from megatron_rc.correction.reference.log_ratio import k3
from megatron_rc.integrations.log_names import prefixed
from megatron_rc.integrations.megatron_lm.rollouts import RolloutRows, corrected_rows
from megatron_rc.integrations.megatron_lm.session import Session
from megatron_rc.integrations.symbols import Function


def calculate_grpo_loss(original: Function, session: Session, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """The host's loss, weighted by the tensor that our prepare_data_for_update put into `inference_logprobs`.

    That tensor holds correction weights w, not log-probs; with old="rollout" it holds log mu, and w comes from the
    rejections on pi / mu.

    loss = w PG + kl_beta KL - entropy_weight H. The host's own function computes all three, in two calls: one for KL
    and H, and one for PG alone. In the second call tokens of weight 0 have a ratio of 1, so that a rejected token is
    never infinite or NaN.
    """
    assert session.correction is not None
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    sampled, _ = given.pop("inference_logprobs", None), given.pop("is_truncation_coef", None)
    if sampled is None:
        raise ValueError("add --rl-inference-logprobs-is-correction: the loss was given no rollout log-probs")
    current, old, weights = given.pop("current_logprobs"), given.pop("old_logprobs"), sampled
    kl_beta, entropy_weight = given.pop("kl_beta"), given.pop("entropy_weight")
    session.micro_batch_log = {}
    if session.correction.old == "rollout":
        of_bin, lengths, advantages = given.get("seq_starts"), given.get("seq_lengths"), given["advantages"]
        starts = None if of_bin is None or lengths is None else [list(of_bin)[: len(lengths)]]
        known = ~sampled.isnan()
        # an empty bin counts as one sequence
        of_sequences = advantages if starts is None or starts[0] else advantages.new_zeros(1)
        rows = RolloutRows(old, sampled, torch.ones_like(known), of_sequences, starts)
        corrected, weights = corrected_rows(current.detach(), rows, session.correction)
        log_ratio, tokens = torch.where(known, current.detach() - sampled, 0), known.sum().float()
        sums = {"current/k3": k3(log_ratio).sum(), "current/masked_token": tokens - corrected.mask.sum()}
        session.micro_batch_log = {name: torch.stack([total, tokens]) for name, total in sums.items()}
        old = torch.where(known, sampled, old)
    call = partial(original, **given)
    whole, kl_term, ratios, entropy_term, above, below = call(
        current, old, kl_beta=kl_beta, entropy_weight=entropy_weight
    )
    kept = weights > 0
    gradient_term, *_ = call(torch.where(kept, current, 0), torch.where(kept, old, 0), kl_beta=0.0, entropy_weight=0.0)
    others = kl_beta * kl_term - entropy_weight * entropy_term
    if not session.compared:
        session.compared = True
        # it waits for the device, once in a run
        parts, of_host = (gradient_term + others)[kept], whole.expand_as(kept)[kept]
        if not torch.allclose(parts, of_host, rtol=1e-5, atol=1e-6, equal_nan=True):
            raise ValueError(
                "calculate_grpo_loss of this Megatron-LM has other terms than policy gradient, KL and entropy, which a "
                "correction would drop; nothing was updated"
            )
    return weights * gradient_term + others, kl_term, ratios, entropy_term, above, below


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
