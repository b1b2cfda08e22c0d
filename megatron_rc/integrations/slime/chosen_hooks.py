"""Which hooks of slime or miles the settings need, and what those cannot do: one refusal for `enable` and doctor."""

from collections.abc import Mapping
from typing import Any

from megatron_rc import schema
from megatron_rc.correction.settings import STANDARDIZED, STATISTICS, RolloutCorrection
from megatron_rc.integrations.flag_rules import refuse_correction, refuse_first, refused
from megatron_rc.integrations.scheduler_rule import settings_of
from megatron_rc.integrations.slime.settings import ENABLE, KEY, ROUTE_SHIFT, SLIME, SlimeSettings, names, naming, read
from megatron_rc.integrations.symbols import Recipe
from megatron_rc.learning_rate.rule import LRRule, by_length, by_mismatch
from megatron_rc.loss.options import check_surrogate


def recipe(correction: RolloutCorrection | None, lr_rule: LRRule | None, *, host: str) -> Recipe:
    """Flags and YAML for a correction and a rule of the learning rate; raises as `hooks_for`."""
    rule = settings_of(lr_rule, "into a YAML file")
    hooks_for(SlimeSettings(correction=correction or RolloutCorrection(), lr_rule=rule), host)
    fields: dict[str, object] = {} if correction is None else {"correction": correction.to_dict()}
    fields |= {} if rule is None else {"lr_rule": schema.to_dict(rule)}
    return Recipe(["--custom-config-path rc.yaml", ENABLE], {KEY: fields})


def hooks_for(settings: SlimeSettings, host: str, *, restarts: bool = False) -> list[str]:
    """The simplest hooks that can do it, the one that corrects first; ValueError where the host has none.

    ``restarts``: whether the training processes are new for every rollout.
    """
    correction, rule = settings.correction, settings.lr_rule
    # what must change for hooks that see one micro-batch
    changes = {
        "normalize must be 'none'": correction.normalize == "batch",
        "max_k3 must be unset": correction.max_k3 is not None,
        "reject must not use 'standardized'": correction.judges(STANDARDIZED),
        "max_nonfinite_share must be unset": settings.max_nonfinite_share is not None,
        "signal of lr_rule must be 'length'": by_mismatch(rule),
        # the lengths that hooks of the loss record for the next rollout are lost
        "lr_rule must have decay_period under --release-train": restarts and by_length(rule),
        # only slime's metrics of a rollout have a place for them
        "routes must be false": settings.routes and host == SLIME,
    }
    whole = [change for change, needed in changes.items() if needed]
    if whole and (host, correction.old) != (SLIME, "recompute"):
        raise ValueError(
            f"{whole[0]} with {host} and old {correction.old!r}: it needs old 'recompute', and a hook that sees a "
            "whole rollout before its update, which slime has"
        )
    # tis keeps the host's own loss; beside rollout_data it only reports, because with one train step per rollout slime
    # leaves the old log-probs out unless it has metrics to compute
    hooks = ["rollout_data", "tis"] if whole else ["loss"] if needs_loss(settings) else ["tis"]
    hooks += ["before_train_step"] * (rule is not None or (settings.routes and not whole))
    return hooks + ["before_log_prob"] * settings.routes + ["pg_loss_reducer"] * (settings.aggregation is not None)


def needs_loss(settings: SlimeSettings) -> str:
    """Why the loss of this package replaces the host's; "" where it does not."""
    if settings.correction.old != "recompute":
        return f"old is {settings.correction.old!r}"
    if any(rejection.reads_advantages for rejection in settings.correction.reject):
        return "a rejection reads advantages"
    return "inplace_backward is true" if settings.inplace_backward else ""


_SWITCHES: dict[str, dict[str, Any]] = {
    "tis": {"use_tis": True}, "loss": {"loss_type": "custom_loss"}, "rollout_data": {"get_mismatch_metrics": True},
}  # fmt: skip
"""Hook that corrects -> the host's arguments under which it is called."""


def assignments(args: Any, host: str) -> dict[str, Any]:
    """What `enable` sets, from arguments with defaults: argument -> value; ValueError where it must not set them."""
    settings = read(args)
    hooks = hooks_for(settings, host, restarts=args.release_train)
    old = {"use_rollout_logprobs": True} if settings.correction.old == "rollout" else {}
    values = naming(*hooks) | _SWITCHES[hooks[0]] | old
    _refuse(args, settings, hooks, values)
    return values


