"""The trainer process of verl: it corrects a whole rollout, and changes what the actor's update gets."""

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_rc.correction.correct import correct
from megatron_rc.correction.metrics import MetricSums
from megatron_rc.correction.rejection import Rejection
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.correction.weight import Weight
from megatron_rc.integrations.log_names import PREFIX, checked, measured, prefixed, worth_logging
from megatron_rc.integrations.symbols import Function
from megatron_rc.integrations.verl.refusals import refuse_bypass, refuse_rollout_correction
from megatron_rc.integrations.verl.settings import MODULES, PLUGIN, VARIABLE, VerlPatch
from megatron_rc.learning_rate import scale

WEIGHTS = "rollout_is_weights"

SAME = {
    **{"kl": "k1", "k3_kl": "k3", "training_ppl": "train_ppl", "training_log_ppl": "train_log_ppl"},
    **{name: name for name in ("rollout_ppl", "rollout_log_ppl", "log_ppl_diff", "log_ppl_abs_diff")},
    "rollout_rs_masked_fraction": "masked_token",
}
"""Metric of verl -> ours, of one definition; verl's masked fraction leaves out what a weight of mode mask drops."""


def correct_rollout(original: Function, state: VerlPatch, batch: Any, rollout_corr_config: Any) -> tuple[Any, Any]:
    """In place of the host's function: weights for the whole rollout, 0 at rejected tokens; masks are left alone.

    Turns are the runs of verl's response_mask, in which tool output is 0; padding has none.

    Args:
        batch: verl's DataProto with old_log_probs, rollout_log_probs, response_mask, each [B, R], before advantages; it
            gets rollout_is_weights [B, R] fp32 if the correction has a weight or a rejection.
        rollout_corr_config: algorithm.rollout_correction.

    Raises ValueError if verl corrects too, and as `checked_metrics`.
    """
    refuse_rollout_correction(state, rollout_corr_config)
    data = batch.batch
    train, rollout = data["old_log_probs"].float(), data["rollout_log_probs"].float()
    corrected = correct(train, rollout, data["response_mask"].bool(), correction=state.correction)
    if state.correction.acts:
        data[WEIGHTS] = corrected.weights
        gaps = _gaps(data)
        state.has_gaps = bool(gaps.any())
        if state.has_gaps:
            data["old_log_probs"] = _filled(data, gaps)
    panels = panels_of_verl(original, state.correction, train, rollout, data["response_mask"])
    return batch, {**panels, **checked_metrics(state, corrected.metrics)}


def panels_of_verl(
    original: Function, correction: RolloutCorrection, train: Tensor, rollout: Tensor, mask: Tensor
) -> dict[str, float]:
    """What the host's function logs of the tokens with two finite log-probs; empty where there are none.

    Its weights and masks are thrown away. ``train`` and ``rollout`` are [B, R] nats, ``mask`` is verl's response_mask.
    """
    finite = train.isfinite() & rollout.isfinite()
    counted = mask * finite
    rows = counted.any(-1)  # verl would count a row of padding as a response
    if not rows.any():
        return {}
    given = {"old_log_probs": torch.where(finite, train, 0), "rollout_log_probs": torch.where(finite, rollout, 0)}
    given["response_mask"] = counted
    apart = SimpleNamespace(batch={name: values[rows] for name, values in given.items()})
    apart.union = lambda weights: apart
    metrics: dict[str, float] = original(apart, settings_of_verl(correction))[1]
    return metrics


def settings_of_verl(correction: RolloutCorrection) -> dict[str, Any]:
    """algorithm.rollout_correction of verl with the weight and the gates of a correction, where verl has them."""
    settings: dict[str, Any] = {}
    weight = correction.weight
    if weight and weight == Weight(weight.level, weight.mode, weight.lower, weight.upper):
        bounds = [weight.upper] if weight.mode == "truncate" else [weight.lower, weight.upper]
        of_verl = weight.level in ("token", "sequence") and weight.mode != "clip"
        if of_verl and all(isinstance(bound, int | float) and bound > 0 for bound in bounds):
            settings["rollout_is"] = weight.level
            settings["rollout_is_threshold"] = bounds[0] if len(bounds) == 1 else "{}_{}".format(*bounds)
            settings["rollout_is_batch_normalize"] = correction.normalize == "batch"
    gates = dict(filter(None, map(_rejection_of, correction.reject)))
    if gates:
        settings["rollout_rs"], settings["rollout_rs_threshold"] = map(",".join, (gates, gates.values()))
    return settings


