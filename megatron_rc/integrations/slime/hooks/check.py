"""The hook of --custom-megatron-init-path that refuses what the other hooks cannot do, before the model is built."""

from argparse import Namespace

from megatron_rc.integrations.flag_rules import MEGATRON_RULES, refuse
from megatron_rc.integrations.slime.flag_rules import DEFAULTS, OWN_RULES, dumps_train_data, settings_for
from megatron_rc.integrations.slime.refusals import HOOK_RULES
from megatron_rc.integrations.slime.rule_state import remember_loaded_states
from megatron_rc.integrations.slime.settings import names, read


def check(args: Namespace) -> None:
    """Refuse what the hooks named in ``args`` cannot do, before the model is built; let a dump hold the entropy.

    With lr_rule, Megatron's schedulers remember the state of the rule that a checkpoint holds.

    Where train data is dumped, --use-rollout-entropy is switched on in this process: the host's own pass over the
    log-probs then computes the entropy of the policy. Not under --rollout-top-p, because the host takes the entropy of
    the whole vocabulary and the log-probs of the kept ids.

    Raises:
        ValueError: one sentence naming what to change.
    """
    for hook in HOOK_RULES:
        if hook == "check" or names(args, hook):
            settings_for(hook, args)
    if read(args).lr_rule is not None:
        remember_loaded_states()
    refuse((*MEGATRON_RULES, *OWN_RULES), args, DEFAULTS)
    if dumps_train_data(Namespace(**{**DEFAULTS, **vars(args)})) and getattr(args, "rollout_top_p", 1.0) == 1:
        args.use_rollout_entropy = True
