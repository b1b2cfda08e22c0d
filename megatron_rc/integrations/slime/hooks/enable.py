"""The hook of --custom-megatron-init-path that switches the other hooks on: one flag instead of all."""

import logging
import sys
from argparse import Namespace

from megatron_rc.collectives import is_first_process
from megatron_rc.integrations.flag_rules import refuse
from megatron_rc.integrations.slime.family import FAMILY, MILES, Member
from megatron_rc.integrations.slime.flag_rules import DEFAULTS, MILES_TOP_P
from megatron_rc.integrations.slime.hook_choice import assignments
from megatron_rc.integrations.slime.hooks.check import check

_logger = logging.getLogger(__name__)


def enable(args: Namespace) -> None:
    """Set the arguments that switch on the hooks which the settings need, then `check` them.

    Both hosts call it in every training process before they read these arguments: slime reads them in its actor after
    this hook, in its loss and before its train step, miles likewise. Arguments that only the driver process reads stay
    as they are.

    Args:
        args: the host's arguments, with the key megatron_rc; changed in place.

    Raises:
        ValueError: one sentence naming what to change.
    """
    host = _host()
    if host is MILES:
        refuse([MILES_TOP_P], args, DEFAULTS)
    values = assignments(args, whole_rollouts=host.whole_rollouts)
    vars(args).update(values)
    check(args)
    if is_first_process():
        _logger.info("megatron_rc: %s", ", ".join(f"{name}={value}" for name, value in sorted(values.items())))


def _host() -> Member:
    """The host whose process this is: the one that has loaded the module which calls this hook."""
    loaded = [host for host in FAMILY if f"{host.name}.backends.megatron_utils.initialize" in sys.modules]
    if len(loaded) != 1:
        raise ValueError("enable must be named by --custom-megatron-init-path of slime or miles, and called by it")
    return loaded[0]
