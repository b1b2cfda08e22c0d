"""The house stays small enough to walk: files at the root, rooms, floors, circles and parameters."""

import ast
import runpy
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

floors = runpy.run_path(str(Path(__file__).with_name("test_floors.py")))
FLOORS, ROOT, module_of = floors["FLOORS"], floors["ROOT"], floors["module_of"]
FILES, ROOMS, STOREYS, PARAMETERS = 12, 32, 12, 17
"""At most: Python files at the root of megatron_rc, those and its folders, floors, parameters of a function."""
FEWER = {"correct": 14, "policy_loss": 14, "linear_policy_loss": 16}
"""Parameters of the functions that users call most."""


def parameters(source: str) -> Iterator[tuple[str, int]]:
    """Name and number of parameters of every function that is no kernel of Triton."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg)
            if not any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                yield node.name, sum(name is not None for name in names)


def circle(edges: dict[str, set[str]]) -> list[str]:
    """One circle of arrows, or nothing."""
    try:
        list(TopologicalSorter(edges).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def arrows(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module -> the modules that it imports, also inside functions and only for types."""
    known = dict.fromkeys(sources, ROOT)
    found = {}
    for name, source in sources.items():
        tree = ast.parse(source)
        reached = {module_of(imported, known) for imported in floors["imported_names"](name, ast.walk(tree))}
        found[name] = {module for module in reached if module not in (None, name, "megatron_rc.__init__")}
    return found


def rooms(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, reached in edges.items():
        here = name.split(".")[1]
        found.setdefault(here, set()).update(there for other in reached if (there := other.split(".")[1]) != here)
    return found


SOURCES = {name: path.read_text() for name, path in floors["modules"](ROOT).items()}


def test_the_house_has_few_files_rooms_and_floors() -> None:
    package = ROOT / "megatron_rc"
    files = len([*package.glob("*.py")])
    folders = len([path for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"])
    print(f"{files} files at the root, {files + folders} rooms, {len(FLOORS)} floors")
    assert files <= FILES and files + folders <= ROOMS and len(FLOORS) <= STOREYS


def test_no_rooms_form_a_circle_also_by_imports_for_types() -> None:
    """Circles of files are found by test_floors.py."""
    assert circle(rooms(arrows(SOURCES))) == []


def test_a_planted_circle_of_types_is_found() -> None:
    a, b = "megatron_rc.jobs.a", "megatron_rc.report.b"
    planted = {a: "from megatron_rc.report import b", b: "if TYPE_CHECKING:\n    from megatron_rc.jobs.a import X"}
    assert set(circle(rooms(arrows(planted)))) == {"jobs", "report"}


def test_no_function_has_more_parameters_than_a_reader_keeps_in_mind() -> None:
    counted = [(file, *one) for file, source in SOURCES.items() for one in parameters(source)]
    assert FEWER.keys() <= {name for _, name, _ in counted}
    assert [one for one in counted if one[2] > FEWER.get(one[1], PARAMETERS)] == []


def test_kernels_of_triton_are_not_counted_and_everything_else_is() -> None:
    source = "@triton.jit\ndef k(a, b): ...\nclass C:\n    async def f(self, a, /, b, *c, d, **e): ..."
    assert list(parameters(source)) == [("f", 6)]
