"""A backend is chosen in one place per room, where mypy holds the kernels and their twin in PyTorch to one protocol."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "megatron_rc"


def test_only_a_function_named_computing_imports_what_drives_kernels() -> None:
    choosing = 0
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "computing"]
        allowed = {id(node) for function in functions for node in ast.walk(function)}
        choosing += len(functions)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and id(node) not in allowed:
                names = [f"{node.module}.{alias.name}".split(".") for alias in node.names]
                assert not any("fused" in parts for parts in names), path
    assert choosing
