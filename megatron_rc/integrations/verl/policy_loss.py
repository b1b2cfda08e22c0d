"""loss_mode=megatron_rc: a loss of verl with the weights of the correction, or corrected in the worker itself."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rc.correction.correct import correct
from megatron_rc.integrations.symbols import Function
from megatron_rc.integrations.verl.settings import LOSS_MODE, MODULES, PLUGIN, VARIABLE, VerlPatch

Answer = tuple[Tensor, dict[str, Any]]
Loss = Callable[["Given"], Answer]


class Given(NamedTuple):
    """What verl passes to a policy loss; tensors are [b, R], fp32."""

    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    response_mask: Tensor
    loss_agg_mode: str = "token-mean"
    config: Any = None
    rollout_is_weights: Tensor | None = None


def get_policy_loss_fn(original: Function, state: VerlPatch, name: str) -> Any:
    """The host's function, which also knows loss_mode=megatron_rc."""
    if name != LOSS_MODE:
        return original(name)
    inner = partial(_compared, state, original(state.settings.inner))
    corrected = corrected_by_the_worker if state.by_the_loss else corrected_by_the_driver
    return lambda *args, **kwargs: corrected(state, inner, Given(*args, **kwargs))


def _compared(state: VerlPatch, inner: Function, given: Given) -> Answer:
    """(loss, metrics) of `inner`: L, L and 2 L for no weights, ones and twos on the first batch that has weights."""
    weights = given.rollout_is_weights
    if weights is not None and not state.compared:
        state.compared = True
        frozen = Given._make(value.detach() if isinstance(value, Tensor) else value for value in given)
        device = weights.device
        losses = []
        for factor in (None, 1.0, 2.0):
            # some losses of verl draw tokens at random
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                constant = None if factor is None else torch.full_like(weights, factor)
                losses.append(inner(**frozen._replace(rollout_is_weights=constant)._asdict())[0])
        plain, ones, twos = losses
        if not torch.allclose(torch.stack([plain, 2 * plain]), torch.stack([ones, twos]), 0, 0, equal_nan=True):
            raise ValueError(
                f"loss_mode {state.settings.inner!r} of this verl does not multiply rollout_is_weights into its loss: "
                f"{plain:.6g} without weights, {ones:.6g} with ones and {twos:.6g} with twos; nothing was updated"
            )
    loss, metrics = inner(**given._asdict())
    return loss, metrics


def corrected_by_the_driver(state: VerlPatch, inner: Loss, given: Given) -> Answer:
    """The loss `inner` times the weights of the trainer process; a rejected token with a NaN log-prob adds nothing."""
    weights = given.rollout_is_weights
    if weights is None:
        if state.correction.acts:
            raise ValueError(
                f"loss_mode={LOSS_MODE} has no weights: the trainer process of verl has not corrected the rollout. Set "
                f"{VARIABLE} there too (and {MODULES}={PLUGIN}, where the package has no entry points)"
            )
        return inner(given)
    return inner(_finite(given, given.response_mask & (weights > 0)))


def corrected_by_the_worker(state: VerlPatch, inner: Loss, given: Given) -> Answer:
    """The loss on pi / mu itself, for old "rollout": verl's bypass_mode hands over log mu as old log-probs.

    Sequences are whole in a micro-batch, so every gate sees its unit whole, however verl cuts the batch. Rejected
    tokens add nothing and stay in the denominator, which verl counted before. With surrogate reinforce the loss is
    -w A log pi, aggregated as verl aggregates. Metrics come from the worker after the update.
    """
    from verl.trainer.ppo.core_algos import agg_loss

    train, rollout, mask = given.log_prob.detach(), given.old_log_prob, given.response_mask
    corrected = correct(train, rollout, mask, correction=state.correction, advantages=given.advantages)
    state.sums = [state.sums[0].merge(corrected.metrics) if state.sums else corrected.metrics]
    given = _finite(given, corrected.mask)
    if state.settings.surrogate == "ppo":
        return inner(given._replace(rollout_is_weights=corrected.weights if state.correction.acts else None))
    losses = -corrected.weights * given.advantages * given.log_prob
    loss = agg_loss(losses, given.response_mask, given.loss_agg_mode, **given.config.global_batch_info)
    return loss, {}


def _finite(given: Given, counted: Tensor) -> Given:
    """Both log-probs with 0 where a token does not count and either is not finite: 0 times NaN is NaN."""
    old, current = given.old_log_prob, given.log_prob
    sound = counted | (old.isfinite() & current.detach().isfinite())
    return given._replace(old_log_prob=torch.where(sound, old, 0), log_prob=torch.where(sound, current, 0))
