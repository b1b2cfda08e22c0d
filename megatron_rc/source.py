"""Functions in the source of modules that are not imported: what a def takes, and what it does."""

import ast
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

Definition = ast.FunctionDef | ast.AsyncFunctionDef


def definition(path: Path, name: str) -> Definition | None:
    """The def of "function" or "Class.method" in a file; the last one, as Python would have it."""
    found: Any = _parsed(path, path.stat().st_mtime_ns)
    for part in name.split("."):
        named = [node for node in found.body if isinstance(node, Definition | ast.ClassDef) and node.name == part]
        if not named:
            return None
        found = named[-1]
    return found if isinstance(found, Definition) else None


@lru_cache(maxsize=32)
def _parsed(path: Path, changed: int) -> ast.Module:
    return ast.parse(path.read_bytes(), filename=str(path))


def parameters_of(node: Definition) -> str:
    """The parameters of a def, as its line has them, without annotations: "model, tokens, no_grad=False"."""
    for argument in (each for each in ast.walk(node.args) if isinstance(each, ast.arg)):
        argument.annotation = None
    return ast.unparse(node.args)


def body_of(node: Definition) -> str:
    """12 hex digits of what a def does: its syntax tree without positions, annotations, comments and docstring."""
    ignored = {"annotation", "returns", "type_params", "type_comment", "kind", "ctx"}

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(each) for each in value]
        if not isinstance(value, ast.AST):
            return value
        fields = {name: each for name, each in ast.iter_fields(value) if name not in ignored and each not in (None, [])}
        return type(value).__name__, [(name, plain(each)) for name, each in fields.items()]

    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    return sha256(repr([plain(node.args), plain(node.decorator_list), plain(body)]).encode()).hexdigest()[:12]


def added_parameters(found: str, expected: str) -> tuple[str, ...] | None:
    """The optional parameters that a def has besides the expected ones, which stand where they are expected.

    None where an expected one is missing, has moved or has another default, or a new one must be given.
    """
    (theirs, by_keyword), (ours, ours_by_keyword) = map(_defaults, (found, expected))
    both, wanted = theirs | by_keyword, ours | ours_by_keyword
    if list(theirs)[: len(ours)] != list(ours) or not ours_by_keyword.keys() <= by_keyword.keys():
        return None
    if any(both[name] != default for name, default in wanted.items()):
        return None
    added = tuple(name for name in both if name not in wanted)
    return None if any(both[name] is None for name in added) else added


def _defaults(parameters: str) -> tuple[dict[str, str | None], dict[str, str | None]]:
    """The default of each parameter, None where there is none: those by position, and those by keyword alone."""
    expression = ast.parse(f"lambda {parameters}: 0", mode="eval").body
    assert isinstance(expression, ast.Lambda)
    arguments = expression.args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = [None] * (len(positional) - len(arguments.defaults))
    values = (*required, *arguments.defaults, *arguments.kw_defaults)
    names = (each.arg for each in (*positional, *arguments.kwonlyargs))
    found = [(name, None if each is None else ast.unparse(each)) for name, each in zip(names, values, strict=True)]
    others = [(f"*{each.arg}", "") for each in (arguments.vararg, arguments.kwarg) if each]
    return dict(found[: len(positional)]), dict([*found[len(positional) :], *others])
