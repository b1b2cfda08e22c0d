"""The hook of --custom-megatron-before-log-prob-hook-path: it lets the routers say what they would choose."""

from argparse import Namespace
from collections.abc import Sequence

import torch

from megatron_rc.integrations.slime.flag_rules import settings_for
from megatron_rc.integrations.slime.routes import WATCH


def before_log_prob(args: Namespace, model: Sequence[torch.nn.Module], store_prefix: str) -> None:
    """Watch the routers in the pass over the old log-probs, for which ``store_prefix`` is "", and in no other."""
    settings_for("before_log_prob", args)
    WATCH.end()
    if store_prefix == "" and getattr(model[0], "role", "actor") == "actor":
        WATCH.begin(model)
