"""A room imports only from lower floors, and no circle of imports exists; the imports are read from the source.

A circle counts the imports under `if TYPE_CHECKING:`, too: who reads one of its files has to read them all.

A room is a file or folder of megatron_rc. With --write, this file as a program puts its floors into CONTRIBUTING.md.
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = (
    "versions source exit_status schema files drawing collectives kernels",
    "backend engine tasks",
    "batch",
    "correction dump",
    "loss moe learning_rate",
    "settings",
    "logprobs models report",
    "training rollout launch analyze",
    "integrations jobs",
    "doctor __init__",
    "cli",
    "__main__",
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms.split()}
STRANGERS = {"training", "rollout"}
MAY_IMPORT_MEGATRON = {"training", "moe", "integrations"}
MAY_READ_SURROUNDINGS = {"training", "integrations", "launch", "cli", "__main__"}


def modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file of the package, the kernels under the name they are imported by."""
    found = {}
    for folder, prefix in (("megatron_rc", "megatron_rc"), ("triton_kernels", "megatron_rc.kernels")):
        for path in sorted((root / folder).rglob("*.py")):
            if "kernels" not in path.relative_to(root / folder).parts:
                found[".".join([prefix, *path.relative_to(root / folder).with_suffix("").parts])] = path
    return found


