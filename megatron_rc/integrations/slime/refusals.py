"""What a hook of slime or miles cannot do: one rule per mistake, refused by the hook and found by doctor beforehand."""

from collections.abc import Mapping
from typing import Any

from megatron_rc.correction.settings import STATISTICS, RolloutCorrection
from megatron_rc.integrations.facts import Facts, narrowed_by, rules_of
from megatron_rc.integrations.flag_rules import FlagRule, refuse_correction, refused
from megatron_rc.integrations.slime.settings import (
    ROUTE_SHIFT,
    SlimeSettings,
    flag,
    in_advantages,
    judges_advantages,
    names,
    read,
    whole_rollout_settings,
)
from megatron_rc.learning_rate.rule import RULES, by_length, by_mismatch
from megatron_rc.loss.options import check_surrogate

_BY_LOSS = f"--loss-type custom_loss {flag('loss')}"
_BY_TIS = f"Use the host's own loss with --use-tis {flag('tis')}."
_WHOLE = f"slime's {flag('rollout_data')}, which sees the whole rollout (miles has no such hook)"


class Given:
    """The arguments of a host, with our settings among them, and with the values that `enable` will set."""

    def __init__(self, args: Any, values: Mapping[str, Any] | None = None) -> None:
        self._args, self._values = args, values or {}

    def __getattr__(self, name: str) -> Any:
        return self._values[name] if name in self._values else getattr(self._args, name)

    @property
    def settings(self) -> SlimeSettings:
        return read(self._args)

    @property
    def correction(self) -> RolloutCorrection:
        return self.settings.correction


