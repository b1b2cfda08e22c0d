"""docs/hosts/support.md, read from the marks `host` on the tests: a plugin of pytest that writes the page.

    SLIME_DIR=... NEMO_RL_DIR=... .venv/bin/python -m pytest -q --full -p host_table tests/integrations tests/doctor

A tree of a host gets its commit into the page when every test on its own code passes. All else needs `--collect-only`.
"""

import ast
import os
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/hosts/support.md"
PROOFS = ("own code", "recorded", "stand-in", "refused")
"""The strongest first."""
TREES = {
    "slime": "SLIME_DIR", "miles": "MILES_DIR", "verl": "VERL_DIR", "nemo-rl": "NEMO_RL_DIR",
    "megatron-lm": "MEGATRON_LM_DIR", "megatron-training": "", "prime-rl": "PRIME_RL_DIR", "skyrl": "SKYRL_DIR",
    "trl": "TRL_DIR", "ms-swift": "",
}  # fmt: skip
"""Host -> the variable that names its source tree to the tests; releases of megatron-training come from wheels."""
INTRODUCTION = """# What ran, for each host

Written by `python -m pytest -p host_table --collect-only tests/integrations tests/doctor` from the marks `host` on the
tests: a cell names the strongest proof.

* **own code**: functions or files of the host itself; they passed with its source tree at the commit below.
* **recorded**: results of the host's own functions, recorded at that commit, in every run of the test command.
* **stand-in**: the host's signatures and layouts, written for the tests, in every run of the test command.
* **refused**: the setting is refused by name before the run begins.
* **not run**: no test has this mark. That holds for a training job on a GPU with every host.

"""
OUTCOMES: dict[str, set[str]] = {}
"""Host -> how its tests on own code ended in this run."""


def marks() -> dict[tuple[str, str], dict[str, str]]:
    """(feature, host) -> proof -> the first test with that mark, as FILE::FUNCTION below tests/."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for path in sorted([*ROOT.glob("tests/integrations/*.py"), *ROOT.glob("tests/doctor/*.py")]):
        for test in (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)):
            for call in (node for node in test.decorator_list if isinstance(node, ast.Call)):
                if ast.unparse(call.func) == "pytest.mark.host":
                    proof, feature = (ast.literal_eval(keyword.value) for keyword in call.keywords)
                    for host in map(ast.literal_eval, call.args):
                        name = f"{path.relative_to(ROOT / 'tests')}::{test.name}"
                        found.setdefault((feature, host), {}).setdefault(proof, name)
    return found


def commits() -> dict[str, str]:
    """Host -> the commit or release that the page states."""
    (row,) = (line for line in PAGE.read_text().splitlines() if line.startswith("| commit or release"))
    return dict(zip(TREES, row.strip("| ").split(" | ")[1:], strict=True))


def page(tested: dict[str, str]) -> str:
    """The page of the marks, with the hosts at these commits."""
    found = marks()
    rows = [("feature", *TREES), ("---",) * (len(TREES) + 1), ("commit or release", *tested.values())]
    tests = []
    for feature in sorted({feature for feature, _ in found}):
        cells = {host: min(found.get((feature, host), {}), key=PROOFS.index, default="not run") for host in TREES}
        rows.append((feature, *cells.values()))
        by_test: dict[str, list[str]] = {}
        for host, proof in cells.items():
            if proof != "not run":
                by_test.setdefault(found[feature, host][proof], []).append(host)
        tests.append(f"* {feature}: " + "; ".join(f"{', '.join(h)}: `{test}`" for test, h in by_test.items()))
    table = [f"| {' | '.join(row)} |" for row in rows]
    return INTRODUCTION + "\n".join([*table, "", "## The tests behind the cells", "", *tests, ""])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    own = {host for mark in item.iter_markers("host") if mark.kwargs["proof"] == "own code" for host in mark.args}
    # a test that runs once per host speaks for the host of its case
    for host in {host for host in own if f"[{host}" in item.name} or own:
        if report.when == "call" or not report.passed:
            OUTCOMES.setdefault(host, set()).add(report.outcome)
    return report


def pytest_sessionfinish() -> None:
    """Write the page, with the commits of the trees whose tests all passed."""
    trees = {host: os.environ.get(TREES[host]) for host, outcomes in OUTCOMES.items() if outcomes == {"passed"}}
    PAGE.write_text(page(commits() | {host: commit(Path(tree)) for host, tree in trees.items() if tree}))


def commit(tree: Path) -> str:
    """The commit of a tree: of its file COMMIT where it was exported, else of git."""
    if (tree / "COMMIT").is_file():
        return (tree / "COMMIT").read_text().strip()[:12]
    command = ["git", "-C", str(tree), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()[:12]
