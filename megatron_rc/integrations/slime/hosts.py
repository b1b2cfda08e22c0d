"""The hosts slime and miles: their symbols for `doctor`, and the flags to add."""

import re
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megatron_rc import schema
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.integrations.scheduler_rule import LRRule, settings_of
from megatron_rc.integrations.slime.flag_rules import DEFAULTS, MILES_RULES, RULES
from megatron_rc.integrations.slime.hook_choice import hooks_for
from megatron_rc.integrations.slime.settings import KEY, flag
from megatron_rc.integrations.symbols import Host, Recipe, Symbol
from megatron_rc.versions import find_module

_DIFFERENCES = (
    "a token with a NaN or infinite log-prob leaves the policy-gradient term, alone or with its sequence; the host's "
    "loss becomes NaN (slime), or counts it with ratio 1 (miles)",
    "log-ratios are clamped to +-log_ratio_bound (20) before exp",
    "rejected tokens leave only the policy-gradient term: entropy and KL terms and denominators count all loss tokens",
    "loss: under --rollout-top-p the entropy is that of the kept ids, as the log-probs are; slime takes the whole "
    "vocabulary",
)

_STATED = re.compile(r"""^\s*version\s*=\s*["']([0-9][^"'\s]*)["']""", re.MULTILINE)


def _around_the_hooks(package: str, parameters: dict[str, str]) -> tuple[Symbol, ...]:
    """Functions "module:name" whose signature is checked to detect an incompatible version of the host."""
    return tuple(
        Symbol(
            f"{package}.{module}", name, each, lambda original, session: None, "not replaced: it surrounds the hooks"
        )
        for (module, _, name), each in ((path.partition(":"), each) for path, each in parameters.items())
    )


_LOSS = "args, batch, logits, sum_of_sample_mean"
_TIS = "args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs"
_STEP = "args, rollout_id, step_id, data_iterator, model, optimizer, opt_param_scheduler, num_microbatches"


def _version(name: str) -> str | None:
    """The release of a host: of its distribution, or as setup.py or pyproject.toml of its source tree say."""
    try:
        return version(name)
    except PackageNotFoundError:
        found = find_module(name)
    # a host usually runs from its source tree
    for folder in [Path(path).parent for path in found.submodule_search_locations or ()] if found else []:
        for file in (folder / "setup.py", folder / "pyproject.toml"):
            stated = _STATED.search(file.read_text(encoding="utf-8")) if file.is_file() else None
            if stated:
                return stated[1]
    return None


def recipe(correction: RolloutCorrection | None, lr_rule: LRRule | None, *, whole_rollouts: bool) -> Recipe:
    """Flags and YAML for a correction and a rule of the learning rate; raises as `hooks_for`."""
    rule = settings_of(lr_rule, "into a YAML file")
    hooks_for(correction or RolloutCorrection(), next(iter(rule.values()), None), whole_rollouts=whole_rollouts)
    fields: dict[str, object] = {} if correction is None else {"correction": correction.to_dict()}
    fields |= {name: schema.to_dict(each) for name, each in rule.items()}
    return Recipe(["--custom-config-path rc.yaml", flag("enable")], {KEY: fields})


SLIME = Host(
    name="slime",
    module="slime",
    symbols=_around_the_hooks(
        "slime",
        {
            "utils.misc:load_function": "path",
            "backends.megatron_utils.loss:policy_loss_function": _LOSS,
            "backends.megatron_utils.loss:vanilla_tis_function": _TIS,
            "backends.megatron_utils.cp_utils:get_logits_and_tokens_offset_with_cp": "total_length, response_length",
            "backends.megatron_utils.data:get_batch": "data_iterator, keys, pad_multiplier=128, allgather_cp=False",
            "backends.megatron_utils.model:train_one_step": f"{_STEP}, step_global_batch_size, microbatch_pbar=None",
            "backends.megatron_utils.actor:MegatronTrainRayActor.train_actor": "self, rollout_id, rollout_data, "
            "external_data=None",
        },
    ),
    versions=(),
    read_version=partial(_version, "slime"),
    recipe=partial(recipe, whole_rollouts=True),
    tested="commit 624b824a898a",
    differences=_DIFFERENCES,
    where="Put a clone of THUDM/slime on PYTHONPATH.",
    flag_rules=RULES,
    flag_defaults=DEFAULTS,
    config_flag="custom-config-path",
)

MILES = replace(
    SLIME,
    name="miles",
    module="miles",
    symbols=_around_the_hooks(
        "miles",
        {
            "utils.misc:load_function": "path, *, sync_required=False",
            "backends.training_utils.loss_hub.losses:policy_loss_function": _LOSS,
            "backends.training_utils.loss_hub.corrections:vanilla_tis_function": _TIS,
            "backends.training_utils.cp_utils:get_logits_and_tokens_offset_with_cp": "total_length, response_length, "
            "qkv_format='thd', max_seq_len=None, cp_rank=None, cp_size=None",
            "backends.megatron_utils.model:train_one_step": f"{_STEP}, num_rollouts, witness_info, attempt, "
            "ft_test_action_executor=None",
        },
    ),
    read_version=partial(_version, "miles"),
    recipe=partial(recipe, whole_rollouts=False),
    tested="commit 31f1ca961a94",
    where="Put a clone of radixark/miles on PYTHONPATH.",
    flag_rules=MILES_RULES,
)