def nodes_of(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs: those of `if TYPE_CHECKING:` do not."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING":
            yield from (descendant for other in node.orelse for descendant in (other, *nodes_of(other)))
        else:
            yield node
            yield from nodes_of(node)


def imported_names(name: str, nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Every dotted name that the import statements of module ``name`` bring in, also those inside functions."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(name.split(".")[: -node.level])
            base = ".".join(part for part in (package if node.level else "", node.module) if part)
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__")
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value)


def module_of(imported: str, known: dict[str, Path]) -> str | None:
    """The module of the package that holds a dotted name; a name of a package's own is in its `__init__`."""
    for dotted in (imported, imported.rpartition(".")[0]):
        for module in (dotted, f"{dotted}.__init__"):
            if module in known:
                return module
    return None


def room(dotted: str) -> str:
    """The file or folder of megatron_rc that a dotted name lies in; a bare name is in `__init__`."""
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FLOOR else "__init__"


def reads_surroundings(tree: ast.AST, imports: list[str]) -> Iterator[str]:
    plain = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    aliases = {"os", *(alias.asname for alias in plain if alias.name == "os")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            if node.attr in ("environ", "environb", "getenv", "putenv"):
                yield f"os.{node.attr}"
        elif isinstance(node, ast.Attribute) and node.attr in ("parallel_state", "mpu"):
            yield node.attr
    for imported in imports:
        parts = imported.split(".")
        of_os = parts[0] == "os" and parts[-1] in ("environ", "environb", "getenv")
        if of_os or {"parallel_state", "mpu"} & {*parts}:
            yield imported


def violations(root: Path) -> list[str]:
    """One sentence, starting with the file, for every broken rule."""
    found, edges, rooms = [], dict[str, set[str]](), dict[str, set[str]]()
    known = modules(root)
    for name, path in known.items():
        tree = ast.parse(path.read_text(), str(path))
        here, file = name.split(".")[1], path.relative_to(root)
        imports = list(dict.fromkeys(imported_names(name, nodes_of(tree))))
        if here not in FLOOR:
            found.append(f"{file} stands on no floor")
            continue
        for imported in imports:
            top = imported.split(".")[0]
            if top == "triton_kernels":
                found.append(f"{file} imports triton_kernels by its folder's name")
            if top == "megatron" and here not in MAY_IMPORT_MEGATRON:
                found.append(f"{file} imports {imported}; megatron belongs to {sorted(MAY_IMPORT_MEGATRON)}")
            if here == "kernels" and not kernel_may_import(imported):
                found.append(f"{file} imports {imported}; kernels import torch and triton only, and never communicate")
            if top == "megatron_rc" and here != "__init__" and imported != "megatron_rc.__version__":
                there = room(imported)
                if there != here and FLOOR[there] >= FLOOR[here]:
                    found.append(f"{file} (floor {FLOOR[here]}) imports {imported} (floor {FLOOR[there]})")
                if {here, there} == STRANGERS:
                    found.append(f"{file} imports {imported}; {here} and {there} never import each other")
        if here not in MAY_READ_SURROUNDINGS:
            found += [f"{file} reads {what}" for what in dict.fromkeys(reads_surroundings(tree, imports))]
        reached = {module_of(imported, known) for imported in imported_names(name, ast.walk(tree))}
        edges[name] = {module for module in reached if module and module not in (name, "megatron_rc.__init__")}
        rooms.setdefault(here, set()).update({module.split(".")[1] for module in edges[name]} - {here})
    found += [f"{known[module].relative_to(root)} is part of a cycle: {path}" for module, path in circle_in(edges)]
    return found + [f"megatron_rc/{room} is part of a cycle of rooms: {path}" for room, path in circle_in(rooms)]


def circle_in(edges: dict[str, set[str]]) -> list[tuple[str, str]]:
    """[(a member of a circle, the circle as text)]; empty where there is none."""
    try:
        list(TopologicalSorter(edges).static_order())
    except CycleError as error:
        return [(error.args[1][0], " -> ".join(error.args[1]))]
    return []


def kernel_may_import(imported: str) -> bool:
    top = imported.split(".")[0]
    if imported.startswith("torch.distributed"):
        return False
    if imported.startswith("megatron_rc.kernels."):
        return True
    return top in ("torch", "triton") or (top in sys.stdlib_module_names and top not in ("os", "importlib"))


def with_table(document: str) -> str:
    """``document`` with the table of these floors in place of the one that it has."""
    shown = [" ".join(f"`{room}`" for room in rooms.split()) for rooms in FLOORS]
    table = "".join(f"| {floor} | {rooms} |\n" for floor, rooms in enumerate(shown))
    before, head, rest = document.partition("| floor | rooms |\n| --- | --- |\n")
    assert head, "CONTRIBUTING.md has a table of floors"
    rows = rest.splitlines(keepends=True)
    while rows and rows[0].startswith("|"):
        rows.pop(0)
    return before + head + table + "".join(rows)


def test_every_room_imports_only_from_lower_floors() -> None:
    assert len(modules(ROOT)) > 10
    assert violations(ROOT) == []


def test_the_floors_in_contributing_are_these() -> None:
    document = (ROOT / "CONTRIBUTING.md").read_text()
    assert with_table(document) == document, "python tests/contracts/test_floors.py --write"


@pytest.mark.parametrize(
    ("file", "source", "sentence"),
    [
        ("megatron_rc/batch.py", "from megatron_rc.loss.scale import loss_scale", "(floor 2) imports megatron_rc.loss"),
        ("megatron_rc/batch.py", "from megatron_rc import loss", "(floor 2) imports megatron_rc.loss"),
        ("megatron_rc/batch.py", "def f():\n    from .cli import main", "(floor 2) imports megatron_rc.cli.main"),
        ("megatron_rc/batch.py", "if TYPE_CHECKING:\n    x\nelse:\n    import megatron_rc.cli",
         "imports megatron_rc.cli"),
        ("megatron_rc/logprobs/logits.py", "import megatron_rc", "(floor 6) imports megatron_rc (floor 9)"),
        ("megatron_rc/dump/a.py", "import megatron_rc.loss.scale",
         "(floor 3) imports megatron_rc.loss.scale (floor 4)"),
        ("megatron_rc/dump/a.py", "import megatron_rc.correction.b",
         "(floor 3) imports megatron_rc.correction.b (floor 3)"),
        ("megatron_rc/moe/a.py", "def f():\n    from megatron_rc import logprobs",
         "(floor 4) imports megatron_rc.logp"),
        ("megatron_rc/loss/policy_loss.py", "import megatron.core", "imports megatron.core; megatron belongs to"),
        ("megatron_rc/loss/a.py", "import importlib\nimportlib.import_module('megatron.core')",
         "imports megatron.core;"),
        ("megatron_rc/training/a.py", "from megatron_rc.rollout.b import c", "never import each other"),
        ("megatron_rc/rollout/b.py", "from ..training import a", "never import each other"),
        ("megatron_rc/moe/a.py", "from megatron.core import parallel_state", "reads megatron.core.parallel_state"),
        ("megatron_rc/report/a.py", "import os as o\no.environ['A']", "reads os.environ"),
        ("megatron_rc/report/a.py", "from os import getenv", "reads os.getenv"),
        ("megatron_rc/report/a.py", "import triton_kernels.b", "by its folder's name"),
        ("megatron_rc/utils.py", "", "stands on no floor"),
        ("triton_kernels/a.py", "import numpy", "kernels import torch and triton only"),
        ("triton_kernels/a.py", "from megatron_rc import batch", "kernels import torch and triton only"),
        ("triton_kernels/a.py", "import torch.distributed", "never communicate"),
        ("triton_kernels/a.py", "from torch import distributed", "never communicate"),
        ("megatron_rc/tasks/__init__.py", "from megatron_rc.tasks.a import b", "is part of a cycle"),
        ("megatron_rc/tasks/__init__.py", "def f():\n    from megatron_rc.tasks import a", "is part of a cycle"),
        ("megatron_rc/tasks/__init__.py", "if TYPE_CHECKING:\n    from megatron_rc.tasks import a",
         "is part of a cycle"),
        ("megatron_rc/schema/b.py", "if TYPE_CHECKING:\n    from megatron_rc.tasks.b import c", "a cycle of rooms"),
    ],
)  # fmt: skip
def test_a_planted_violation_is_found_and_its_file_named(tmp_path: Path, file: str, source: str, sentence: str) -> None:
    plant(tmp_path, "megatron_rc/tasks/a.py", "from megatron_rc.tasks import Prompt\nimport megatron_rc.schema.a")
    plant(tmp_path, "megatron_rc/tasks/b.py", "")
    plant(tmp_path, "megatron_rc/schema/a.py", "")
    plant(tmp_path, file, source)
    broken = violations(tmp_path)
    assert any(sentence in one for one in broken)
    assert all(one.startswith(file) or "cycle" in one for one in broken)


def plant(root: Path, file: str, source: str) -> None:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)


if __name__ == "__main__" and "--write" in sys.argv:
    path = ROOT / "CONTRIBUTING.md"
    path.write_text(with_table(path.read_text()))
