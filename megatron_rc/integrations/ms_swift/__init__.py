"""The host ms-swift: GRPO of its Megatron trainer, corrected in every training process by a plugin of two lines.

`--external_plugins` runs a file in every process before the trainer is made; there `patch("ms-swift", ...)` replaces
`SYMBOLS`. docs/hosts/ms_swift.md has the recipe.
"""

from dataclasses import replace
from functools import partial
from importlib import import_module

from megatron_rc.integrations.facts import MEGATRON_DEFAULTS, Fact, narrowed_by, rules_of, stated_by
from megatron_rc.integrations.flag_rules import FlagRule
from megatron_rc.integrations.symbols import Host, Symbol, replaced_by
from megatron_rc.versions import MS_SWIFT, stated_version

OURS = f"{__name__}.hooks"
TRAINER = "swift.megatron.trainers.grpo_trainer"
MODE = "rollout_importance_sampling_mode"

FACTS = {
    "temperature": stated_by("--temperature"),
    "narrowed": narrowed_by("--top_p", "--top_k"),
    "own_correction": Fact(
        lambda args: args.patched and (mode := getattr(args, MODE)) and f"--{MODE} {mode}", f"--{MODE}"
    ),
}
RULES = (
    # examples of the host sample so, and have run
    *(replace(rule, severity="warning") if rule.name == "top-p-top-k" else rule for rule in rules_of(FACTS)),
    FlagRule("two-corrections", lambda args: not args.patched and getattr(args, MODE) == "sequence_mask",
        f"--{MODE} sequence_mask keeps token weights without a bound in the sequences that it keeps",
        "Use token_truncate, or the correction seq-mask-tis of megatron_rc.", severity="warning"),
    FlagRule("loss-type", lambda args: args.patched and args.loss_type == "real",
        "--loss_type real multiplies no weights into its loss",
        "Use grpo, dapo, bnpo, dr_grpo or cispo.", good="the loss reads the weights"),
)  # fmt: skip
DEFAULTS = {**MEGATRON_DEFAULTS, MODE: None, "loss_type": "grpo", "temperature": 1.0, "top_p": 1.0, "top_k": -1}
"""Arguments that the rules read, with the host's own defaults."""

SYMBOLS = tuple(
    Symbol(TRAINER, f"MegatronGRPOTrainer.{name}", parameters, replaced_by(OURS, ours), summary)
    for name, parameters, ours, summary in (
        ("_init_rollout_engine", "self", "init_rollout_engine",
         "refuses what cannot be honoured, and switches weights and metrics on"),
        ("_compute_rollout_offpolicy_metrics", "self, per_token_logps, rollout_per_token_logps, completion_mask",
         "offpolicy_metrics", "corrects a micro-batch, and adds metrics of megatron_rc"),
        ("_apply_rollout_importance_sampling", "self, rollout_log_ratio, completion_mask", "weights",
         "returns the weights of the correction"),
        ("loss_func", "self, output_tensor, data", "loss_func",
         "refuses a micro-batch whose rollout log-probs did not arrive, which the host would leave uncorrected"),
        ("_compute_is_correction_metrics", "self, rollout_log_ratio, is_weights, completion_mask", "no_metrics",
         "leaves out the host's metrics of a threshold that does not act"),
    )
)  # fmt: skip

HOST = Host(
    name="ms-swift",
    summary="ms-swift (`megatron rlhf --rlhf_type grpo`)",
    module=TRAINER,
    symbols=SYMBOLS,
    versions=MS_SWIFT,
    read_version=partial(stated_version, "swift.version"),
    prepare=lambda correction, lr_rule: import_module(OURS).prepare(correction, lr_rule),
    tested="4.6.0 and commit 3602360a562b",
    differences=(
        "weights are 0 at corrupt log-probs and rejected tokens, which stay in all denominators; as the host's own, "
        "they multiply the KL term of a token, too",
        "our metrics are added; those of the host's own threshold are left out",
    ),
    flag_rules=RULES,
    flag_defaults=DEFAULTS,
    config_flag="config",
    without_rl=r"--rlhf_type[ =](dpo|kto|rm|gkd)|\bmegatron (sft|pt|export)",
    where="Run pip install ms-swift, or put a clone of modelscope/ms-swift on PYTHONPATH.",
)
