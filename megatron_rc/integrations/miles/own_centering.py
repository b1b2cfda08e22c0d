"""miles' own score centering, for doctor: what makes it stop at the start. Read at commit 09abf9518254."""

from typing import Any

from megatron_rc.integrations.flag_rules import FlagRule, first_wrong

_BESIDE = {
    "use_tis": "--score-centering-is has its weights",
    "custom_tis_function_path": "--score-centering-is has its weights",
    "custom_pg_loss_reducer_function_path": "it has the host's own reducer alone",
    "use_opsm": "a mask of sequences changes the mean that it subtracts",
    "true_on_policy_mode": "it computes probabilities in fp32",
    "recompute_logprobs_via_prefill": "q is what was returned when the token was drawn",
    "multi_lora": "its losses are computed elsewhere",
    "use_opd": "nothing combines it with distillation",
    "custom_convert_samples_to_train_data_path": "a converter of your own skips the top ids",
}
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(_BESIDE, False),
    **dict.fromkeys(("custom_tis_function_path", "custom_pg_loss_reducer_function_path")),
    **dict.fromkeys(("custom_convert_samples_to_train_data_path", "sglang_speculative_algorithm")),
    "rollout_top_logprobs_num": 0,
}


def _mistake(args: Any) -> str:
    """The flag under which miles does not start with its score centering; "" where it starts, or has none."""
    if args.loss_type != "score_centering":
        return ""
    ids, top_k = args.rollout_top_logprobs_num, args.rollout_top_k
    drafts, filters = args.sglang_speculative_algorithm, top_k != -1 or args.rollout_top_p != 1
    return first_wrong(
        (ids <= 0, "--rollout-top-logprobs-num must be above 0, such as 128"),
        (args.advantage_estimator != "grpo", f"--advantage-estimator must be grpo, got {args.advantage_estimator}"),
        (top_k == -1 and args.rollout_top_p != 1, "--rollout-top-p needs a --rollout-top-k, which bounds the kept ids"),
        (top_k > ids, f"--rollout-top-logprobs-num must be --rollout-top-k, {top_k}, or more, to hold all kept ids"),
        (drafts not in (None, "DFLASH") or (drafts and filters),
         f"--sglang-speculative-algorithm must be unset, or DFLASH without filters, got {drafts}"),
        *((getattr(args, name), f"--{name.replace('_', '-')} must be unset: {why}") for name, why in _BESIDE.items()),
    )  # fmt: skip


RULE = FlagRule("score-centering", _mistake,
    "miles' score centering does not start: {found}", "Change that flag, or take --loss-type policy_loss.",
    good="miles' score centering starts, or is not asked for")  # fmt: skip
