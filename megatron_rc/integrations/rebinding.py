"""Every name under which the loaded modules hold a function: imports by value, aliases, classes, tables."""

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from types import ModuleType
from typing import Any

_NO_HOSTS = {*sys.stdlib_module_names, "numpy", "pydantic", "pyarrow", "torch", "transformers", "triton"}
"""Packages whose modules know no host."""
_CONTAINERS = (dict, OrderedDict, defaultdict, list, tuple, set, frozenset, partial)
"""Exactly these: other mappings may import or compute what they hold when they are read."""


def rebind(functions: Mapping[Any, Any]) -> tuple[str, ...]:
    """Replace each key of ``functions`` by its value, wherever a loaded module holds that key.

    That is under every name of a module and of the classes that it defines, and one level into the dicts, lists,
    tuples, sets and partials of these names.

    Returns:
        Names of what holds a function and cannot be changed: tuples, sets and partials.
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