def _steps_per_rollout(args: Any) -> int:
    samples: int = args.rollout_batch_size * args.n_samples_per_prompt
    return args.num_steps_per_rollout or max(1, samples // (args.global_batch_size or samples))


def _is_unapplied(args: Any) -> bool:
    """Whether the settings have a weight or a rejection, and no hook that is named and called applies it."""
    acts = args.correction.acts
    by_tis = names(args, "tis") and args.use_tis
    by_loss = names(args, "loss") and args.loss_type == "custom_loss"
    return acts and not (names(args, "rollout_data") or by_tis or by_loss)


def _leaves_log_probs_out(args: Any) -> bool:
    """Whether slime computes no log-probs before the update: the loss of its only train step has them."""
    if args.use_rollout_logprobs:
        return not args.get_mismatch_metrics
    records_routes = args.use_routing_replay and not args.use_rollout_routing_replay
    needs_them = (args.get_mismatch_metrics, args.use_critic, args.keep_old_actor, args.use_opd, records_routes)
    reused = args.loss_type == "policy_loss" and args.kl_coef == 0 and args.advantage_estimator != "gspo"
    return _steps_per_rollout(args) == 1 and reused and not any(needs_them)


(TOP_K,) = rules_of(Facts(narrowed=narrowed_by("--rollout-top-k")))
(MILES_TOP_P,) = rules_of(Facts(narrowed=narrowed_by("--rollout-top-p", "--rollout-top-k")))
"""miles records no kept ids for top-p either."""
_ALWAYS = (
    FlagRule("hook-train-backend", lambda args: args.train_backend != "megatron",
        "--train-backend must be megatron, got {args.train_backend}", "Set --train-backend megatron."),
    TOP_K,
    FlagRule("hook-correction",
        lambda args: refused(
            refuse_correction, args.correction, "a hook", (*STATISTICS, *[ROUTE_SHIFT] * args.settings.routes)
        ),
        "megatron_rc.correction: {found}",
        "Use another correction (route_shift needs megatron_rc.routes), or the host's own loss of that name."),
)  # fmt: skip
_ONE_MICRO_BATCH = FlagRule("hook-micro-batch",
    lambda args: not in_advantages(args, args.settings) and whole_rollout_settings(args.correction),
    "megatron_rc.correction.{found} in a hook that sees one micro-batch, which is less than the batch",
    f"Change it, or add {_WHOLE}.")  # fmt: skip
_DOUBLE_RATIO = FlagRule("hook-double-ratio", lambda args: refused(check_surrogate, "ppo", args.correction), "{found}",
    "Set megatron_rc.correction.weight to null, or old to 'recompute'.")  # fmt: skip
_ROUTES = (
    FlagRule("routes-off", lambda args: not args.settings.routes,
        "megatron_rc.routes must be true for before_log_prob", "Set megatron_rc.routes: true."),
    FlagRule("routes-not-replayed", lambda args: not args.use_rollout_routing_replay,
        "megatron_rc.routes needs --use-rollout-routing-replay: without it the host has no routes of the sampler",
        "Add --use-rollout-routing-replay, or drop megatron_rc.routes."),
    FlagRule("routes-old", lambda args: args.correction.old != "recompute",
        "megatron_rc.correction.old must be 'recompute' with megatron_rc.routes, which watches the pass over the old "
        "log-probs, got {args.correction.old!r}",
        "Set old to 'recompute', or drop megatron_rc.routes."),
    FlagRule("routes-layout", lambda args: (args.allgather_cp and args.context_parallel_size > 1)
        or args.qkv_format == "bshd" or args.moe_expert_capacity_factor is not None,
        "megatron_rc.routes needs packed zigzag slices in which every token keeps its experts",
        "Drop --allgather-cp, --qkv-format bshd and --moe-expert-capacity-factor, or megatron_rc.routes."),
    FlagRule("routes-micro-batches", lambda args: not names(args, "rollout_data")
        and (args.recompute_loss_function or args.skip_actor_forward_only),
        "megatron_rc.routes needs the update to see the micro-batches of the pass over the old log-probs once, in "
        "their order",
        "Drop --recompute-loss-function and --skip-actor-forward-only, or megatron_rc.routes."),
    FlagRule("routes-unread", lambda args: not names(args, "rollout_data")
        and not (names(args, "before_train_step") and (names(args, "tis") or names(args, "loss"))),
        "megatron_rc.routes needs a hook that compares them",
        f"Set {flag('rollout_data')} (slime), or {flag('before_train_step')} with the hook tis or loss."),
)  # fmt: skip

HOOK_RULES: dict[str, tuple[FlagRule, ...]] = {
    "tis": (
        *_ALWAYS,
        FlagRule("tis-old", lambda args: args.correction.old != "recompute",
            "megatron_rc.correction.old must be 'recompute' for tis, got {args.correction.old!r}", f"Use {_BY_LOSS}."),
        _ONE_MICRO_BATCH,
        FlagRule("tis-advantages", lambda args: not in_advantages(args, args.settings)
            and judges_advantages(args.correction),
            "megatron_rc.correction must not reject by the sign of an advantage in tis, which sees no advantages",
            f"Use {_BY_LOSS}, or {flag('rollout_data')}.")),
    "loss": (
        *_ALWAYS,
        _ONE_MICRO_BATCH,
        _DOUBLE_RATIO,
        FlagRule("loss-estimator", lambda args: args.advantage_estimator in ("gspo", "cispo"),
            "--advantage-estimator must not be {args.advantage_estimator} for loss, which is PPO over tokens", _BY_TIS),
        FlagRule("loss-context-parallel", lambda args: args.allgather_cp and args.context_parallel_size > 1,
            "--allgather-cp must be off for loss, which reads zigzag slices", _BY_TIS),
        FlagRule("loss-true-on-policy", lambda args: args.true_on_policy_mode,
            "--true-on-policy-mode must be off for loss: there the host scores as its sampler does, and loss in fp32 "
            "over vocabulary shards, so a run that is exactly on-policy would not be any more",
            _BY_TIS),
        FlagRule("loss-opsm", lambda args: args.use_opsm, "--use-opsm must be off for loss",
            "Drop it, and set megatron_rc.correction to the preset off-policy-sequence-mask."),
        FlagRule("loss-and-tis", lambda args: args.use_tis,
            "--use-tis must be off for loss, which applies megatron_rc.correction itself", "Drop --use-tis."),
        FlagRule("loss-old-rollout",
            lambda args: bool(args.use_rollout_logprobs) != (args.correction.old == "rollout"),
            "--use-rollout-logprobs must be set exactly when megatron_rc.correction.old is 'rollout', got "
            "old={args.correction.old!r}",
            "Change one of the two."),
        FlagRule("loss-old-current",
            lambda args: args.correction.old == "current" and (steps := _steps_per_rollout(args)) > 1 and steps,
            "megatron_rc.correction.old must not be 'current' with more than one train step per rollout "
            "(--num-steps-per-rollout, --global-batch-size), got {found} of them",
            "Set old to 'recompute', or take one step per rollout."),
        FlagRule("loss-reducer",
            lambda args: args.custom_pg_loss_reducer_function_path is not None and not names(args, "pg_loss_reducer"),
            "loss takes no reducer but its own",
            f"Drop --custom-pg-loss-reducer-function-path, or set {flag('pg_loss_reducer')}.")),
    "pg_loss_reducer": (
        FlagRule("reducer-aggregation", lambda args: args.settings.aggregation is None,
            "megatron_rc.aggregation must be set for pg_loss_reducer", "Set megatron_rc.aggregation."),
        FlagRule("reducer-per-token",
            lambda args: bool(args.calculate_per_token_loss) != (args.settings.aggregation == "token-mean"),
            "--calculate-per-token-loss must be set exactly when megatron_rc.aggregation is 'token-mean', got "
            "{args.settings.aggregation!r}",
            "Change one of the two."),
        FlagRule("reducer-padding", lambda args: args.context_parallel_size > 1 and args.qkv_format == "bshd",
            "--qkv-format must be thd for pg_loss_reducer with context parallelism: it does not get the padded lengths",
            "Drop --qkv-format bshd.")),
    "rollout_data": (
        *_ALWAYS,
        FlagRule("rollout-data-old", lambda args: args.correction.old != "recompute" and not names(args, "loss"),
            "megatron_rc.correction.old must be 'recompute' for rollout_data, which runs before the update, got "
            "{args.correction.old!r}",
            f"Use {_BY_LOSS}."),
        FlagRule("rollout-data-ratio", lambda args: args.correction.old == "recompute" and args.use_rollout_logprobs,
            "--use-rollout-logprobs must be off for rollout_data: the ratio of the loss already is pi / mu, and the "
            "weights in the advantages would count it twice",
            "Drop --use-rollout-logprobs."),
        FlagRule("rollout-data-tis",
            lambda args: args.correction.old == "recompute" and args.use_tis and not names(args, "tis"),
            "--use-tis must be off with rollout_data, whose weights already are in the advantages",
            f"Drop --use-tis, or name {flag('tis')}, which then only reports.")),
    "before_train_step": (
        FlagRule("lr-rule-missing", lambda args: args.settings.lr_rule is None and not args.settings.routes,
            "megatron_rc.lr_rule must be set for before_train_step", f"Set it to {' or '.join(RULES)}."),
        FlagRule("lr-rule-lengths",
            lambda args: by_length(args.settings.lr_rule)
            and not any(names(args, hook) for hook in ("rollout_data", "tis", "loss", "pg_loss_reducer")),
            "megatron_rc.lr_rule must not depend on response lengths where no hook sees them",
            f"Change it (decay_period, signal), or set {flag('rollout_data')} (slime), {flag('pg_loss_reducer')}, or "
            "another of these hooks."),
        FlagRule("lr-rule-released-actors",
            lambda args: args.release_train and by_length(args.settings.lr_rule) and not names(args, "rollout_data"),
            "--release-train restarts the actors for every rollout, so the lengths that hooks of the loss record "
            "for the next one are lost and the learning rate would never decay",
            f"Set {flag('rollout_data')}, or megatron_rc.lr_rule.decay_period."),
        FlagRule("lr-rule-mismatch",
            lambda args: by_mismatch(args.settings.lr_rule) and not in_advantages(args, args.settings),
            "megatron_rc.lr_rule.signal must be length with no hook that corrects whole rollouts before the update, "
            "or with another correction.old than 'recompute'",
            f"Set {flag('rollout_data')} (miles has no such hook), or signal length."),
        FlagRule("lr-rule-unsaved", lambda args: args.no_save_optim and args.settings.lr_rule is not None,
            "megatron_rc.lr_rule must be unset with --no-save-optim, whose checkpoints hold no state of it",
            "Drop --no-save-optim, or unset it."),
        FlagRule("lr-rule-replicas", lambda args: args.indep_dp and args.settings.lr_rule is not None,
            "megatron_rc.lr_rule must be unset with --indep-dp: its replicas share no process group",
            "Drop --indep-dp, or unset it.")),
    "before_log_prob": _ROUTES,
    "check": (
        FlagRule("routes-unwatched", lambda args: args.settings.routes and not names(args, "before_log_prob"),
            "megatron_rc.routes needs the hook that watches the routers", f"Set {flag('before_log_prob')}."),
        FlagRule("correction-unapplied", _is_unapplied, "megatron_rc.correction needs a hook that applies it",
            f"Set --use-tis {flag('tis')}, or {_BY_LOSS}, or {flag('rollout_data')}."),
        FlagRule("hook-skipped-forward",
            lambda args: args.skip_actor_forward_only and (names(args, "loss") or names(args, "before_train_step")),
            "--skip-actor-forward-only must be off: under it miles takes neither another loss nor a hook before the "
            "train step",
            "Drop --skip-actor-forward-only."),
        FlagRule("rollout-data-logprobs",
            lambda args: in_advantages(args, args.settings) and _leaves_log_probs_out(args),
            "with one train step per rollout slime computes no log-probs before the update, which rollout_data needs",
            f"Add --get-mismatch-metrics {flag('tis')}, which then only reports."),
        FlagRule("lr-rule-unstepped",
            lambda args: args.settings.lr_rule is not None and not names(args, "before_train_step"),
            "megatron_rc.lr_rule needs the hook that steps it", f"Set {flag('before_train_step')}.")),
}  # fmt: skip
"""Hook -> the mistakes that it refuses by itself; those of `check` concern the hooks together."""
