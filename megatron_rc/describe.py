"""The reference of a settings dataclass, read from its source: every field with its type, default and docstring."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple


class Field(NamedTuple):
    name: str
    """Dotted, as `--set` takes it."""
    type: str
    default: str
    doc: str


def describe(cls: Any, prefix: str = "") -> Iterator[Field]:
    """Fields of ``cls`` and of the dataclasses nested in it, in order."""
    hints = typing.get_type_hints(cls)
    docs = _docstrings(cls)
    for field in dataclasses.fields(cls):
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(hints[field.name]):
            yield from describe(hints[field.name], name + ".")
        else:
            yield Field(name, _type_name(hints[field.name]), _default(field), docs.get(field.name, ""))


def markdown(cls: Any) -> str:
    """One table a section of ``cls``."""
    lines: list[str] = []
    section = None
    for field in describe(cls):
        head = field.name.rpartition(".")[0]
        if head != section:
            section = head
            lines += ["", f"## {head or 'job'}", "", "| field | type | default | meaning |", "|---|---|---|---|"]
        cells = [f"`{field.name}`", f"`{field.type}`", f"`{field.default}`", field.doc]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines[1:]) + "\n"


def _docstrings(cls: Any) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        match field, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = " ".join(text.split())
    return docs


def _type_name(hint: Any) -> str:
    if isinstance(hint, type) and not typing.get_args(hint):
        return hint.__name__
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(map(str, typing.get_args(hint)))
    if type(None) in typing.get_args(hint):
        return " | ".join(_type_name(arg) if arg is not type(None) else "null" for arg in typing.get_args(hint))
    return str(hint).replace("typing.", "").replace("megatron_rc.config.", "")


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
