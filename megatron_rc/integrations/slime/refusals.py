"""What a hook of slime or miles cannot do; each refusal names the flag or field to change."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron_rc.config import STATISTICS
from megatron_rc.integrations.slime.settings import SlimeSettings, flag, in_advantages, names, read


def check(args: Namespace) -> None:
    """Refuse what the hooks named in ``args`` cannot do, before the model is built.

    Raises:
        ValueError: one sentence naming what to change.
    """
    settings = read(args)
    for hook, refuse in _REFUSALS.items():
        if names(args, hook):
            refuse(args, settings)
    correction = settings.correction
    acts = correction.weight is not None or correction.reject
    applied = (
        names(args, "rollout_data")
        or (names(args, "tis") and _get(args, "use_tis", False))
        or (names(args, "loss") and _get(args, "loss_type") == "custom_loss")
    )
    if acts and not applied:
        raise ValueError(
            f"megatron_rc.correction needs a hook that applies it: set --use-tis {flag('tis')}, "
            f"or --loss-type custom_loss {flag('loss')}, or {flag('rollout_data')}"
        )
    if settings.lr_decay is not None and not names(args, "before_train_step"):
        raise ValueError(f"megatron_rc.lr_decay needs the hook that steps it: set {flag('before_train_step')}")


def refuse_tis(args: Namespace, settings: SlimeSettings) -> None:
    """tis sees the log-probs of one micro-batch, old and rollout, and neither advantages nor current log-probs."""
    _refuse_always(args, settings)
    if settings.correction.old != "recompute":
        raise ValueError(
            f"megatron_rc.correction.old must be 'recompute' for tis, which sees no current log-probs, got "
            f"{settings.correction.old!r}: use --loss-type custom_loss {flag('loss')}"
        )
    if in_advantages(args, settings):
        return
    _refuse_batch_mean(settings)
    if any(rejection.when == "negative_advantage" for rejection in settings.correction.reject):
        raise ValueError(
            "megatron_rc.correction must not reject by when='negative_advantage' in tis, which sees no advantages: "
            f"use --loss-type custom_loss {flag('loss')}, or {flag('rollout_data')}"
        )


def refuse_loss(args: Namespace, settings: SlimeSettings) -> None:
    """loss sees all data of one micro-batch, and is the PPO loss over tokens."""
    _refuse_always(args, settings)
    correction, by_tis = settings.correction, f"the host's own loss with --use-tis {flag('tis')} has it"
    if not in_advantages(args, settings):
        _refuse_batch_mean(settings)
    correction.check_surrogate("ppo")
    estimator = _get(args, "advantage_estimator")
    if estimator in ("gspo", "cispo"):
        raise ValueError(f"--advantage-estimator must not be {estimator} for loss, which is PPO over tokens; {by_tis}")
    if _get(args, "allgather_cp", False) and _get(args, "context_parallel_size", 1) > 1:
        raise ValueError(f"--allgather-cp must be off for loss, which reads zigzag slices; {by_tis}")
    if _get(args, "use_opsm", False):
        raise ValueError(
            "--use-opsm must be off for loss: set megatron_rc.correction to the preset off-policy-sequence-mask"
        )
    if _get(args, "use_tis", False):
        raise ValueError("--use-tis must be off for loss, which applies megatron_rc.correction itself")
    if bool(_get(args, "use_rollout_logprobs", False)) != (correction.old == "rollout"):
        raise ValueError(
            "--use-rollout-logprobs must be set exactly when megatron_rc.correction.old is 'rollout', "
            f"got old={correction.old!r}"
        )
    if correction.old == "current" and _steps_per_rollout(args) > 1:
        raise ValueError(
            "megatron_rc.correction.old must not be 'current' with more than one train step per rollout "
            f"(--num-steps-per-rollout, --global-batch-size), got {_steps_per_rollout(args)} of them"
        )
    if _get(args, "custom_pg_loss_reducer_function_path") is not None and not names(args, "pg_loss_reducer"):
        raise ValueError(f"loss takes no reducer but its own: unset it, or set {flag('pg_loss_reducer')}")


def refuse_pg_loss_reducer(args: Namespace, settings: SlimeSettings) -> None:
    """The host divides the reducer's result by rollouts, or with --calculate-per-token-loss by tokens."""
    if settings.aggregation is None:
        raise ValueError("megatron_rc.aggregation must be set for pg_loss_reducer")
    per_token = bool(_get(args, "calculate_per_token_loss", False))
    if per_token != (settings.aggregation == "token-mean"):
        raise ValueError(
            "--calculate-per-token-loss must be set exactly when megatron_rc.aggregation is 'token-mean', "
            f"got {settings.aggregation!r}"
        )


