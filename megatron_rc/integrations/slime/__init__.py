"""The hosts slime and miles: functions for their path flags, which take ``megatron_rc.integrations.slime.<function>``.

What runs when, on the training processes of the host:

1. `enable`, before the model is built, names the other hooks that the settings need. It calls `check`, which refuses
   flags and settings that they cannot honour, and which may be named instead.
2. `before_log_prob`, before the pass over the old log-probs, lets the routers say what they would choose.
3. `rollout_data` (slime only) corrects a whole rollout before its update.
4. `before_train_step`, before the first optimizer step of a rollout, steps the rule of the learning rate.
5. For every micro-batch of the update, `tis` weights the host's own loss, or `loss` replaces it;
   `pg_loss_reducer` sums either.

docs/hosts/slime.md has the recipe. A function is imported when it is first used: doctor reads this package without
torch.
"""

from functools import partial
from importlib import import_module
from typing import Any

from megatron_rc.integrations.slime.flag_rules import DEFAULTS, SLIME_RULES
from megatron_rc.integrations.slime.settings import HOOKS, SLIME, recipe
from megatron_rc.integrations.symbols import Host, Symbol
from megatron_rc.versions import version_of_tree

__all__ = ["HOST", *sorted(HOOKS)]

_DIFFERENCES = (
    "a token with a NaN, infinite or positive log-prob leaves the policy-gradient term, alone or with its sequence; "
    "with the first two the host's loss becomes NaN (slime), or counts it with ratio 1 (miles)",
    "log-ratios are clamped to +-log_ratio_bound (20) before exp",
    "rejected tokens leave only the policy-gradient term: entropy and KL terms and denominators count all loss tokens",
    "loss: under --rollout-top-p the entropy is that of the kept ids, as the log-probs are; slime takes the whole "
    "vocabulary",
)

LOSS = "args, batch, logits, sum_of_sample_mean"
TIS = "args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs"
STEP = "args, rollout_id, step_id, data_iterator, model, optimizer, opt_param_scheduler, num_microbatches"


def around_the_hooks(package: str, parameters: dict[str, str]) -> tuple[Symbol, ...]:
    """Functions "module:name" that call our hooks: other parameters mean another version of the host."""
    paths = {path.partition(":")[::2]: each for path, each in parameters.items()}
    summary = "not replaced: it surrounds the hooks"
    return tuple(Symbol(f"{package}.{module}", name, each, None, summary) for (module, name), each in paths.items())


HOST = Host(
    name=SLIME.name,
    summary="slime",
    module="slime",
    symbols=around_the_hooks(
        "slime",
        {
            "utils.misc:load_function": "path",
            "backends.megatron_utils.loss:policy_loss_function": LOSS,
            "backends.megatron_utils.loss:vanilla_tis_function": TIS,
            "backends.megatron_utils.cp_utils:get_logits_and_tokens_offset_with_cp": "total_length, response_length",
            "backends.megatron_utils.data:get_batch": "data_iterator, keys, pad_multiplier=128, allgather_cp=False",
            "backends.megatron_utils.model:train_one_step": f"{STEP}, step_global_batch_size, microbatch_pbar=None",
            "backends.megatron_utils.actor:MegatronTrainRayActor.train_actor": "self, rollout_id, rollout_data, "
            "external_data=None",
        },
    ),
    versions=(),
    read_version=partial(version_of_tree, "slime"),
    recipe=partial(recipe, whole_rollouts=SLIME.whole_rollouts),
    tested="commit 624b824a898a",
    differences=_DIFFERENCES,
    where="Put a clone of THUDM/slime on PYTHONPATH.",
    flag_rules=SLIME_RULES,
    without_rl="--loss-type[ =]sft_loss",
    flag_defaults=DEFAULTS,
    config_flag="custom-config-path",
)


_FILES = {"check": "enable", "pg_loss_reducer": "tis", "before_log_prob": "rollout_data"}
"""Hook -> its file in hooks/, where that has another name."""


def __getattr__(name: str) -> Any:
    if name not in HOOKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.hooks.{_FILES.get(name, name)}"), name)
