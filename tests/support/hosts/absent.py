"""Modules that a host imports and this machine lacks: a finder that makes an empty one for each name."""

from collections.abc import Callable, Collection
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock


class Absent(MetaPathFinder, Loader):
    """Appended to sys.meta_path it is asked last, so that what is installed is imported."""

    def __init__(self, names: Collection[str], make: Callable[..., Any] = MagicMock) -> None:
        """``make(name=...)`` returns what stands in for a module."""
        self.names, self.make = names, make

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.names else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: Any = self.make(name=spec.name)
        module.__path__, module.__spec__ = [], spec
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass
