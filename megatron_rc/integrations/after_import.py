"""Calls that run once a module is imported: a host whose processes import only parts of it is patched part by part."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class AfterImport(MetaPathFinder):
    """Calls functions right after the first import of the modules that they wait for, before anybody reads them."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Callable[[], Any]]] = {}

    def call(self, module: str, function: Callable[[], Any]) -> None:
        """Call a function once ``module``, which is not imported yet, is; what it raises fails that import."""
        self._waiting.setdefault(module, []).append(function)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def forget(self) -> None:
        """Drop every call that still waits."""
        self._waiting.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._waiting:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            for function in self._waiting.get(fullname, ()):
                function()
            # kept where a function failed: the next attempt to import the module must fail, too
            self._waiting.pop(fullname, None)

        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec
