"""Flags of slime and miles that are wrong: those that `enable` refuses, and those that doctor warns about."""

from typing import Any

from megatron_rc.integrations import facts
from megatron_rc.integrations.facts import MEGATRON_DEFAULTS, Fact, quantized, rules_of, stated_by, with_experts
from megatron_rc.integrations.flag_rules import FlagRule, refused
from megatron_rc.integrations.slime.chosen_hooks import assignments
from megatron_rc.integrations.slime.settings import ENABLE, KEY, SLIME, is_enabled, read
from megatron_rc.models.hf_checkpoint import Checkpoint

DEFAULTS: dict[str, Any] = {
    **MEGATRON_DEFAULTS,
    **dict.fromkeys(("use_tis", "use_rollout_logprobs", "use_opsm", "use_critic", "use_rollout_entropy"), False),
    **dict.fromkeys(("use_routing_replay", "use_rollout_routing_replay", "recompute_loss_function", "indep_dp"), False),
    **dict.fromkeys(("get_mismatch_metrics", "tis_batch_normalize", "true_on_policy_mode", "allgather_cp"), False),
    **dict.fromkeys(("skip_actor_forward_only", "calculate_per_token_loss", "keep_old_actor", "release_train"), False),
    **dict.fromkeys(("custom_tis_function_path", "custom_loss_function_path", "custom_pg_loss_reducer_function_path")),
    **dict.fromkeys(("save_debug_train_data", "dump_details", "hf_checkpoint", "sglang_quantization")),
    **dict.fromkeys(("num_steps_per_rollout", "global_batch_size", "moe_expert_capacity_factor")),
    **{"loss_type": "policy_loss", "advantage_estimator": "grpo", "train_backend": "megatron", "qkv_format": "thd"},
    **{"sglang_kv_cache_dtype": "auto", "rollout_temperature": 1.0, "rollout_top_p": 1.0, "rollout_top_k": -1},
    **{"context_parallel_size": 1, "rollout_batch_size": 1, "n_samples_per_prompt": 1, "no_save_optim": False},
}
"""Arguments that the rules read, with the hosts' own defaults."""


def dumps_train_data(args: Any) -> bool:
    """Whether the host writes its training samples."""
    return bool(args.save_debug_train_data or args.dump_details)


def _corrects(args: Any) -> bool:
    """Whether the host or `enable` acts on the gap between sampler and trainer."""
    if is_enabled(args):
        return not refused(read, args) and read(args).correction.acts
    theirs = args.use_rollout_logprobs or args.use_tis or args.custom_loss_function_path
    return bool(theirs or args.loss_type == "score_centering")


def _quantized(args: Any) -> str:
    if args.sglang_quantization:
        return f"--sglang-quantization={args.sglang_quantization}"
    if str(args.sglang_kv_cache_dtype).startswith("fp8"):
        return f"--sglang-kv-cache-dtype={args.sglang_kv_cache_dtype}"
    return f"--hf-checkpoint={args.hf_checkpoint}" if quantized(args.hf_checkpoint) else ""


def _experts(args: Any) -> Checkpoint | None:
    if args.num_experts is not None:
        return Checkpoint("the model", False, True, "--num-experts")
    return with_experts(args.hf_checkpoint)


def _is_async(args: Any) -> bool:
    program = getattr(args, "program", "")
    return any(name in program for name in ("train_async", "fully_async")) and not args.keep_old_actor


FACTS = {
    "temperature": stated_by("--rollout-temperature"),
    "quantized": Fact(_quantized),
    "stale": Fact(_is_async),
    "bounded": Fact(_corrects, fix=f"Add --use-tis, or {ENABLE} with a correction."),
    "experts": Fact(_experts),
    "routes_replayed": stated_by("--use-rollout-routing-replay", "Add --use-rollout-routing-replay."),
    "fused_router": stated_by("--moe-router-fusion"),
    "replays": Fact(lambda args: args.use_routing_replay or args.use_rollout_routing_replay),
}
_RULES = (
    FlagRule("ratio-counted-twice",
        lambda args: args.use_rollout_logprobs and args.use_tis,
        "with --use-rollout-logprobs the loss's ratio already is pi / mu, and --use-tis multiplies it again",
        "Drop --use-rollout-logprobs, or --use-tis.", good="pi / mu is counted at most once"),
    FlagRule("tis-function",
        lambda args: args.custom_tis_function_path and not args.use_tis and not args.get_mismatch_metrics,
        "it is never called, so nothing is corrected", "Add --use-tis.", good="it is called, or none is given"),
    FlagRule("tis-function", lambda args: args.custom_tis_function_path and not args.use_tis,
        "--get-mismatch-metrics calls it for its metrics alone", "Add --use-tis if it shall act on the loss.",
        severity="note"),
    FlagRule("loss-function",
        # the host gives value_loss to a critic, whose loss is its own
        lambda args: args.custom_loss_function_path and args.loss_type not in ("custom_loss", "value_loss"),
        "it is never called with --loss-type {args.loss_type}",
        "Add --loss-type custom_loss.", good="it is called, or none is given"),
    FlagRule("batch-normalised-weights",
        lambda args: args.tis_batch_normalize and not is_enabled(args),
        "weights are normalised over one micro-batch of one rank, so they depend on how the batch was packed",
        f"Set tis_batch_normalize: false, or megatron_rc.correction.normalize: batch with {ENABLE}.",
        good="no weight depends on how the batch was cut", severity="warning"),
    FlagRule("entropy-of-the-dump",
        lambda args: dumps_train_data(args) and not args.use_rollout_entropy and not is_enabled(args),
        "the dump of train data gets no entropy of the policy, so an analysis cannot exclude a hidden temperature",
        f"Add {ENABLE} or --use-rollout-entropy: the host's own pass over the log-probs computes it.",
        good="a dump of train data holds the entropy of the policy, or none is written", severity="note"),
    FlagRule("entropy-of-the-dump",
        lambda args: dumps_train_data(args) and args.use_rollout_entropy and args.rollout_top_p != 1,
        "the host computes the entropy of the whole vocabulary, and the log-probs of the kept ids, so an analysis "
        "takes an honest sampler for one that hides its top-p",
        "Drop --use-rollout-entropy.", severity="warning"),
)  # fmt: skip


def own_rules(host: str) -> tuple[FlagRule, ...]:
    """Mistakes in the flags of a host; slime alone records the ids that it kept under top-p."""
    narrowed = facts.narrowed_by(*["--rollout-top-p"] * (host != SLIME), "--rollout-top-k")
    # miles' own score centering takes p and q over the kept ids
    but = narrowed._replace(read=lambda args: args.loss_type != "score_centering" and narrowed.read(args))
    return (*rules_of({**FACTS, "narrowed": but}), *_RULES)


def rules_for(host: str) -> tuple[FlagRule, ...]:
    """Those that doctor looks for: the settings of this package are among them."""
    return (
        *own_rules(host),
        FlagRule("key-without-enable", lambda args: getattr(args, KEY, None) is not None and not is_enabled(args),
            f"the YAML file of --custom-config-path has the key {KEY}, and `enable`, which reads it, is not named, so "
            "nothing is corrected",
            f"Add {ENABLE}, and name no other function of megatron_rc.",
            good=f"`enable` reads {KEY}, or it is not given"),
        FlagRule("megatron-rc-settings", lambda args: is_enabled(args) and refused(assignments, args, host), "{found}",
            "Change the setting that the sentence names.", good=f"{KEY} fits the flags, or `enable` is not named"),
    )  # fmt: skip
