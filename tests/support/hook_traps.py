"""Settings that a hook of slime cannot honour: the check that finds them, flags, YAML, a pattern of the sentence."""

from __future__ import annotations

from megatron_rc.integrations.slime.settings import flag

OURS = "--custom-tis-function-path megatron_rc.integrations.slime.tis"
TIS_ON = f"--use-tis {OURS}"
LOSS_ON = f"--loss-type custom_loss {flag('loss')}"
ROLLOUT_ON = flag("rollout_data")
REDUCER_ON = flag("pg_loss_reducer")
DECAY_ON = flag("before_train_step")
WATCH_ON = flag("before_log_prob")
WATCHED = f"{WATCH_ON} --use-rollout-routing-replay"
ROUTES: dict[str, object] = {"routes": True}
NORMALISED = {"preset": "token-tis", "normalize": "batch"}
HOOKS_TRAPPED: list[tuple[str, str, dict[str, object], str]] = [
    ("hook-train-backend", f"{TIS_ON} --train-backend fsdp", {}, "must be megatron, got fsdp"),
    ("hook-statistic", TIS_ON, {"correction": {"reject": [{"statistic": "mine", "upper": 1}]}}, "ratio, k2.*'mine'"),
    ("hook-batch-mean", TIS_ON, {"correction": NORMALISED}, "one micro-batch.*--rollout-data-postprocess-path"),
    ("hook-batch-mean", LOSS_ON, {"correction": NORMALISED}, "one micro-batch"),
    ("hook-measured-upper", TIS_ON, {"correction": {"weight": {"upper": "measured"}}}, "keeps no bound"),
    ("hook-versions", TIS_ON, {"correction": {"weight": {"growth": "sqrt_lag"}}}, "growth must not be used in a hook"),
    ("hook-mean-k3", TIS_ON, {"correction": "standardized"}, "one micro-batch at a time and has no mean_k3"),
    ("hook-max-k3", TIS_ON, {"correction": {"preset": "token-tis", "max_k3": 0.3}}, "less than the batch"),
    ("tis-old", TIS_ON, {"correction": {"old": "current"}}, "got 'current'"),
    ("tis-old", TIS_ON, {"correction": {"old": "rollout"}}, "'recompute' for tis.*--custom-loss-function-path"),
    (
        "tis-double-ratio",
        f"{TIS_ON} --use-rollout-logprobs",
        {"correction": {"preset": "token-tis", "old": "rollout"}},
        "count it twice",
    ),
    (
        "tis-advantages",
        TIS_ON,
        {"correction": {"reject": [{"statistic": "k3", "upper": 0.1, "when": "negative_advantage"}]}},
        "sees no advantages.*--custom-loss-function-path",
    ),
    (
        "loss-double-ratio",
        f"{LOSS_ON} --use-rollout-logprobs",
        {"correction": {"preset": "token-tis", "old": "rollout"}},
        "count it twice",
    ),
    ("loss-estimator", f"{LOSS_ON} --advantage-estimator gspo", {}, "gspo for loss.*--custom-tis-function-path"),
    ("loss-context-parallel", f"{LOSS_ON} --allgather-cp --context-parallel-size 2", {}, "zigzag"),
    ("loss-true-on-policy", f"{LOSS_ON} --true-on-policy-mode", {}, "exactly on-policy.*--use-tis"),
    ("hook-skipped-forward", f"{LOSS_ON} --skip-actor-forward-only", {}, "neither another loss nor a hook"),
    (
        "hook-skipped-forward",
        f"{TIS_ON} {DECAY_ON} --skip-actor-forward-only",
        {"lr_decay": {"decay_period": 9}},
        "^--skip-actor-forward-only must be off",
    ),
    ("rollout-data-logprobs", ROLLOUT_ON, {}, "no log-probs before the update.*--get-mismatch-metrics"),
    (
        "lr-decay-released-actors",
        f"{TIS_ON} {DECAY_ON} --release-train",
        {"lr_decay": {}},
        "never decay.*--rollout-data-postprocess-path.*decay_period",
    ),
    ("loss-opsm", f"{LOSS_ON} --use-opsm", {}, "--use-opsm must be off.*off-policy-sequence-mask"),
    ("loss-and-tis", f"{LOSS_ON} --use-tis", {}, "--use-tis must be off for loss"),
    ("loss-old-rollout", f"{LOSS_ON} --use-rollout-logprobs", {}, "got old='recompute'"),
    ("loss-old-rollout", LOSS_ON, {"correction": {"old": "rollout"}}, "must be set exactly when.*got old='rollout'"),
    (
        "loss-old-current",
        f"{LOSS_ON} --global-batch-size 1 --rollout-batch-size 4",
        {"correction": {"old": "current"}},
        "--global-batch-size.*got 4 of them",
    ),
    ("loss-old-current", f"{LOSS_ON} --num-steps-per-rollout 2", {"correction": {"old": "current"}}, "got 2 of them"),
    ("loss-reducer", f"{LOSS_ON} --custom-pg-loss-reducer-function-path my.own", {}, "no reducer but its own"),
    ("reducer-aggregation", REDUCER_ON, {}, "aggregation must be set"),
    ("reducer-per-token", REDUCER_ON, {"aggregation": "token-mean"}, "got 'token-mean'"),
    (
        "reducer-per-token",
        f"{REDUCER_ON} --calculate-per-token-loss",
        {"aggregation": "seq-mean-token-sum"},
        "must be set exactly when megatron_rc.aggregation is 'token-mean'",
    ),
    (
        "reducer-padding",
        f"{REDUCER_ON} --qkv-format bshd --context-parallel-size 2",
        {"aggregation": "seq-mean-token-sum"},
        "must be thd",
    ),
    ("rollout-data-old", ROLLOUT_ON, {"correction": {"old": "rollout"}}, "runs before the update"),
    ("rollout-data-ratio", f"{ROLLOUT_ON} --use-rollout-logprobs", {}, "count it twice"),
    ("rollout-data-tis", f"{ROLLOUT_ON} --use-tis", {}, "already are in the advantages"),
    ("lr-decay-missing", DECAY_ON, {}, "lr_decay or lr_gate must be set"),
    ("lr-decay-lengths", DECAY_ON, {"lr_decay": {}}, "no hook sees response lengths"),
    ("lr-decay-lengths", DECAY_ON, {"lr_gate": {"signal": "length", "target": 9}}, "decay_period must be set"),
    (
        "lr-gate-mismatch",
        f"{DECAY_ON} {TIS_ON}",
        {"correction": "token-tis", "lr_gate": {}},
        "must be length with no hook",
    ),
    ("lr-decay-replicas", f"{DECAY_ON} --indep-dp", {"lr_decay": {"decay_period": 9}}, "share no process group"),
    *(
        ("correction-unapplied", named, {"correction": "token-tis"}, "needs a hook that applies it; set --use-tis")
        for named in (flag("check"), OURS, flag("loss"))
    ),
    ("lr-decay-unstepped", TIS_ON, {"lr_decay": {}}, "needs the hook that steps it; set --custom-megatron-before"),
    ("routes-off", f"{TIS_ON} {WATCH_ON}", {}, "must be true for before_log_prob"),
    ("routes-not-replayed", f"{ROLLOUT_ON} {WATCH_ON}", ROUTES, "needs --use-rollout-routing-replay"),
    ("routes-old", f"{LOSS_ON} {WATCHED}", {**ROUTES, "correction": {"old": "rollout"}}, "got 'rollout'"),
    ("routes-layout", f"{ROLLOUT_ON} {WATCHED} --qkv-format bshd", ROUTES, "packed zigzag slices"),
    ("routes-micro-batches", f"{TIS_ON} {WATCHED} --recompute-loss-function", ROUTES, "once, in their order"),
    ("routes-unread", f"{TIS_ON} {WATCHED}", ROUTES, "needs a hook that compares them"),
    ("routes-unwatched", f"{ROLLOUT_ON} --use-rollout-routing-replay", ROUTES, "the hook that watches the routers"),
]
