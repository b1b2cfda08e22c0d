"""loss_mode=megatron_rc: a loss of verl with the weights of the correction, or corrected in the worker itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rc.correction import correct
from megatron_rc.integrations.symbols import Function
from megatron_rc.integrations.verl.settings import LOSS_MODE, MODULES, PLUGIN, VARIABLE, VerlPatch

Answer = tuple[Tensor, dict[str, Any]]


def get_policy_loss_fn(original: Function, state: VerlPatch, name: str) -> Any:
    """The host's function, which knows one loss more."""
    if name != LOSS_MODE:
        return original(name)
    corrected = corrected_by_the_worker if state.by_the_loss else corrected_by_the_driver
    return partial(corrected, state, original(state.settings.inner))


def corrected_by_the_driver(
    state: VerlPatch,
    inner: Function,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Answer:
    """The loss `inner` times the weights of the trainer process; a rejected token with a NaN log-prob adds nothing.

    Args:
        state: the patch.
        inner: a policy loss of verl.
        old_log_prob, log_prob, advantages, response_mask, rollout_is_weights: [b, R], fp32; as verl passes them.
        loss_agg_mode, config: verl's.

    Returns:
        (loss, metrics), as `inner`.

    Raises:
        ValueError: the correction acts, and the trainer process has not computed its weights.
    """
    if state.acts and rollout_is_weights is None:
        raise ValueError(
            f"loss_mode={LOSS_MODE} has no weights: the trainer process of verl has not corrected the rollout. Set "
            f"{VARIABLE} there too (and {MODULES}={PLUGIN}, where the package has no entry points)"
        )
    if rollout_is_weights is not None:
        old_log_prob, log_prob = _finite(old_log_prob, log_prob, response_mask & (rollout_is_weights > 0))
    return _call(inner, old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)


def corrected_by_the_worker(
    state: VerlPatch,
    inner: Function,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Answer:
    """The loss on pi / mu itself, for old "rollout": verl's bypass_mode hands over log mu as old log-probs.

    Sequences are whole in a micro-batch, so every gate sees its unit whole, however verl cuts the batch. Rejected
    tokens add nothing and stay in the denominator, which verl counted before. With surrogate reinforce the loss is
    -w A log pi, aggregated as verl aggregates.

    Args, Returns:
        As `corrected_by_the_driver`; old_log_prob is log mu, and metrics come from the worker after the update.
    """
    from verl.trainer.ppo.core_algos import agg_loss

    corrected = correct(
        log_prob.detach(), old_log_prob, response_mask, correction=state.correction, advantages=advantages
    )
    state.sums = [state.sums[0].merge(corrected.metrics) if state.sums else corrected.metrics]
    old_log_prob, log_prob = _finite(old_log_prob, log_prob, corrected.mask)
    if state.settings.surrogate == "ppo":
        weights = corrected.weights if state.acts else None
        return _call(inner, old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, weights)
    losses = -corrected.weights * advantages * log_prob
    loss = agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info)
    return loss, {}


def _finite(old: Tensor, current: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Both log-probs with 0 where a token does not count and either is not finite: 0 times NaN is NaN."""
    sound = counted | (old.isfinite() & current.detach().isfinite())
    return torch.where(sound, old, 0), torch.where(sound, current, 0)


def _call(
    inner: Function,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: Any,
    weights: Tensor | None,
) -> Answer:
    loss, metrics = inner(
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=response_mask,
        loss_agg_mode=loss_agg_mode,
        config=config,
        rollout_is_weights=weights,
    )
    return loss, metrics
