"""Functions of a source tree, run without what the rest of their file imports."""

import __future__

import ast
from collections.abc import Collection
from pathlib import Path
from typing import Any


def run_definitions(path: str | Path, wanted: Collection[str], names: dict[str, Any], inside: str = "") -> None:
    """Define these functions and classes of a file, or of a class in it, among ``names``, which they may use."""
    module = ast.parse(Path(path).read_bytes())
    if inside:
        (module.body,) = (node.body for node in module.body if isinstance(node, ast.ClassDef) and node.name == inside)
    kinds = (ast.FunctionDef, ast.ClassDef)
    module.body = [node for node in module.body if isinstance(node, kinds) and node.name in wanted]
    assert len(module.body) == len(wanted), f"{wanted} of {path}"
    exec(compile(module, str(path), "exec", flags=__future__.annotations.compiler_flag), names)
