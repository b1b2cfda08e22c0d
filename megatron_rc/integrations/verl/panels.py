"""The panels that verl's own function fills: it runs beside ours, with what it shares of the correction."""

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_rc.correction.rejection import Rejection
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.correction.weight import Weight
from megatron_rc.integrations.symbols import Function


def panels_of_verl(
    original: Function, correction: RolloutCorrection, train: Tensor, rollout: Tensor, mask: Tensor
) -> dict[str, float]:
    """What the host's function logs of the tokens with two finite log-probs; empty where there are none.

    Args:
        original: compute_rollout_correction_and_add_to_batch; its weights and masks are thrown away.
        train, rollout: [B, R] nats.
        mask: [B, R] verl's response_mask.
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
