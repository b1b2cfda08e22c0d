"""What a hook of slime or miles cannot do: one rule per mistake, refused by the hook and found by doctor beforehand."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_rc.correction.settings import STATISTICS, RolloutCorrection
from megatron_rc.integrations.flag_rules import FlagRule
from megatron_rc.integrations.slime.handed_over import judges_current, lacks_advantages
from megatron_rc.integrations.slime.hook_choice import Enabled, assignments
from megatron_rc.integrations.slime.route_rules import ROUTE_RULES, ROUTES_UNWATCHED
from megatron_rc.integrations.slime.settings import HOOKS, KEY, ROUTE_SHIFT, flag, in_advantages, names, read

_BY_LOSS = f"--loss-type custom_loss {flag('loss')}"
_BY_TIS = f"Use the host's own loss with --use-tis {flag('tis')}."
_HOOKS_ARE_FINE = "no hook that is named makes this mistake"


def _correction(args: Any) -> RolloutCorrection:
    return read(args).correction


def _sentence(check: Callable[[], Any]) -> str:
    """The sentence of the ValueError that ``check`` raises; "" where it raises none."""
    try:
        check()
    except ValueError as refused:
        return str(refused)
    return ""


def _sees_one_micro_batch(args: Any) -> bool:
    """Whether tis or loss applies the correction, and not rollout_data."""
    return not in_advantages(args, read(args))


def _double_ratio(args: Any) -> str:
    return _sentence(lambda: _correction(args).check_surrogate("ppo"))


def _unknown_statistics(args: Any) -> list[str]:
    known = (*STATISTICS, ROUTE_SHIFT) if read(args).routes else STATISTICS
    return [each.statistic for each in _correction(args).reject if each.statistic not in known]


def _steps_per_rollout(args: Any) -> int:
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    return args.num_steps_per_rollout or max(1, samples // (args.global_batch_size or samples))


def _is_applied(args: Any) -> bool:
    return (
        names(args, "rollout_data")
        or (names(args, "tis") and args.use_tis)
        or (names(args, "loss") and args.loss_type == "custom_loss")
    )


def _sees_lengths(args: Any) -> bool:
    return any(names(args, hook) for hook in ("rollout_data", "tis", "loss", "pg_loss_reducer"))


def _leaves_log_probs_out(args: Any) -> bool:
    """Whether slime computes no log-probs before the update: the loss of its only train step has them."""
    if args.use_rollout_logprobs:
        return not args.get_mismatch_metrics
    records_routes = args.use_routing_replay and not args.use_rollout_routing_replay
    needs_them = (args.get_mismatch_metrics, args.use_critic, args.keep_old_actor, args.use_opd, records_routes)
    reused = args.loss_type == "policy_loss" and args.kl_coef == 0 and args.advantage_estimator != "gspo"
    return _steps_per_rollout(args) == 1 and reused and not any(needs_them)


TOP_K = FlagRule(
    "top-p-top-k", lambda args: args.rollout_top_k not in (None, -1, 0),
    lambda args: f"--rollout-top-k must be -1, got {args.rollout_top_k}: no kept ids are recorded for it, so pi and mu "
    "would be normalised over different sets",
    "Drop --rollout-top-k.", good="sampler and trainer have log-probs over the same ids",
)  # fmt: skip
_ALWAYS = (
    FlagRule(
        "hook-train-backend", lambda args: args.train_backend != "megatron",
        lambda args: f"--train-backend must be megatron, got {args.train_backend}", "Set --train-backend megatron.",
    ),
    TOP_K,
    FlagRule(
        "hook-statistic", lambda args: bool(_unknown_statistics(args)),
        lambda args: f"megatron_rc.correction must reject by one of {', '.join(STATISTICS)}, which are all that a hook "
        f"computes, and route_shift with megatron_rc.routes, got {_unknown_statistics(args)[0]!r}",
        "Change megatron_rc.correction.reject.",
    ),
    FlagRule(
        "hook-measured-upper", lambda args: _sentence(lambda: _correction(args).check_keeps_upper("a hook")) != "",
        lambda args: f"megatron_rc.correction: {_sentence(lambda: _correction(args).check_keeps_upper('a hook'))}",
        "Set megatron_rc.correction.weight.upper to a number.",
    ),
    FlagRule(
        "hook-versions", lambda args: _sentence(lambda: _correction(args).check_without_versions("a hook")) != "",
        lambda args: f"megatron_rc.correction: {_sentence(lambda: _correction(args).check_without_versions('a hook'))}",
        "Use bounds that do not depend on lags.",
    ),
)  # fmt: skip
_BATCH_MEAN = FlagRule(
    "hook-batch-mean", lambda args: _sees_one_micro_batch(args) and _correction(args).normalize == "batch",
    "megatron_rc.correction.normalize must be 'none' in a hook that sees one micro-batch",
    f"Set it to 'none', or add slime's {flag('rollout_data')}, which sees the whole rollout (miles has no such hook).",
)  # fmt: skip
_MEAN_K3 = FlagRule(
    "hook-mean-k3",
    lambda args: _sees_one_micro_batch(args)
    and _sentence(lambda: _correction(args).check_one_micro_batch("a hook")) != "",
    lambda args: f"megatron_rc.correction: {_sentence(lambda: _correction(args).check_one_micro_batch('a hook'))}",
    f"Drop that rejection, or add slime's {flag('rollout_data')}, which sees the whole rollout (miles has none).",
)  # fmt: skip
_MAX_K3 = FlagRule(
    "hook-max-k3", lambda args: _sees_one_micro_batch(args) and _correction(args).max_k3 is not None,
    "megatron_rc.correction.max_k3 must be unset in a hook that sees one micro-batch, which is less than the batch",
    f"Leave it out, or add slime's {flag('rollout_data')}, which sees the whole rollout (miles has no such hook).",
)  # fmt: skip
_ONE_MICRO_BATCH = (_BATCH_MEAN, _MAX_K3, _MEAN_K3)

HOOK_RULES: dict[str, tuple[FlagRule, ...]] = {
    "tis": (
        *_ALWAYS,
        FlagRule(
            "tis-old", lambda args: _correction(args).old != "recompute" and not judges_current(args),
            lambda args: "megatron_rc.correction.old must be 'recompute' for tis, or 'rollout' with "
            "--use-rollout-logprobs and a host that hands over current log-probs, got "
            f"{_correction(args).old!r}",
            f"Use {_BY_LOSS}.",
        ),
        FlagRule(
            "tis-double-ratio", lambda args: _double_ratio(args) != "", _double_ratio,
            "Set megatron_rc.correction.weight to null, or old to 'recompute'.",
        ),
        *_ONE_MICRO_BATCH,
        FlagRule(
            "tis-advantages", lambda args: _sees_one_micro_batch(args) and lacks_advantages(args),
            "megatron_rc.correction must not reject by when='negative_advantage' in tis, which sees no advantages of "
            "this host",
            f"Use {_BY_LOSS}, or {flag('rollout_data')}.",
        ),
    ),
    "loss": (
        *_ALWAYS,
        *_ONE_MICRO_BATCH,
        FlagRule(
            "loss-double-ratio", lambda args: _double_ratio(args) != "", _double_ratio,
            "Set megatron_rc.correction.weight to null, or old to 'recompute'.",
        ),
        FlagRule(
            "loss-estimator", lambda args: args.advantage_estimator in ("gspo", "cispo"),
            lambda args: f"--advantage-estimator must not be {args.advantage_estimator} for loss, which is PPO over "
            "tokens",
            _BY_TIS,
        ),
        FlagRule(
            "loss-context-parallel", lambda args: args.allgather_cp and args.context_parallel_size > 1,
            "--allgather-cp must be off for loss, which reads zigzag slices", _BY_TIS,
        ),
        FlagRule(
            "loss-true-on-policy", lambda args: args.true_on_policy_mode,
            "--true-on-policy-mode must be off for loss: there the host scores as its sampler does, and loss in fp32 "
            "over vocabulary shards, so a run that is exactly on-policy would not be any more",
            _BY_TIS,
        ),
        FlagRule(
            "loss-opsm", lambda args: args.use_opsm, "--use-opsm must be off for loss",
            "Drop it, and set megatron_rc.correction to the preset off-policy-sequence-mask.",
        ),
        FlagRule(
            "loss-and-tis", lambda args: args.use_tis,
            "--use-tis must be off for loss, which applies megatron_rc.correction itself", "Drop --use-tis.",
        ),
        FlagRule(
            "loss-old-rollout",
            lambda args: bool(args.use_rollout_logprobs) != (_correction(args).old == "rollout"),
            lambda args: "--use-rollout-logprobs must be set exactly when megatron_rc.correction.old is 'rollout', got "
            f"old={_correction(args).old!r}",
            "Change one of the two.",
        ),
        FlagRule(
            "loss-old-current", lambda args: _correction(args).old == "current" and _steps_per_rollout(args) > 1,
            lambda args: "megatron_rc.correction.old must not be 'current' with more than one train step per rollout "
            f"(--num-steps-per-rollout, --global-batch-size), got {_steps_per_rollout(args)} of them",
            "Set old to 'recompute', or take one step per rollout.",
        ),
        FlagRule(
            "loss-reducer",
            lambda args: args.custom_pg_loss_reducer_function_path is not None and not names(args, "pg_loss_reducer"),
            "loss takes no reducer but its own",
            f"Drop --custom-pg-loss-reducer-function-path, or set {flag('pg_loss_reducer')}.",
        ),
    ),
    "pg_loss_reducer": (
        FlagRule(
            "reducer-aggregation", lambda args: read(args).aggregation is None,
            "megatron_rc.aggregation must be set for pg_loss_reducer", "Set megatron_rc.aggregation.",
        ),
        FlagRule(
            "reducer-per-token",
            lambda args: bool(args.calculate_per_token_loss) != (read(args).aggregation == "token-mean"),
            lambda args: "--calculate-per-token-loss must be set exactly when megatron_rc.aggregation is 'token-mean', "
            f"got {read(args).aggregation!r}",
            "Change one of the two.",
        ),
        FlagRule(
            "reducer-padding", lambda args: args.context_parallel_size > 1 and args.qkv_format == "bshd",
            "--qkv-format must be thd for pg_loss_reducer with context parallelism: it does not get the padded lengths",
            "Drop --qkv-format bshd.",
        ),
    ),
    "rollout_data": (
        *_ALWAYS,
        FlagRule(
            "rollout-data-old", lambda args: _correction(args).old != "recompute" and not names(args, "loss"),
            lambda args: "megatron_rc.correction.old must be 'recompute' for rollout_data, which runs before the "
            f"update, got {_correction(args).old!r}",
            f"Use {_BY_LOSS}.",
        ),
        FlagRule(
            "rollout-data-ratio", lambda args: _correction(args).old == "recompute" and args.use_rollout_logprobs,
            "--use-rollout-logprobs must be off for rollout_data: the ratio of the loss already is pi / mu, and the "
            "weights in the advantages would count it twice",
            "Drop --use-rollout-logprobs.",
        ),
        FlagRule(
            "rollout-data-tis",
            lambda args: _correction(args).old == "recompute" and args.use_tis and not names(args, "tis"),
            "--use-tis must be off with rollout_data, whose weights already are in the advantages",
            f"Drop --use-tis, or name {flag('tis')}, which then only reports.",
        ),
    ),
    "before_train_step": (
        FlagRule(
            "lr-decay-missing", lambda args: read(args).lr_rule is None and not read(args).routes,
            "megatron_rc.lr_decay or lr_gate must be set for before_train_step", "Set one; {} takes every default.",
        ),
        FlagRule(
            "lr-decay-lengths",
            lambda args: getattr(read(args).lr_rule, "needs_lengths", False) and not _sees_lengths(args),
            "megatron_rc.lr_decay.decay_period must be set where no hook sees response lengths, and lr_gate.signal be "
            "another than length",
            f"Change it, or set {flag('rollout_data')} (slime), {flag('pg_loss_reducer')}, or another of these hooks.",
        ),
        FlagRule(
            "lr-decay-released-actors",
            lambda args: args.release_train and getattr(read(args).lr_rule, "needs_lengths", False)
            and not names(args, "rollout_data"),
            "--release-train restarts the actors for every rollout, so the lengths that hooks of the loss record "
            "for the next one are lost and the learning rate would never decay",
            f"Set {flag('rollout_data')}, or megatron_rc.lr_decay.decay_period.",
        ),
        FlagRule(
            "lr-gate-mismatch", lambda args: getattr(read(args).lr_rule, "needs_mismatch", False)
            and not in_advantages(args, read(args)),
            "megatron_rc.lr_gate.signal must be length with no hook that corrects whole rollouts before the update, "
            "or with another correction.old than 'recompute'",
            f"Set {flag('rollout_data')} (miles has no such hook), or signal length.",
        ),
        FlagRule(
            "lr-decay-replicas", lambda args: args.indep_dp and read(args).lr_rule is not None,
            "megatron_rc.lr_decay and lr_gate must be unset with --indep-dp: its replicas share no process group",
            "Drop --indep-dp, or unset them.",
        ),
    ),
    "before_log_prob": ROUTE_RULES,
    "check": (
        ROUTES_UNWATCHED,
        FlagRule(
            "correction-unapplied",
            lambda args: (_correction(args).weight is not None or bool(_correction(args).reject))
            and not _is_applied(args),
            "megatron_rc.correction needs a hook that applies it",
            f"Set --use-tis {flag('tis')}, or {_BY_LOSS}, or {flag('rollout_data')}.",
        ),
        FlagRule(
            "hook-skipped-forward",
            lambda args: args.skip_actor_forward_only and (names(args, "loss") or names(args, "before_train_step")),
            "--skip-actor-forward-only must be off: under it miles takes neither another loss nor a hook before the "
            "train step",
            "Drop --skip-actor-forward-only.",
        ),
        FlagRule(
            "rollout-data-logprobs",
            lambda args: in_advantages(args, read(args)) and _leaves_log_probs_out(args),
            "with one train step per rollout slime computes no log-probs before the update, which rollout_data needs",
            f"Add --get-mismatch-metrics {flag('tis')}, which then only reports.",
        ),
        FlagRule(
            "lr-decay-unstepped", lambda args: read(args).lr_rule is not None and not names(args, "before_train_step"),
            "megatron_rc.lr_decay or lr_gate needs the hook that steps it", f"Set {flag('before_train_step')}.",
        ),
    ),
}  # fmt: skip
"""Hook -> the mistakes that it refuses by itself; those of `check` concern the hooks together."""


def _is_named(hook: str, args: Any) -> bool:
    return any(names(args, each) for each in (HOOKS if hook == "check" else (hook,)))


def rules_of_named_hooks(*, whole_rollouts: bool) -> tuple[FlagRule, ...]:
    """The same mistakes for doctor, each made only where the host's arguments, or `enable`, name the hook."""

    def enabled(args: Any) -> Any:
        return Enabled(args, assignments(args, whole_rollouts=whole_rollouts)) if names(args, "enable") else args

    def unreadable(args: Any) -> str:
        return _sentence(lambda: read(args)) or _sentence(lambda: enabled(args))

    def made_by(hook: str, rule: FlagRule, args: Any) -> bool:
        return not unreadable(args) and _is_named(hook, enabled(args)) and rule.wrong(enabled(args))

    def problem_of(rule: FlagRule, args: Any) -> str:
        return rule.problem_of(enabled(args))

    return (
        FlagRule(
            "hook-settings", lambda args: _is_named("check", args) and unreadable(args) != "", unreadable,
            f"Change {KEY} in the YAML file of --custom-config-path.",
            good="no hook is named, or its settings can be read",
        ),
        *(
            replace(
                rule, wrong=partial(made_by, hook, rule), problem=partial(problem_of, rule),
                good=rule.good or _HOOKS_ARE_FINE,
            )
            for hook, rules in HOOK_RULES.items() for rule in rules
        ),
    )  # fmt: skip
