"""What a Megatron-LM job asks of its machine, answered where there is no CUDA, no Python 3.12 or not every package.

Every process that has this folder on PYTHONPATH imports it at its start. Only processes with RANK get the stand-ins for
CUDA.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types
import typing
from typing import Any

SERVICES = {"wandb", "httpx", "openai", "fastapi", "uvicorn"}


def _nothing(owner: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Nothing


class _Anything(type):
    __getattr__ = _nothing


class _Nothing(metaclass=_Anything):
    """Good for an annotation or a base class; nothing that runs in the tests calls it."""


class _Package(types.ModuleType):
    __getattr__ = _nothing


class _Services(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes last, so that an installed package is found before it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in SERVICES else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Package(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


sys.meta_path.append(_Services())
if not hasattr(typing, "override"):
    typing.override = lambda method: method  # type: ignore[attr-defined]
if "RANK" in os.environ:
    import cuda_names

    cuda_names.install()
