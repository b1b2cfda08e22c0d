"""What `routes` cannot do, as rules like those of the hooks."""

from megatron_rc.integrations.flag_rules import FlagRule
from megatron_rc.integrations.slime.settings import flag, names

ROUTE_RULES = (
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
ROUTES_UNWATCHED = FlagRule(
    "routes-unwatched", lambda args: args.settings.routes and not names(args, "before_log_prob"),
    "megatron_rc.routes needs the hook that watches the routers", f"Set {flag('before_log_prob')}.",
)  # fmt: skip
