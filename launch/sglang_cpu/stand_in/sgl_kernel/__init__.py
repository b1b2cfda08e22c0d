"""Stands where SGLang's CUDA kernels would be, for a server on a machine without a GPU.

SGLang imports this name unconditionally, and the published package of that name loads CUDA libraries when it is
imported. Here every name exists and none does anything: a call raises an error that names the kernel.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.4.10"


class MissingKernel:
    """A name that can be imported, stored and looked into, but not called."""

    # for copies, which are looked into before they have their own
    _name = __name__

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> "MissingKernel":
        return _missing(self._name, attribute)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{self._name} was called: this server runs on a CPU, without SGLang's CUDA kernels")

    def __repr__(self) -> str:
        return f"<missing kernel {self._name}>"


def _missing(owner: str, attribute: str) -> MissingKernel:
    # import, inspect, copy and pickle probe for dunder names and must hear that they are absent
    if attribute.startswith("__") and attribute.endswith("__"):
        raise AttributeError(f"{owner} has no attribute {attribute!r}")
    return MissingKernel(f"{owner}.{attribute}")


def __getattr__(attribute: str) -> MissingKernel:
    return _missing(__name__, attribute)


class _Submodule(ModuleType):
    def __getattr__(self, attribute: str) -> MissingKernel:
        return _missing(self.__name__, attribute)


class _Submodules(MetaPathFinder, Loader):
    """Finds every ``sgl_kernel.<anything>`` as a package of missing kernels."""

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Submodule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: every name of the module is missing."""


sys.meta_path.append(_Submodules())
