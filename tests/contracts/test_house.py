"""The house stays small enough to walk, a number with a name says why it has this value, and a run has all tests."""

import ast
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ceilings import GENERATED, LINES, WORDS

floors = runpy.run_path(str(Path(__file__).with_name("test_floors.py")))
FLOORS, ROOT = floors["FLOORS"], floors["ROOT"]
FILES, ROOMS, STOREYS, PARAMETERS = 12, 32, 12, 17
"""At most: Python files at the root of megatron_rc, those and its folders, floors, parameters of a function."""
FEWER = {"correct": 14, "policy_loss": 14, "linear_policy_loss": 16, "analyze": 24}
"""Parameters of the functions that users call most, and of the command with the most options."""


def parameters(source: str) -> Iterator[tuple[str, int]]:
    """Name and number of parameters of every function that is no kernel of Triton."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg)
            if not any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                yield node.name, sum(name is not None for name in names)


SOURCES = {name: path.read_text() for name, path in floors["modules"](ROOT).items()}


def test_the_house_has_few_files_rooms_and_floors() -> None:
    package = ROOT / "megatron_rc"
    files = len([*package.glob("*.py")])
    folders = len([path for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"])
    print(f"{files} files at the root, {files + folders} rooms, {len(FLOORS)} floors")
    assert files <= FILES and files + folders <= ROOMS and len(FLOORS) <= STOREYS


def test_no_function_has_more_parameters_than_a_reader_keeps_in_mind() -> None:
    counted = [(file, *one) for file, source in SOURCES.items() for one in parameters(source)]
    assert FEWER.keys() <= {name for _, name, _ in counted}
    assert [one for one in counted if one[2] > FEWER.get(one[1], PARAMETERS)] == []


def test_kernels_of_triton_are_not_counted_and_everything_else_is() -> None:
    source = "@triton.jit\ndef k(a, b): ...\nclass C:\n    async def f(self, a, /, b, *c, d, **e): ..."
    assert list(parameters(source)) == [("f", 6)]


def imports(*folders: str) -> Iterator[tuple[str, str]]:
    """File and dotted name of every import statement."""
    for path in (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))):
        for name in floors["imported_names"]("", ast.walk(ast.parse(path.read_text()))):
            yield str(path.relative_to(ROOT)), name


def test_nothing_imports_the_kernel_folder_by_its_own_name() -> None:
    found = list(imports("megatron_rc", "triton_kernels", "tests", "benchmarks", "examples", "launch"))
    assert len(found) > 3000 and [one for one in found if one[1].split(".")[0] == "triton_kernels"] == []


def test_no_program_of_benchmarks_imports_what_tests_share() -> None:
    """Tests may import benchmarks; the other way would close a circle."""
    shared = {file.stem for room in ("support", "correction", "logprobs") for file in ROOT.glob(f"tests/{room}/*.py")}
    of_programs = [one for one in imports("benchmarks") if not Path(one[0]).name.startswith(("test_", "conftest"))]
    assert len(of_programs) > 300 and [one for one in of_programs if one[1].split(".")[0] in shared] == []


def test_only_a_function_named_computing_imports_what_drives_kernels() -> None:
    """A backend is chosen in one place per room, where mypy holds the kernels and their twin to one protocol."""
    choosing = 0
    for file, source in SOURCES.items():
        tree = ast.parse(source)
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "computing"]
        choosing += len(functions)
        allowed = {id(node) for function in functions for node in ast.walk(function)}
        elsewhere = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and id(node) not in allowed)
        assert not any("fused" in name.split(".") for name in floors["imported_names"](file, elsewhere)), file
    assert choosing


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


def listed(*patterns: str) -> list[Path]:
    """Files that are under version control, or will be; links to folders are followed nowhere."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in sorted(set(names)) if (ROOT / name).is_file()]


@pytest.mark.parametrize("area", LINES)
def test_an_area_has_no_more_lines_of_python_than_its_ceiling(area: str) -> None:
    lines = sum(path.read_bytes().count(b"\n") for path in listed(f"{area}/*.py" if area else "*.py"))
    assert 0 < lines <= LINES[area], f"{area or 'the repository'} has {lines:,} lines, its ceiling is {LINES[area]:,}"


def test_no_file_is_longer_than_one_idea() -> None:
    lines = {path: path.read_bytes().count(b"\n") for path in listed("*.py")}
    assert {str(path): n for path, n in lines.items() if n > 350} == {}


def test_the_documents_have_no_more_words_than_their_ceiling() -> None:
    generated = {ROOT / f"docs/{name}.md" for name in GENERATED}
    assert generated <= {*listed("docs/*.md")}, "a generated document has another name now"
    words = sum(len(page.read_text().split()) for page in listed("docs/*.md") if page not in generated)
    assert words <= WORDS, f"the documents have {words:,} words, their ceiling is {WORDS:,}"


def collected(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)


@pytest.mark.full
def test_the_interpreted_tests_are_those_of_every_file_imported() -> None:
    files = sorted(file for folder in ("tests", "benchmarks") for file in (ROOT / folder).rglob("test_*.py"))
    assert len(files) > 100
    # a file that is named is imported, whatever it says
    quick, whole = (collected("--full", *paths, TRITON_INTERPRET="1") for paths in ([], files))
    ids = [sorted(line for line in run.stdout.splitlines() if "::" in line) for run in (quick, whole)]
    assert ids[0] == ids[1] and len(ids[0]) > 300, quick.stderr + whole.stderr


@pytest.mark.full
def test_a_file_whose_interpreted_tests_are_marked_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "marks.py").write_text("import pytest\n\nkernels = getattr(pytest.mark, 'interpreter')\n")
    (tmp_path / "test_hidden.py").write_text("import marks\n\npytestmark = marks.kernels\n\ndef test(): pass\n")
    path = f"{tmp_path}:{ROOT}/tests/support:{ROOT}"
    run = collected("-p", "suite", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, tmp_path, PYTHONPATH=path)
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert "test_hidden.py holds interpreted tests and must say mark.interpreter or mark.kernel" in run.stderr
