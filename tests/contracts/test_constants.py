"""A number with a name says why it has this value: in a docstring below it, or in a comment above it or on its line."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def is_number(node: ast.expr | None) -> bool:
    """A number, arithmetic of numbers, or a tuple, list or dict of them alone."""
    match node:
        case ast.Constant(value=value):
            return isinstance(value, int | float) and not isinstance(value, bool)
        case ast.UnaryOp(operand=operand):
            return is_number(operand)
        case ast.BinOp(left=left, right=right):
            return is_number(left) and is_number(right)
        case ast.Tuple(elts=values) | ast.List(elts=values) | ast.Dict(values=values):
            return bool(values) and all(map(is_number, values))
    return False


def bare_constants(source: str) -> Iterator[str]:
    """Names of the constants of a module that give no reason."""
    lines, body = source.splitlines(), ast.parse(source).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_number(node.value):
            docstring = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            own = [line for line in lines[node.lineno - 1 : node.end_lineno] if not line.endswith("# fmt: skip")]
            if not docstring and not lines[node.lineno - 2].startswith("#") and not any("  # " in line for line in own):
                yield ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)


def test_every_number_with_a_name_says_why() -> None:
    files = [file for folder in ("megatron_rc", "triton_kernels") for file in sorted((ROOT / folder).rglob("*.py"))]
    assert [f"{file.relative_to(ROOT)}: {name}" for file in files for name in bare_constants(file.read_text())] == []


def test_a_bare_number_is_seen_and_a_reason_in_any_of_the_three_places_is_too() -> None:
    bare = "A = 5\nB: float = -2.0**3\nC = (1, 2)\nD = {'a': 1}\nE = 2 * 3  # fmt: skip\nF, G = True, 'text'\n"
    assert [*bare_constants(bare)] == ["A", "B", "C", "D", "E"]
    assert [*bare_constants('A = 5\n"""Why."""\n# why\nB = 5\nC = 5  # why\n')] == []
