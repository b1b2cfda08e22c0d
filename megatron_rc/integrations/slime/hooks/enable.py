"""What `enable` does in a training process of slime or miles."""

import logging
import sys
from argparse import Namespace

from megatron_rc.collectives import is_first_process
from megatron_rc.integrations.facts import MEGATRON_RULES
from megatron_rc.integrations.flag_rules import WithDefaults, refuse
from megatron_rc.integrations.slime.chosen_hooks import assignments
from megatron_rc.integrations.slime.flag_rules import DEFAULTS, dumps_train_data, own_rules
from megatron_rc.integrations.slime.hooks.before_train_step import remember_loaded_states
from megatron_rc.integrations.slime.settings import FAMILY, read

_logger = logging.getLogger(__name__)


def enabled(args: Namespace) -> None:
    """`megatron_rc.integrations.slime.enable`."""
    # the host whose process this is has loaded the module which calls this hook
    loaded = [host for host in FAMILY if f"{host.name}.backends.megatron_utils.initialize" in sys.modules]
    if len(loaded) != 1:
        raise ValueError("enable must be named by --custom-megatron-init-path of slime or miles, and called by it")
    (host,) = loaded
    values = assignments(WithDefaults(args, DEFAULTS), host)
    vars(args).update(values)
    refuse((*MEGATRON_RULES, *own_rules(host)), args, DEFAULTS)
    if read(args).lr_rule is not None:
        remember_loaded_states()
    complete = WithDefaults(args, DEFAULTS)
    if dumps_train_data(complete) and complete.rollout_top_p == 1:
        args.use_rollout_entropy = True
    if is_first_process():
        _logger.info("megatron_rc: %s", ", ".join(f"{name}={value}" for name, value in sorted(values.items())))
