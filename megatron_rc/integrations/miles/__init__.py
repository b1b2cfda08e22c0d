"""The host miles: slime's hooks in a codebase that grew out of slime, and whose rollout_data hook gets no rollout.

docs/hosts/slime.md has the recipe.
"""

from dataclasses import replace
from functools import partial

from megatron_rc.integrations import slime
from megatron_rc.integrations.miles import own_centering
from megatron_rc.integrations.slime.chosen_hooks import recipe
from megatron_rc.integrations.slime.flag_rules import DEFAULTS, rules_for
from megatron_rc.integrations.slime.settings import MILES
from megatron_rc.versions import version_of_tree

HOST = replace(
    slime.HOST,
    name=MILES.name,
    summary="miles",
    module="miles",
    symbols=slime.around_the_hooks(
        "miles",
        {
            "utils.misc:load_function": "path, *, sync_required=False",
            "backends.training_utils.loss_hub.losses:policy_loss_function": slime.LOSS,
            "backends.training_utils.loss_hub.corrections:vanilla_tis_function": slime.TIS,
            "backends.training_utils.cp_utils:get_logits_and_tokens_offset_with_cp": "total_length, response_length, "
            "qkv_format='thd', max_seq_len=None, cp_rank=None, cp_size=None",
            "backends.megatron_utils.model:train_one_step": f"{slime.STEP}, num_rollouts, witness_info, attempt, "
            "ft_test_action_executor=None",
        },
    ),
    read_version=partial(version_of_tree, "miles"),
    recipe=partial(recipe, host=MILES),
    tested="commit 31f1ca961a94",
    where="Put a clone of radixark/miles on PYTHONPATH.",
    flag_rules=(*rules_for(MILES), own_centering.RULE),
    flag_defaults={**own_centering.DEFAULTS, **DEFAULTS},
    without_rl="--loss-type[ =]sft_loss",
)