def _rejection_of(gate: Rejection) -> tuple[str, str] | None:
    """Kind and threshold; None for one that verl does not have. Its k1 is that of mu / pi."""
    lower, upper, unit = gate.lower, gate.upper, "token" if gate.level == "token" else f"seq_{gate.reduce}"
    if gate.when != "always" or gate.level == "segment" or upper is None or not 0 < upper < math.inf:
        return None
    if gate.statistic == "ratio" and lower and unit in ("token", "seq_sum", "seq_mean"):
        return f"{unit}_k1", f"{1 / upper}_{1 / lower}"
    if gate.statistic in ("k2", "k3") and lower is None and unit != "seq_min":
        return f"{unit}_{gate.statistic}", str(upper)
    return None


def apply_bypass_mode(original: Function, state: VerlPatch, *args: Any, **kwargs: Any) -> Any:
    """The host's function, which hands log mu over as old log-probs; with other settings nothing would correct."""
    refuse_bypass(state, True)
    return original(*args, **kwargs)


def checked_metrics(state: VerlPatch, sums: MetricSums, *groups: Any) -> dict[str, float]:
    """Metrics for verl's log; ValueError above max_nonfinite_share or max_k3, and a warning where most is dropped."""
    limit = state.settings.max_nonfinite_share
    known = measured(checked(sums, state.correction, state.lost_batch, *groups, max_nonfinite_share=limit))
    return {**names_of_verl(known), **prefixed(worth_logging(known))}


def names_of_verl(values: Mapping[str, float]) -> dict[str, float]:
    """Our metrics under verl's names, where verl defines the same quantity or one that follows from ours.

    verl's chi2 is mean rho^2 - 1 = mean (rho - 1)^2 + 2 (mean rho - 1).
    """
    named = {theirs: values[ours] for theirs, ours in SAME.items() if ours in values}
    for level, mean in (("token", "rho_mean"), ("seq", "seq_rho_mean")):
        if mean in values:
            named[f"chi2_{level}"] = values[f"chi2_{level}"] + 2 * (values[mean] - 1)
    return {f"rollout_corr/{name}": value for name, value in named.items()}


def update_actor_v1(original: Function, state: VerlPatch, trainer: Any, batch: Any, metrics: Any) -> Any:
    """PPOTrainer._update_actor, whose batch is in the TransferQueue."""
    keeps = state.settings.denominator == "kept"
    if keeps or state.has_gaps:
        from verl.trainer.ppo.v1 import trainer_base as v1

        where = {"keys": batch.keys, "partition_id": batch.partition_id}
        logprobs = ["old_log_probs", "rollout_log_probs"] * state.has_gaps
        nested = v1.tq.kv_batch_get(**where, select_fields=["response_mask", WEIGHTS, *logprobs])
        data, changed = nested.to_padded_tensor(), {}
        if keeps:
            changed = dict.fromkeys(("response_mask", "loss_mask"), _kept(data))
        if state.has_gaps:
            changed["old_log_probs"] = _filled(data, _gaps(data))
        fields = {name: v1.response_to_nested(values, nested["response_mask"]) for name, values in changed.items()}
        batch = v1.tq.kv_batch_put(**where, fields=v1.TensorDict(fields, batch_size=len(batch)))
    answer = original(trainer, batch, metrics)
    _check_workers(state, metrics)
    return answer


def update_actor_v0(original: Function, state: VerlPatch, trainer: Any, batch: Any) -> Any:
    """RayPPOTrainer._update_actor, which makes loss_mask of response_mask."""
    if state.settings.denominator == "kept":
        batch.batch["response_mask"] = _kept(batch.batch)
    answer = original(trainer, batch)
    _check_workers(state, answer.meta_info["metrics"])
    return answer


def _kept(data: Any) -> Tensor:
    # a kept weight is at least exp(-log_ratio_bound)
    mask: Tensor = data["response_mask"]
    return torch.where(data[WEIGHTS] > 0, mask, 0)


def _gaps(data: Any) -> Tensor:
    """Marks the dropped tokens without a log-prob of the trainer; their weight 0 times NaN would be NaN."""
    return (data[WEIGHTS] == 0) & ~data["old_log_probs"].isfinite()


def _filled(data: Any, gaps: Tensor) -> Tensor:
    """The trainer's old log-probs, with the sampler's or 0 in the gaps."""
    old, rollout = data["old_log_probs"], data["rollout_log_probs"].to(data["old_log_probs"].dtype)
    return torch.where(gaps, torch.where(rollout.isfinite(), rollout, 0), old)


def _check_workers(state: VerlPatch, metrics: Mapping[str, Any]) -> None:
    """Refuse to go on if the workers run without the plugin, because then nothing of ours acts there."""
    if not state.in_workers:
        return
    wanted = PREFIX if state.lr_rule is None else scale.PREFIX
    if not any(f"actor/{wanted}" in name for name in metrics):
        raise ValueError(
            f"the workers of verl report no {wanted} metrics, so they run without megatron_rc: install it there, and "
            f"hand {VARIABLE} on by +ray_kwargs.ray_init.runtime_env.env_vars (and {MODULES}={PLUGIN}, where the "
            "package has no entry points)"
        )
