"""Symbol and Host: what a patch replaces in another codebase, looked up in its source without importing it."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, NamedTuple

Function = Callable[..., Any]


@dataclass(frozen=True)
class Symbol:
    """One function or method of a host codebase that a patch replaces."""

    module: str
    """Where it is defined, such as "megatron.rl.rl_utils"."""
    name: str
    """"function" or "Class.method"."""
    parameters: str
    """As in its def line, with defaults and without annotations: "model, tokens, no_grad=False"."""
    make: Callable[[Function, Any], Function | None]
    """(original, context) -> its replacement, or None where the context asks for none."""
    summary: str
    """What the replacement does, one line."""

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True)
class Host:
    """A codebase that `patch` knows."""

    name: str
    module: str
    """The host is there when this module can be found."""
    symbols: tuple[Symbol, ...]
    versions: tuple[str, ...]
    """Versions whose symbols were read; a longer version that begins with one of them is that version."""
    read_version: Callable[[], str | None]
    """The version that is installed, without importing the host; None where it has none."""
    prepare: Callable[[Any, Any], Any]
    """(correction, lr_decay) -> the context of every `make` of one patch; ValueError for what cannot be honoured."""
    tested: str = ""
    """Which state of the host the contract tests ran against, such as a commit."""
    differences: tuple[str, ...] = ()
    """What a patched host does otherwise than before, on purpose, even with the correction "none"."""
    contains: tuple[str, ...] = ()
    """Hosts that can be found wherever this one can; `patch("auto")` prefers this one to them."""
    release: Callable[[Any], None] = lambda context: None
    """Undo what the replacements of a context have attached to the host's objects; may refuse by ValueError."""

    def is_importable(self) -> bool:
        return find_module(self.module) is not None

    def knows(self, version: str | None) -> bool:
        """Whether the symbols of this version were read; a host without versions is known by its symbols alone."""
        return not self.versions or is_release(version, self.versions)


def is_release(version: str | None, of: tuple[str, ...]) -> bool:
    """Whether a version is one of the known ones, or a release of it: 0.20.1rc0 is of 0.20, 0.2 is not."""
    return version is not None and any((version + ".").startswith(known.rstrip(".") + ".") for known in of)


def imported_when_called(module: str, name: str) -> Function:
    """The function ``name`` of ``module``, which is imported at the first call: a table of symbols loads no torch."""

    def call(*args: Any) -> Any:
        return getattr(import_module(module), name)(*args)

    return call


class Found(NamedTuple):
    """What the source of a host says about a symbol."""

    symbol: Symbol
    parameters: str | None
    """As in `Symbol.parameters`; None where the symbol is missing."""
    problem: str | None
    """One sentence, where it cannot be replaced."""


def inspect_symbols(host: Host) -> list[Found]:
    """Read the def line of every symbol of a host from its files; nothing is imported and nothing replaced.

    Returns:
        One Found a symbol, in the order of `host.symbols`.
    """
    return [_inspect(symbol) for symbol in host.symbols]


def _inspect(symbol: Symbol) -> Found:
    spec = find_module(symbol.module)
    if spec is None or spec.origin is None:
        return Found(symbol, None, f"module {symbol.module} is missing")
    node = definition(Path(spec.origin), symbol.name)
    if node is None:
        return Found(symbol, None, f"{symbol.path} is missing from {spec.origin}")
    found = parameters_of(node)
    if found != symbol.parameters:
        return Found(symbol, found, f"{symbol.path} takes ({found}), but the patch was made for ({symbol.parameters})")
    return Found(symbol, found, None)


def find_module(name: str) -> ModuleSpec | None:
    """Where a module is, without importing its parents as importlib.util.find_spec does; the spec has its last name."""
    path: list[str] | None = None
    spec = None
    for part in name.split("."):
        # by its dotted name, a namespace package would look for its parent among the imported modules
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return spec


def definition(path: Path, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The def of "function" or "Class.method" in a file; the last one, as Python would have it."""
    body: list[ast.stmt] = _parsed(path, path.stat().st_mtime_ns).body
    *classes, function = name.split(".")
    for wanted in classes:
        bodies = [node.body for node in body if isinstance(node, ast.ClassDef) and node.name == wanted]
        if not bodies:
            return None
        body = bodies[-1]
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    found = [node for node in body if isinstance(node, kinds) and node.name == function]
    return found[-1] if found else None


@lru_cache(maxsize=32)
def _parsed(path: Path, changed: int) -> ast.Module:
    return ast.parse(path.read_bytes(), filename=str(path))


def parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The parameters of a def, as `Symbol.parameters` has them."""
    arguments = node.args
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.unparse(arguments)
