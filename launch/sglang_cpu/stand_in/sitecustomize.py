"""Runs first in every process of the CPU server: takes out the two pieces that need CUDA and cannot be switched off.

SGLang starts its scheduler and detokenizer as new processes, so this is found on PYTHONPATH and not patched in once.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

# torchvision's compiled operators do not load with the CPU build of torch, and describing them then raises
sys.modules["torchvision._meta_registrations"] = ModuleType("torchvision._meta_registrations")

PINNED_MEMORY = "sglang.srt.mem_cache.pool_host.common"


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Memory that no GPU reads has nothing to be registered with."""


class _UnpinnedLoader(SourceFileLoader):
    """Replaces the calls into the CUDA runtime right after the module's body, before anyone imports them from it."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        for name in ("_cuda_host_register", "_cuda_host_unregister"):
            if not hasattr(module, name):
                raise ImportError(f"{PINNED_MEMORY} has no {name}: this is not the SGLang of requirements.txt")
            setattr(module, name, _nothing)


class _UnpinnedMemory(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, *_: Any) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == PINNED_MEMORY else None
        if spec is not None and spec.origin is not None:
            spec.loader = _UnpinnedLoader(fullname, spec.origin)
        return spec


sys.meta_path.insert(0, _UnpinnedMemory())
