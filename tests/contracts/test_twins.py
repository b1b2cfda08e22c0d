"""Both backends have one shape: a module of fused/ has the functions of its twin in reference/."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "megatron_rc"
FUSED = {
    "correction/fused.py": "correction/reference/correction.py",
    "logprobs/fused/linear.py": "logprobs/reference/linear.py",
    "logprobs/fused/rows.py": "logprobs/reference/rows.py",
    "loss/fused.py": "loss/reference.py",
    "moe/fused.py": "moe/reference.py",
}


def public_functions(path: Path) -> dict[str, str]:
    """Name -> arguments and result, as written."""
    tree = ast.parse(path.read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    return {f.name: f"({ast.unparse(f.args)}) -> {ast.unparse(f.returns)}" for f in functions if f.returns}


@pytest.mark.parametrize("name", FUSED, ids=str)
def test_every_function_of_a_fused_module_has_a_reference_twin_of_the_same_signature(name: str) -> None:
    fused, reference = (public_functions(PACKAGE / path) for path in (name, FUSED[name]))
    assert fused
    assert fused == {function: reference.get(function) for function in fused}


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
