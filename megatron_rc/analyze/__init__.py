"""Analyze a rollout dump: is the gap between sampler and trainer a bug or numerics, whose, and what to do about it.

``diagnose`` takes arrays, ``diagnose_dump`` a path. Nothing here needs torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_rc.analyze.diagnosis import Diagnosis, diagnose, diagnose_dump

__all__ = ["Diagnosis", "diagnose", "diagnose_dump"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.diagnosis"), name)
