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


def test_one_function_alone_chooses_a_backend() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                assert not any("fused" in name.split(".")[:-1] or name.endswith(".fused") for name in names), path