def refuse_rollout_data(args: Namespace, settings: SlimeSettings) -> None:
    """rollout_data sees the whole rollout before its update."""
    _refuse_always(args, settings)
    if settings.correction.old != "recompute":
        if not names(args, "loss"):
            raise ValueError(
                f"megatron_rc.correction.old must be 'recompute' for rollout_data, which runs before the update, got "
                f"{settings.correction.old!r}: use --loss-type custom_loss {flag('loss')}"
            )
        return
    if _get(args, "use_rollout_logprobs", False):
        raise ValueError(
            "--use-rollout-logprobs must be off for rollout_data: the ratio of the loss already is pi / mu, and the "
            "weights in the advantages would count it twice"
        )
    if _get(args, "use_tis", False) and not names(args, "tis"):
        raise ValueError(
            "--use-tis must be off with rollout_data, whose weights already are in the advantages "
            f"({flag('tis')} may stay: it then only reports)"
        )


def refuse_before_train_step(args: Namespace, settings: SlimeSettings) -> None:
    """before_train_step needs a decay, and lengths from another hook unless its period is fixed."""
    if settings.lr_decay is None:
        raise ValueError("megatron_rc.lr_decay must be set for before_train_step; {} takes every default")
    sources = [hook for hook in ("rollout_data", "tis", "loss", "pg_loss_reducer") if names(args, hook)]
    if settings.lr_decay.decay_period is None and not sources:
        raise ValueError(
            "megatron_rc.lr_decay.decay_period must be set where no hook sees response lengths: or set "
            f"{flag('rollout_data')} (slime), {flag('pg_loss_reducer')}, or another of these hooks"
        )
    if _get(args, "indep_dp", False):
        raise ValueError("megatron_rc.lr_decay must be unset with --indep-dp: its replicas share no process group")


_REFUSALS = {
    "tis": refuse_tis,
    "loss": refuse_loss,
    "pg_loss_reducer": refuse_pg_loss_reducer,
    "rollout_data": refuse_rollout_data,
    "before_train_step": refuse_before_train_step,
}


def _refuse_always(args: Namespace, settings: SlimeSettings) -> None:
    backend = _get(args, "train_backend", "megatron")
    if backend != "megatron":
        raise ValueError(f"--train-backend must be megatron, got {backend}")
    top_k = _get(args, "rollout_top_k", -1)
    if top_k not in (None, -1, 0):
        raise ValueError(
            f"--rollout-top-k must be -1, got {top_k}: no kept ids are recorded for it, so pi and mu would be "
            "normalised over different sets"
        )
    for rejection in settings.correction.reject:
        if rejection.statistic not in STATISTICS:
            raise ValueError(
                f"megatron_rc.correction must reject by one of {', '.join(STATISTICS)}, which are all that a hook "
                f"computes, got {rejection.statistic!r}"
            )


def _refuse_batch_mean(settings: SlimeSettings) -> None:
    if settings.correction.normalize == "batch":
        raise ValueError(
            "megatron_rc.correction.normalize must be 'none' in a hook that sees one micro-batch: slime's "
            f"{flag('rollout_data')} sees the whole rollout (miles has no such hook)"
        )


def _steps_per_rollout(args: Namespace) -> int:
    samples = _get(args, "rollout_batch_size", 1) * _get(args, "n_samples_per_prompt", 1)
    return _get(args, "num_steps_per_rollout") or max(1, samples // (_get(args, "global_batch_size") or samples))


def _get(args: Namespace, name: str, default: Any = None) -> Any:
    # the two hosts do not have the same arguments
    return getattr(args, name, default)
