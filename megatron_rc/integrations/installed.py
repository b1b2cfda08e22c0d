"""The patches that are in place: which functions were replaced, wherever a loaded module holds them, and back again.

A host whose processes import only parts of it is patched part by part, right after each import.
"""

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any

from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.integrations.symbols import Host, Symbol
from megatron_rc.learning_rate.rule import LRRule
from megatron_rc.settings.head import LOGITS, HeadOptions


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

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
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


@dataclass(eq=False)
class Place:
    """A function of a host and its replacement."""

    symbol: Symbol
    owner: Any
    """Module or class."""
    original: FunctionType
    replacement: Any
    """A function, so that a class that holds it binds it as it binds the original."""

    @property
    def attribute(self) -> str:
        return self.symbol.name.rpartition(".")[2]


@dataclass(eq=False)
class Installed:
    """A patched host."""

    host: Host
    version: str | None
    correction: RolloutCorrection | None
    lr_rule: LRRule | None
    session: Any
    """What `Host.prepare` returned; the replacements share it."""
    head: HeadOptions = LOGITS
    places: list[Place] = field(default_factory=list)
    holders: list[Any] = field(default_factory=list)
    """Patches that have not been undone; the host is restored with the last of them."""
    later: AfterImport = field(default_factory=AfterImport)
    """Replacements in modules of the host that this process has not imported."""
    held: tuple[str, ...] = ()
    """Names that keep functions of the host which were replaced elsewhere."""

    @property
    def wanted(self) -> list[Symbol]:
        """The symbols that its settings replace."""
        return [symbol for symbol in self.host.symbols if symbol.make is not None and symbol.needed(self.session)]

    def replace(self, places: list[Place]) -> None:
        """Put the replacements into their owners, and wherever a loaded module holds the original."""
        for place in places:
            setattr(place.owner, place.attribute, place.replacement)
        self.held += rebind({place.original: place.replacement for place in places})
        self.places += places

    def restore(self) -> None:
        """Give the host its functions back; ValueError, and nothing restored, if one was replaced after the patch."""
        for place in self.places:
            if vars(place.owner).get(place.attribute) is not place.replacement:
                raise ValueError(f"{place.symbol.path} was replaced after patch; undo that first")
        self.host.release(self.session)
        self.later.forget()
        for place in self.places:
            setattr(place.owner, place.attribute, place.original)
        # also in modules that imported a replacement since
        rebind({place.replacement: place.original for place in self.places})


INSTALLED: dict[str, Installed] = {}
"""By name of the host."""


def session_of(host: str) -> Any | None:
    """The session of the patch of a host; None where it is not patched."""
    return INSTALLED[host].session if host in INSTALLED else None


_NO_HOSTS = {*sys.stdlib_module_names, "numpy", "pydantic", "pyarrow", "torch", "transformers", "triton"}
"""Packages whose modules know no host."""
_CONTAINERS = (dict, OrderedDict, defaultdict, list, tuple, set, frozenset, partial)
"""Exactly these: other mappings may import or compute what they hold when they are read."""


def rebind(functions: Mapping[Any, Any]) -> tuple[str, ...]:
    """Replace each key of ``functions`` by its value, wherever a loaded module holds that key.

    That is under every name of a module and of the classes that it defines, and one level into the dicts, lists,
    tuples, sets and partials of these names. Answers with names of those that cannot be changed: the last three.
    """
    others = {id(before): (before, after) for before, after in functions.items()}
    held: list[str] = []
    for owner, where in list(_owners()):
        for name, value in list(vars(owner).items()):
            if id(value) in others:
                setattr(owner, name, others[id(value)][1])
            elif type(value) is staticmethod and id(value.__func__) in others:
                setattr(owner, name, staticmethod(others[id(value.__func__)][1]))
            elif type(value) in _CONTAINERS and _change(value, others):
                held.append(f"{where}.{name}")
    return tuple(held)


def _owners() -> Iterator[tuple[Any, str]]:
    """Modules and the classes that they define, each with its name."""
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or name.partition(".")[0] in _NO_HOSTS:
            continue
        yield module, name
        for value in list(vars(module).values()):
            if issubclass(type(value), type) and value.__module__ == name:
                yield value, f"{name}.{value.__qualname__}"


def _change(container: Any, others: Mapping[int, tuple[Any, Any]]) -> bool:
    """Replace functions in a dict or list; True for a container that still holds one, because it cannot change."""
    if isinstance(container, partial):
        return id(container.func) in others
    if isinstance(container, tuple | set | frozenset):
        return any(id(value) in others for value in list(container))
    for key, value in list(container.items() if isinstance(container, dict) else enumerate(container)):
        if id(value) in others:
            container[key] = others[id(value)][1]
    return False
