"""Both backends have one shape: a module of fused/ has the functions of its twin in reference/."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "megatron_rc"
FUSED = sorted(path.name for path in (PACKAGE / "fused").glob("*.py") if path.name != "__init__.py")


def public_functions(path: Path) -> dict[str, str]:
    """Name -> arguments and result, as written."""
    tree = ast.parse(path.read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    return {f.name: f"({ast.unparse(f.args)}) -> {ast.unparse(f.returns)}" for f in functions if f.returns}


@pytest.mark.parametrize("name", FUSED)
def test_every_function_of_a_fused_module_has_a_reference_twin_of_the_same_signature(name: str) -> None:
    fused, reference = (public_functions(PACKAGE / folder / name) for folder in ("fused", "reference"))
    assert fused
    assert fused == {function: reference.get(function) for function in fused}


def test_one_function_alone_chooses_a_backend() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_rc.fused"):
                assert [alias.name for alias in node.names] == ["backend_module"], path
