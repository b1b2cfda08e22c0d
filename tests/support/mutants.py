"""Do the tests notice a wrong line? For every mutant of mutants.txt, run the tests that cover the line.

    python tests/support/coverage_table.py run DATA
    python tests/support/coverage_table.py table DATA tests/support/coverage.csv
    python tests/support/mutants.py DATA RESULT [--only 1..20]

No file is changed: the processes of the tests get the other line when they import the module. RESULT has a row per
mutant and is continued after an interruption. A mutant is caught when a test fails; an error outside a test, and a test
that does not end, are counted apart. Each test that caught one runs once more without it, and must pass.
"""

import argparse
import ast
import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.txt")
MOST_TESTS, MOST_SECONDS = 40, 60
"""Tests per mutant, and how long they may have taken together in the coverage run."""
LIMIT = 600
"""Seconds until the tests of a mutant are stopped."""
SERVERS = "sglang_server"
"""Test files that name this start SGLang, which takes a minute, and are left out."""


class Mutant(NamedTuple):
    """A line of the innermost function or class around it (qualified; else `-`), in a file or wherever that moved."""

    number: int
    file: str
    name: str
    old: str
    new: str


def mutants() -> list[Mutant]:
    """Those of mutants.txt: number and file, qualified name, the line as it is, the line as it becomes."""
    blocks = [block.splitlines() for block in LIST.read_text().strip().split("\n\n")]
    return [Mutant(int(head[:3]), head[4:], name, old[2:], new[2:]) for head, name, old, new in blocks]


@cache
def definitions(path: Path) -> dict[str, list[tuple[range, bool]]]:
    """Lines of every function and class of a file, and whether it is a function; the file itself is `-`."""
    text = path.read_text()
    found = defaultdict(list, {"-": [(range(1, len(text.splitlines()) + 1), False)]})

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                lines = range(child.lineno, (child.end_lineno or 0) + 1)
                found[prefix + child.name].append((lines, not isinstance(child, ast.ClassDef)))
                name += f"{child.name}."
            visit(child, name)

    visit(ast.parse(text), "")
    return found


def find(mutant: Mutant) -> tuple[Path, int]:
    """File and number of the one line that a mutant changes."""
    everywhere = [*ROOT.glob("megatron_rc/**/*.py"), *ROOT.glob("triton_kernels/*.py")]
    for paths in ([ROOT / mutant.file], everywhere):
        places = set()
        for path in {path.resolve() for path in paths if path.exists()}:
            text = path.read_text().splitlines()
            for lines, _ in definitions(path).get(mutant.name, []):
                places |= {(path, n) for n in lines if text[n - 1].strip() == mutant.old}
        if len(places) == 1:
            return places.pop()
    raise LookupError(f"mutant {mutant.number}: {len(places)} lines of {mutant.name} are {mutant.old!r}")


def mutated(path: Path, line: int, new: str) -> str:
    lines = path.read_text().splitlines()
    lines[line - 1] = " " * (len(lines[line - 1]) - len(lines[line - 1].lstrip())) + new
    return "\n".join([*lines, ""])


def start() -> None:
    """Give this process, which starts, the module of the mutant with its other line; Triton reads it from linecache."""
    import linecache
    from importlib.machinery import SourceFileLoader

    path, line, new = json.loads(os.environ["MUTANT"])
    text = mutated(Path(path), line, new)
    get_data, path_stats = SourceFileLoader.get_data, SourceFileLoader.path_stats

    def data(self: Any, name: str) -> bytes:
        return text.encode() if os.path.realpath(name) == path else get_data(self, name)

    def stats(self: Any, name: str) -> Any:
        if os.path.realpath(name) == path:
            raise OSError("neither read nor write compiled code of this module")
        return path_stats(self, name)

    SourceFileLoader.get_data, SourceFileLoader.path_stats = data, stats  # type: ignore[method-assign]
    for name in {path, path.replace("/triton_kernels/", "/megatron_rc/kernels/")}:
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)


