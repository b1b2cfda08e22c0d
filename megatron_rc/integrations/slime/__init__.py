"""The hosts slime and miles, which load functions by path: their flag --custom-megatron-init-path names `enable`.

What runs when, on the training processes of the host:

1. `enable`, before the model is built, names the hooks that the settings need, and refuses what they cannot honour.
2. `before_log_prob`, before the pass over the old log-probs, lets the routers say what they would choose.
3. `rollout_data` (slime only) corrects a whole rollout before its update.
4. `before_train_step`, before the first optimizer step of a rollout, steps the rule of the learning rate.
5. `tis` weights the host's own loss of a micro-batch, or `loss` replaces it; `pg_loss_reducer` sums either.

docs/hosts/slime.md has the recipe. The host imports the hooks: doctor reads this package without torch.
"""

import logging
from argparse import Namespace
from functools import partial

from megatron_rc.integrations.facts import MEGATRON_RULES
from megatron_rc.integrations.flag_rules import WithDefaults, refuse
from megatron_rc.integrations.scheduler_rule import remember_loaded_states
from megatron_rc.integrations.slime.chosen_hooks import assignments, recipe
from megatron_rc.integrations.slime.flag_rules import DEFAULTS, dumps_train_data, own_rules, rules_for
from megatron_rc.integrations.slime.settings import SLIME, loaded_hosts, read
from megatron_rc.integrations.symbols import Host, Symbol
from megatron_rc.versions import version_of_tree

__all__ = ["HOST", "enable"]
_logger = logging.getLogger(__name__)

LOSS = "args, batch, logits, sum_of_sample_mean"
TIS = "args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs"
STEP = "args, rollout_id, step_id, data_iterator, model, optimizer, opt_param_scheduler, num_microbatches"


def around_the_hooks(package: str, parameters: dict[str, str]) -> tuple[Symbol, ...]:
    """Functions "module:name" that call our hooks: other parameters mean another version of the host."""
    paths = {path.partition(":")[::2]: each for path, each in parameters.items()}
    summary = "not replaced: it surrounds the hooks"
    return tuple(Symbol(f"{package}.{module}", name, each, None, summary) for (module, name), each in paths.items())


HOST = Host(
    name=SLIME,
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
    recipe=partial(recipe, host=SLIME),
    tested="commit 624b824a898a",
    differences=(
        "a token with a NaN, infinite or positive log-prob leaves the policy-gradient term, alone or with its "
        "sequence; with the first two the host's loss becomes NaN (slime), or counts it with ratio 1 (miles)",
        "log-ratios are clamped to +-log_ratio_bound (20) before exp",
        "rejected tokens leave only the policy-gradient term: entropy and KL terms and denominators count all loss "
        "tokens",
        "loss: under --rollout-top-p the entropy is that of the kept ids, as the log-probs are; slime takes the whole "
        "vocabulary",
    ),
    where="Put a clone of THUDM/slime on PYTHONPATH.",
    flag_rules=rules_for(SLIME),
    without_rl="--loss-type[ =]sft_loss",
    flag_defaults=DEFAULTS,
    config_flag="custom-config-path",
)


def enable(args: Namespace) -> None:
    """Set the arguments that switch on the hooks which the settings need; refuse what those cannot do.

    Both hosts call it in every training process, and read these arguments there later; the driver process keeps its
    own. With lr_rule, Megatron's schedulers remember what a checkpoint holds. Where train data is dumped, the host's
    pass over the log-probs computes the entropy of the policy, too, but not under --rollout-top-p: that entropy would
    be of the whole vocabulary, and the log-probs are of the kept ids.

    Raises:
        ValueError: one sentence that names the flag or field to change.
    """
    from megatron_rc.collectives import is_first_process

    loaded = loaded_hosts()
    if len(loaded) != 1:
        raise ValueError("enable must be named by --custom-megatron-init-path of slime or miles, and called by it")
    complete = WithDefaults(args, DEFAULTS)
    values = assignments(complete, loaded[0])
    vars(args).update(values)
    refuse((*MEGATRON_RULES, *own_rules(loaded[0])), args, DEFAULTS)
    if read(args).lr_rule is not None:
        remember_loaded_states()
    if dumps_train_data(complete) and complete.rollout_top_p == 1:
        args.use_rollout_entropy = True
    if is_first_process():
        _logger.info("megatron_rc: %s", ", ".join(f"{name}={value}" for name, value in sorted(values.items())))
