"""The first batch of a process: a function of the host against what we take it for."""

import logging
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_rc.integrations.hosts import HOSTS
from megatron_rc.integrations.slime.settings import loaded_hosts
from megatron_rc.integrations.symbols import Function

COMPARED: set[str] = set()
"""Functions that this process has compared."""


def compare_once(name: str, ours: Callable[[], Tensor], theirs: Callable[[Function], Tensor]) -> None:
    """Refuse a host whose function answers otherwise than ours; where its answer is not finite, nothing is compared.

    Args:
        name: of a symbol of the host that has loaded slime's or miles' `initialize` in this process.
        ours, theirs: the answer without a correction, of us and of the function.
    """
    symbols = [symbol for host in loaded_hosts() for symbol in HOSTS[host].symbols if symbol.name == name]
    modules = [sys.modules[symbol.module] for symbol in symbols if symbol.module in sys.modules]
    if not modules or name in COMPARED:
        return
    COMPARED.add(name)
    try:
        with torch.no_grad():
            expected, found = theirs(getattr(modules[0], name)), ours()
    except torch.OutOfMemoryError:
        logging.getLogger(__name__).warning("%s was not compared with ours: the device has no memory for both", name)
        return
    if expected.isfinite().all() and not torch.allclose(found, expected, rtol=1e-4, atol=1e-6):
        raise ValueError(
            f"{name} of this host is not what megatron_rc takes it for: {expected.mean():.6g} on the first batch, "
            f"where ours has {found.mean():.6g}; nothing was updated"
        )
