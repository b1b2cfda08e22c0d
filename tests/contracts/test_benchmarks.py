"""Tests may import benchmarks; no program of benchmarks imports what tests share, which would close a circle."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_program_of_benchmarks_imports_what_tests_share() -> None:
    shared = {
        file.stem for folder in ("support", "correction", "logprobs") for file in ROOT.glob(f"tests/{folder}/*.py")
    }
    programs = [file for file in ROOT.glob("benchmarks/**/*.py") if not file.name.startswith(("test_", "conftest"))]
    found = []
    for file in programs:
        for node in ast.walk(ast.parse(file.read_text())):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            named += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            found += [f"{file.relative_to(ROOT)} imports {name}" for name in named if name.split(".")[0] in shared]
    assert len(programs) > 40 and found == []
