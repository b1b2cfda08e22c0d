"""What the settings of a run say: what opens the gap between sampler and trainer, and what is done about it."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rc import schema
from megatron_rc.correction.settings import PRESETS
from megatron_rc.jobs.describe import changed as changed_fields
from megatron_rc.learning_rate.length_decay import LengthDecaySettings
from megatron_rc.learning_rate.mismatch import MismatchSettings
from megatron_rc.report.context import flattened
from megatron_rc.settings.job import JobSettings

NONE = "none"
EXACT = "exact"
"""The mechanism of a run whose sampler has the trainer's weights and precision, and draws as it reports."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The settings of a run that claims and figures speak of."""

    mechanism: str
    """What opens the gap; several are joined by +."""
    strength: str
    """Setting of the mechanism: updates of lag, standard deviation of the noise, hidden temperature or top-p."""
    method: str
    """Preset of the correction, and what it does otherwise than the preset: old log-probs, normalisation."""
    control: str
    """What replaces the weights or the mask of the correction."""
    lr: float
    lr_rule: str
    task: str
    model: str
    """model_type of its config.json."""
    world: str
    """Fingerprint of everything else but the seed: runs of one world differ in what stands above alone."""


ELSEWHERE = (
    *("name", "output", "model.hf_path", "log", "dump", "cluster", "correction", "lr_rule"),
    *(f"train.{n}" for n in ("seed", "dtype", "lr", "control", "asynchronous", "eval_weights")),
    *(f"train.{n}" for n in ("save_interval", "keep_checkpoints", "save_hf", "debug_checks")),
    *(f"train.{n}" for n in ("backend", "keep_sampling_weights", "grad_cosine")),
    *(f"rollout.{n}" for n in ("lag", "amplify", "amplify_fixed", "hidden", "quantize", "dtype")),
    *("moe.replay", "model.config", "warmup.steps"),
)
"""Settings that another field of Facts or the model holds, or that change no number of a run."""


def facts_of(settings: JobSettings, model: Mapping[str, Any]) -> Facts:
    """``model``: the fields of its config.json."""
    gaps = dict(_gaps(settings))
    return Facts(
        mechanism=" + ".join(gaps) or EXACT,
        strength=" + ".join(filter(None, gaps.values())),
        method=_method(settings),
        control=getattr(settings.train, "control", NONE),
        lr=settings.train.lr,
        lr_rule=_lr_rule(settings),
        task=settings.task.kind,
        model=str(model.get("model_type", "")),
        world=_world(settings, model),
    )


def _gaps(settings: JobSettings) -> list[tuple[str, str]]:
    rollout, trainer = settings.rollout, settings.train.dtype
    hidden = rollout.hidden
    every = [
        (rollout.lag > 0, "lag", f"{rollout.lag}"),
        (settings.train.asynchronous > 0, "asynchronous", f"{settings.train.asynchronous}"),
        (rollout.amplify > 0, f"{'fixed' if rollout.amplify_fixed else 'resampled'} noise", f"{rollout.amplify:g}"),
        (hidden.temperature < 1, "hidden low temperature", f"{hidden.temperature:g}"),
        (hidden.temperature > 1, "hidden high temperature", f"{hidden.temperature:g}"),
        (hidden.top_p < 1, "hidden top-p", f"{hidden.top_p:g}"),
        (rollout.quantize != NONE, f"{rollout.quantize} weights", ""),
        ((rollout.dtype, trainer) != ("fp32", "fp32"), f"{rollout.dtype} sampler and {trainer} trainer", ""),
    ]
    return [(name, strength) for active, name, strength in every if active]


def _method(settings: JobSettings) -> str:
    plain = schema.to_dict(settings.correction)
    name = changed_fields(settings.correction).strip("`")
    for preset, each in PRESETS.items():
        other = schema.to_dict(each.correction)
        changed = {field: plain[field] for field in plain if plain[field] != other[field]}
        if changed.keys() <= {"old", "normalize"}:
            name = ", ".join([preset, *(f"{field}: {value}" for field, value in changed.items())])
            if not changed:
                break
    return name if settings.moe.replay == NONE else f"{name} with {settings.moe.replay}"


def _lr_rule(settings: JobSettings) -> str:
    match settings.lr_rule:
        case LengthDecaySettings(decay_period=period):
            return "length decay" if period is None else f"decay period {period}"
        case MismatchSettings(signal=signal, action=action):
            return f"{signal} gate, {action}"  # as the committed results spell it
    return NONE


def _world(settings: JobSettings, model: Mapping[str, Any]) -> str:
    written, default = (dict(flattened(schema.to_dict(each))) for each in (settings, JobSettings()))
    # defaults are left out, so that a setting that is added later changes no fingerprint
    changed = {name: value for name, value in written.items() if value != default.get(name)}
    kept = {k: v for k, v in changed.items() if not any(k == e or k.startswith(f"{e}.") for e in ELSEWHERE)}
    return hashlib.sha256(json.dumps(kept | {"model": dict(model)}, sort_keys=True).encode()).hexdigest()[:6]