class Covered:
    """What a coverage run knows: the tests that run a line, and what each took."""

    def __init__(self, data: Path) -> None:
        import coverage

        self._data = coverage.CoverageData(str(data / "combined"))
        self._data.read()
        reports = [json.loads(row) for file in data.glob("tests-*.jsonl") for row in file.read_text().splitlines()]
        self.interpreted = {report["test"]: report["interpreted"] for report in reports}
        self._failed = {report["test"] for report in reports if report["outcome"] != "passed"}
        with contextlib.closing(sqlite3.connect(data / "combined")) as database:
            query = "select context, count(distinct file_id) from arc join context on id = context_id group by context"
            files = dict(database.execute(query).fetchall())
        self._seconds: Counter[str] = Counter()
        self._files: dict[str, int] = {}
        self._users: dict[str, set[str]] = defaultdict(set)
        for report in reports:
            self._seconds[report["test"]] += report["seconds"]
            self._files[report["test"]] = sum(files.get(name, 0) for name in (report["test"], *report["fixtures"]))
            for name in (report["test"], *report["fixtures"]):
                self._users[name].add(report["test"])

    def by_line(self, path: Path) -> dict[int, set[str]]:
        """Tests by number of the line that they run, themselves or through a fixture that they share."""
        end = f"/{path.relative_to(ROOT)}"
        measured = next(name for name in sorted(self._data.measured_files()) if name.endswith(end))
        contexts = self._data.contexts_by_lineno(measured)
        return {line: set().union(*(self._users.get(name, ()) for name in names)) for line, names in contexts.items()}

    def of(self, path: Path, line: int, name: str) -> list[str]:
        """Tests that may notice another line: one per function first, and those first that run few files and fast."""
        tests, text = self.by_line(path), path.read_text().splitlines()
        lines, function = next(one for one in definitions(path)[name] if line in one[0])
        if function:
            # of a statement on several lines, the first counts
            ran: set[str] = next((tests[n] for n in range(line, lines[0], -1) if tests.get(n)), set())
        else:
            word = re.match(r"\w+", text[line - 1].strip())
            uses = [n for n in tests if n != line and word and re.search(rf"\b{word[0]}\b", text[n - 1])]
            ran = set().union(*(tests[n] for n in uses)) or set().union(*tests.values())
        files = {test.split("::")[0] for test in ran}
        served = {
            str(file.relative_to(ROOT)) for file in ROOT.glob("tests/**/test_*.py") if SERVERS in file.read_text()
        }
        known = [t for t in self._seconds if t not in self._failed and t.split("::")[0] not in served]
        ordered = sorted(known, key=lambda test: (self._files[test], self._seconds[test], test))
        of_function = {test.split("[")[0]: test for test in reversed(ordered) if test in ran}
        tiers = [set(of_function.values()), ran, {test for test in ordered if test.split("::")[0] in files}]
        chosen: list[str] = []
        for test in dict.fromkeys(test for tier in tiers for test in ordered if test in tier):
            if len(chosen) < MOST_TESTS and sum(self._seconds[one] for one in [*chosen, test]) <= MOST_SECONDS:
                chosen.append(test)
        return chosen or [test for test in ordered if test in ran][:1]

    def run(self, tests: list[str], environment: dict[str, str], *options: str) -> dict[str, str]:
        """What became of the tests that did not pass: failure, error or timeout; by `all`, of the whole run."""
        names = {test.split("::")[0][:-3].replace("/", ".") + "::" + test.split("::", 1)[1]: test for test in tests}
        bad: dict[str, str] = {}
        for interpreted in (False, True):
            some = [test for test in tests if self.interpreted[test] == interpreted]
            if some and not ("-x" in options and "failure" in bad.values()):
                mode = {"TRITON_INTERPRET": "1"} if interpreted else {}
                for case, kind in run_tests(some, environment | mode, *options).items():
                    bad[names.get(case, "all")] = kind
        return bad


def run_tests(tests: list[str], environment: dict[str, str], *options: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/log", "w") as log:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "timeout=150", *options]
        command += [f"--junitxml={folder}/result.xml", *tests]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            process.wait(LIMIT)
            cases = ElementTree.parse(f"{folder}/result.xml").iter("testcase")
        except FileNotFoundError:
            return {"": "error"}
        except subprocess.TimeoutExpired:
            return {"": "timeout"}
        finally:
            # whatever the tests started and a mutant kept from ending
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        bad = {}
        for case, found in ((one, found) for one in cases for found in one):
            if found.tag in ("failure", "error"):
                kind = "timeout" if "Timeout" in found.get("message", "") else found.tag
                bad[f"{case.get('classname')}::{case.get('name')}"] = kind
        # from 2 on, pytest has not run what it was asked to: a test is gone, for one
        return bad if bad or process.returncode < 2 else {"": "error"}


def judge(covered: Covered, mutant: Mutant, environment: dict[str, str]) -> str:
    path, line = find(mutant)
    tests = covered.of(path, line, mutant.name)
    environment = environment | {"MUTANT": json.dumps([str(path), line, mutant.new])}
    bad = covered.run(tests, environment, "-x")
    if bad and "failure" not in bad.values():
        # behind the first error there may be a test that fails
        bad |= covered.run(tests, environment)
    for kind, state in {"failure": "caught", "timeout": "timeout", "error": "error"}.items():
        if kind in bad.values():
            return f"{mutant.number:03} {state} {next(test for test in bad if bad[test] == kind)}"
    return f"{mutant.number:03} survived {len(tests)} tests"


def main() -> None:
    # PYTHONSAFEPATH keeps the folder of a script off sys.path
    sys.path.append(str(LIST.parent))
    from coverage_table import every_process

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--only", default="1..100", metavar="N..M")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    result, covered = options.result, Covered(options.data)
    result.touch()
    rows = {int(row[:3]): row for row in result.read_text().splitlines()}
    low, high = map(int, options.only.split(".."))
    with every_process("mutants", [str(LIST.parent.resolve())]) as environment:

        def work(mutant: Mutant) -> None:
            rows[mutant.number] = judge(covered, mutant, environment)
            with open(result, "a") as file:
                print(rows[mutant.number], file=file)

        with ThreadPoolExecutor(options.workers) as pool:
            list(pool.map(work, [one for one in mutants() if low <= one.number <= high and one.number not in rows]))
    catchers = sorted({row.split(" ", 2)[2] for row in rows.values() if " caught " in row})
    bad: dict[str, str] = {}
    del environment["EVERY_PROCESS"]
    for first in range(0, len(catchers), 20):
        bad |= covered.run(catchers[first : first + 20], environment)
    for number, row in rows.items():
        if row.split(" ", 2)[2] in bad:
            rows[number] = row.replace(" caught ", " unstable ")
    result.write_text("".join(f"{rows[number]}\n" for number in sorted(rows)))
    print(dict(Counter(row.split()[1] for row in rows.values())))


if __name__ == "__main__":
    main()
