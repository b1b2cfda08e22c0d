"""The hooks of --custom-megatron-init-path: `enable` switches the others on, `check` refuses what they cannot do."""

import logging
import sys
from argparse import Namespace

from megatron_rc.collectives import is_first_process
from megatron_rc.integrations.facts import MEGATRON_RULES
from megatron_rc.integrations.flag_rules import refuse
from megatron_rc.integrations.slime.flag_rules import DEFAULTS, OWN_RULES, dumps_train_data, settings_for
from megatron_rc.integrations.slime.hooks.before_train_step import remember_loaded_states
from megatron_rc.integrations.slime.refusals import HOOK_RULES, MILES_TOP_P, TOP_K
from megatron_rc.integrations.slime.settings import FAMILY, MILES, assignments, names, read

_logger = logging.getLogger(__name__)


def enable(args: Namespace) -> None:
    """Set the arguments that switch on the hooks which the settings need, then `check` them.

    Both hosts call it in every training process before they read these arguments: slime reads them in its actor after
    this hook, in its loss and before its train step, miles likewise. Arguments that only the driver process reads stay
    as they are.
    """
    # the host whose process this is has loaded the module which calls this hook
    loaded = [host for host in FAMILY if f"{host.name}.backends.megatron_utils.initialize" in sys.modules]
    if len(loaded) != 1:
        raise ValueError("enable must be named by --custom-megatron-init-path of slime or miles, and called by it")
    (host,) = loaded
    if host is MILES:
        refuse([MILES_TOP_P], args, DEFAULTS)
    values = assignments(args, whole_rollouts=host.whole_rollouts)
    vars(args).update(values)
    check(args)
    if is_first_process():
        _logger.info("megatron_rc: %s", ", ".join(f"{name}={value}" for name, value in sorted(values.items())))


def check(args: Namespace) -> None:
    """Refuse what the hooks named in ``args`` cannot do, before the model is built; let a dump hold the entropy.

    With lr_rule, Megatron's schedulers remember the state of the rule that a checkpoint holds.

    Where train data is dumped, --use-rollout-entropy is switched on in this process: the host's own pass over the
    log-probs then computes the entropy of the policy. Not under --rollout-top-p, because the host takes the entropy of
    the whole vocabulary and the log-probs of the kept ids.
    """
    for hook in HOOK_RULES:
        if hook == "check" or names(args, hook):
            settings_for(hook, args)
    if read(args).lr_rule is not None:
        remember_loaded_states()
    refuse((*MEGATRON_RULES, *OWN_RULES, TOP_K), args, DEFAULTS)
    if dumps_train_data(Namespace(**{**DEFAULTS, **vars(args)})) and getattr(args, "rollout_top_p", 1.0) == 1:
        args.use_rollout_entropy = True