def _refuse(args: Any, settings: SlimeSettings, hooks: list[str], values: Mapping[str, Any]) -> None:
    correction, rule = settings.correction, settings.lr_rule
    upper, lower = getattr(args, "tis_clip", 2.0), getattr(args, "tis_clip_low", 0.0)
    theirs = f"mode: clip, lower: {lower}, upper: {upper}" if lower else f"upper: {upper}"
    statistics = (*STATISTICS, *[ROUTE_SHIFT] * settings.routes)
    ours = f"with the loss of {KEY}, taken because {needs_loss(settings)}"
    reducer, per_token = args.custom_pg_loss_reducer_function_path, settings.aggregation == "token-mean"
    by_loss, cut = "loss" in hooks, args.context_parallel_size > 1
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    steps = args.num_steps_per_rollout or max(1, samples // (args.global_batch_size or samples))
    refuse_first(
        # with a critic and a correction the driver of train_async.py reads the argument before `enable` runs
        (args.use_tis and not names(args, "tis") and not (args.use_critic and correction.acts),
         f"--use-tis must be unset with enable, which replaces its weights: {KEY}.correction.weight: {{{theirs}}} has "
         "the same ones"),
        *((given not in (None, False, value) and (name, given) != ("loss_type", "policy_loss"),
           f"--{name.replace('_', '-')} must be unset with enable, which sets it to {value}, got {given}")
          for name, value in values.items() for given in [getattr(args, name, None)]),
        (args.use_rollout_logprobs and correction.old != "rollout",
         "--use-rollout-logprobs must be unset with enable unless megatron_rc.correction.old is 'rollout': the ratio "
         "of the loss already is pi / mu"),
        # a critic keeps its own loss
        ("tis" in hooks and args.loss_type not in ("policy_loss", "value_loss"),
         f"--loss-type must be policy_loss with enable, got {args.loss_type}: tis is called by no other loss"),
        (found := refused(refuse_correction, correction, "a hook", statistics), f"{KEY}.correction: {found}"),
        (args.train_backend != "megatron", f"--train-backend must be megatron, got {args.train_backend}"),
        (by_loss and (found := refused(check_surrogate, "ppo", correction)), found),
        (by_loss and args.advantage_estimator in ("gspo", "cispo"),
         f"--advantage-estimator must not be {args.advantage_estimator} {ours}, which is PPO over tokens"),
        (by_loss and args.allgather_cp and cut, f"--allgather-cp must be off {ours}, which reads zigzag slices"),
        (by_loss and args.true_on_policy_mode,
         f"--true-on-policy-mode must be off {ours}: there the host scores as its sampler does, and this loss in fp32"),
        (by_loss and args.use_opsm,
         f"--use-opsm must be off {ours}: set megatron_rc.correction to the preset off-policy-sequence-mask"),
        (by_loss and reducer is not None and not names(args, "pg_loss_reducer") and settings.aggregation is None,
         f"--custom-pg-loss-reducer-function-path must be unset {ours}, which does not call it"),
        (correction.old == "current" and steps > 1,
         "megatron_rc.correction.old must not be 'current' with more than one train step per rollout "
         f"(--num-steps-per-rollout, --global-batch-size), got {steps} of them"),
        (args.skip_actor_forward_only and not {"loss", "before_train_step"}.isdisjoint(hooks),
         "--skip-actor-forward-only must be off: under it miles takes neither another loss nor a hook before the train "
         "step"),
        (settings.aggregation and bool(args.calculate_per_token_loss) != per_token,
         "--calculate-per-token-loss must be set exactly when megatron_rc.aggregation is 'token-mean', got "
         f"{settings.aggregation!r}"),
        (settings.aggregation and cut and args.qkv_format == "bshd",
         "--qkv-format must be thd for megatron_rc.aggregation with context parallelism: its hook does not get the "
         "padded lengths"),
        (rule is not None and args.no_save_optim,
         "megatron_rc.lr_rule must be unset with --no-save-optim, whose checkpoints hold no state of it"),
        (rule is not None and args.indep_dp,
         "megatron_rc.lr_rule must be unset with --indep-dp: its replicas share no process group"),
        (settings.routes and not args.use_rollout_routing_replay,
         "megatron_rc.routes needs --use-rollout-routing-replay: without it the host has no routes of the sampler"),
        (settings.routes and correction.old != "recompute",
         "megatron_rc.correction.old must be 'recompute' with megatron_rc.routes, which watches the pass over the old "
         f"log-probs, got {correction.old!r}"),
        (settings.routes and ((args.allgather_cp and cut) or args.qkv_format == "bshd"
                              or args.moe_expert_capacity_factor is not None),
         "megatron_rc.routes needs packed zigzag slices in which every token keeps its experts: drop --allgather-cp, "
         "--qkv-format bshd and --moe-expert-capacity-factor"),
        (settings.routes and "rollout_data" not in hooks and args.recompute_loss_function,
         "megatron_rc.routes needs the update to see every micro-batch once: drop --recompute-loss-function"),
    )  # fmt: skip
