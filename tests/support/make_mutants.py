"""Choose the mutants of mutants.txt by a fixed seed, from lines that tests run: `make_mutants.py DATA`."""

from __future__ import annotations

import ast
import random
import re
import sys
from collections import Counter
from pathlib import Path

import mutants as m

TOUCHED = re.compile(
    r"triton_kernels/|megatron_rc/(fused/|cluster/|analyze/readers/|analyze/(changes|timeline|lead_lag)\.py|analyze/rules/"
    r"|jobs/(grid|grid_settings|progress|verdicts|workers)\.py|report/|integrations/|training/two_policies\.py"
    r"|(main_grad|wide_matmul|linear_head|linear_distribution|head_chunks|head_inputs|part_metrics|metrics|alarm|horizon)\.py)"
)
"""Files whose tests are merged, moved or deleted."""
LEAVING = re.compile(
    r"cluster/(meeting|step_time|launch|node|processes)\.py|analyze/lead_lag_runs\.py|readers/(pickle_bounds|parquet_footer)\.py"
)
"""Files of which much is about to be deleted."""
COMPARE = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
ARITHMETIC = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*"}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}
NO_NUMBERS = r"['\"\[]|(?i:path|folder|file|dir\b|root|name|suffix|prefix|text|words|page|line\b)"
"""Of a sum or quotient of texts, lists or paths, whose mutant raises a TypeError at once."""
CRASHES = r"program_id|stride\(|tl\.(load|store)"
"""Lines of kernels whose mutants read foreign memory."""
PER_FILE, PER_KIND = 2, 28


def edits(tree: ast.Module, lines: list[bytes]) -> list[tuple[str, int, int, int, bytes]]:
    """(kind, line, first byte, last byte, other text) of all that may be changed on one line."""
    found = []

    def between(kind: str, left: ast.expr, right: ast.expr, table: dict[str, str]) -> None:
        if left.end_lineno == right.lineno:
            gap = lines[right.lineno - 1][left.end_col_offset : right.col_offset]
            for match in re.finditer(rb"[<>=!]=|//|[<>+*/-]|\b(?:and|or)\b", gap):
                if match[0].decode() in table:
                    at = left.end_col_offset + match.start()
                    found.append((kind, right.lineno, at, at + len(match[0]), table[match[0].decode()].encode()))

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.arguments):
            return
        if isinstance(node, ast.Call) and re.search(
            r"warn|print|say|log$|append_text|ValueError", ast.unparse(node.func)
        ):
            return
        if isinstance(node, ast.keyword) and node.arg in ("strict", "exist_ok"):
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Compare):
            for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
                between("comparison", left, right, COMPARE)
        if isinstance(node, ast.BinOp) and not re.search(NO_NUMBERS, ast.unparse(node)):
            between("arithmetic", node.left, node.right, ARITHMETIC)
        if isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                between("logic", left, right, {"and": "or", "or": "and"})
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and node.lineno == node.operand.lineno:
            found.append(("logic", node.lineno, node.col_offset, node.operand.col_offset, b""))
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name in NAMES and node.func.end_lineno == node.func.lineno:
                end = node.func.end_col_offset or 0
                found.append(("name", node.func.lineno, end - len(name), end, NAMES[name].encode()))
        if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            value = node.value
            new = (
                str(not value)
                if isinstance(value, bool)
                else repr(value + 1 if isinstance(value, int) and value < 10 else value * 2 or 1.0)
            )
            kind = "truth" if isinstance(value, bool) else "number"
            found.append((kind, node.lineno, node.col_offset, node.end_col_offset or 0, new.encode()))
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "slice", "type_params"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child)

    visit(tree)
    return found


def candidates(root: Path, covered: m.Covered) -> list[tuple[str, m.Mutant]]:
    out = []
    for path in sorted([*root.glob("megatron_rc/**/*.py"), *root.glob("triton_kernels/*.py")]):
        if path != path.resolve() or LEAVING.search(str(path)):
            continue
        text = path.read_text()
        lines = text.encode().splitlines()
        try:
            tests = covered.by_line(path)
        except StopIteration:
            continue
        for kind, line, first, last, new in edits(ast.parse(text), lines):
            if line not in tests or line > len(lines) or re.search(CRASHES, lines[line - 1].decode()):
                continue
            named = [(len(span), name) for name, of in m.definitions(path).items() for span, _ in of if line in span]
            other = lines[line - 1][:first] + new + lines[line - 1][last:]
            old = lines[line - 1].decode().strip()
            mutant = m.Mutant(0, str(path.relative_to(root)), min(named)[1], old, other.decode().strip())
            try:
                compile(m.mutated(path, line, mutant.new), str(path), "exec")
                m.find(mutant)
            except (LookupError, SyntaxError):
                continue
            if old != mutant.new and '"' not in old.replace('""', ""):
                out.append((kind, mutant))
    return out


def main(root: Path, data: Path) -> None:
    covered = m.Covered(data)
    pool = candidates(root, covered)

    def tested(mutant: m.Mutant) -> bool:
        return bool(covered.of(*m.find(mutant), mutant.name))

    random.Random(28).shuffle(pool)
    files: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    chosen: list[m.Mutant] = []
    lines: set[str] = set()
    left = {True: 60, False: 40}
    for kind, mutant in pool:
        touched = bool(TOUCHED.match(mutant.file))
        if not any(left.values()):
            break
        if (
            left[touched]
            and files[mutant.file] < PER_FILE
            and kinds[kind] < PER_KIND
            and mutant.old not in lines
            and tested(mutant)
        ):
            left[touched] -= 1
            files[mutant.file] += 1
            kinds[kind] += 1
            chosen.append(mutant)
            lines.add(mutant.old)
    chosen.sort(key=lambda mutant: (not TOUCHED.match(mutant.file), mutant.file, mutant.name, mutant.old))
    blocks = [f"{n:03} {one.file}\n{one.name}\n- {one.old}\n+ {one.new}\n" for n, one in enumerate(chosen, 1)]
    m.LIST.write_text("\n".join(blocks))
    print(left, kinds, len(pool))


if __name__ == "__main__":
    main(m.ROOT, Path(sys.argv[1]))
