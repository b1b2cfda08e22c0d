"""What the tests of each host ran: a plugin of pytest that records it, and the page that is printed from the record.

    SLIME_DIR=... NEMO_RL_DIR=... .venv/bin/python -m pytest -q -p host_support tests/integrations tests/doctor
    .venv/bin/python tests/support/host_support.py > docs/hosts/support.md

A run adds to the record what it ran and forgets nothing, so one tree of a host at a time is enough.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

RECORD = Path(__file__).parent / "hosts/ran.json"
TABLE = yaml.safe_load((Path(__file__).parent / "hosts/features.yaml").read_text())
WORDS = {
    "source": "own code",
    "recorded": "recorded",
    "stand-in": "stand-in",
    "refused": "refused",
}
INTRODUCTION = """# What ran, for each host

Printed by `python tests/support/host_support.py` from `tests/support/hosts/ran.json`, which
`python -m pytest -p host_support` writes: a cell names the strongest test that passed.

* **own code**: functions or files of the host itself, from its source tree at the commit below.
* **recorded**: results of the host's own functions, recorded at that commit, in every run of the test command.
* **stand-in**: the host's signatures and layouts, written for the tests, in every run of the test command.
* **refused**: the setting is refused by name before the run begins.
* **not run**: no test has passed.
"""


class Proof(NamedTuple):
    """A test function, or those of its cases whose id holds a word."""

    kind: str
    test: str
    """FILE::FUNCTION, below tests/."""
    case: str

    @property
    def name(self) -> str:
        return f"{self.test}[{self.case}]" if self.case else self.test

    def fits(self, nodeid: str) -> bool:
        test, _, case = nodeid.removeprefix("tests/").partition("[")
        return test == self.test and self.case in case


HOSTS: dict[str, tuple[str | None, str]] = TABLE["hosts"]
"""Name -> the variable that names a source tree to the tests, and what is tested where the record has no commit."""
FEATURES: dict[str, dict[str, list[Proof]]] = {
    feature: {host: [Proof(*(*line.split(maxsplit=2), "")[:3]) for line in lines] for host, lines in proofs.items()}
    for feature, proofs in TABLE["features"].items()
}


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(_Recorder(), "host support recorder")


class _Recorder:
    def __init__(self) -> None:
        self.outcomes: dict[str, list[str]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes.setdefault(report.nodeid, []).append(report.outcome)

    def pytest_sessionfinish(self) -> None:
        record = read_record()
        for proof in {proof for hosts in FEATURES.values() for proofs in hosts.values() for proof in proofs}:
            ran = [outcome for nodeid, all_of in self.outcomes.items() if proof.fits(nodeid) for outcome in all_of]
            if "failed" in ran:
                record["passed"] = [name for name in record["passed"] if name != proof.name]
            elif "passed" in ran:
                record["passed"] = sorted({*record["passed"], proof.name})
        for host, (variable, _) in HOSTS.items():
            if variable and os.environ.get(variable):
                record["commits"][host] = _commit(Path(os.environ[variable]))
        RECORD.write_text(json.dumps(record, indent=1) + "\n")


def _commit(tree: Path) -> str:
    """The commit of a tree: of its file COMMIT where it was exported, else of git."""
    if (tree / "COMMIT").is_file():
        return (tree / "COMMIT").read_text().strip()[:12]
    command = ["git", "-C", str(tree), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()[:12]


def read_record() -> dict[str, Any]:
    return json.loads(RECORD.read_text()) if RECORD.is_file() else {"commits": {}, "passed": []}


def strongest(proofs: Iterable[Proof], passed: Collection[str]) -> Proof | None:
    """The first that passed: they stand in that order."""
    return next((proof for proof in proofs if proof.name in passed), None)


def page(record: dict[str, Any]) -> str:
    """The page of a record: {"commits": commit by host, "passed": names of proofs}."""
    lines = [INTRODUCTION, _row("feature", *HOSTS), _row(*["---"] * (len(HOSTS) + 1))]
    lines.append(
        _row("commit or release", *(record["commits"].get(host, tested) for host, (_, tested) in HOSTS.items()))
    )
    tests = []
    for feature, hosts in FEATURES.items():
        found = {host: strongest(hosts.get(host, ()), record["passed"]) for host in HOSTS}
        lines.append(_row(feature, *("not run" if proof is None else WORDS[proof.kind] for proof in found.values())))
        by_test: dict[str, list[str]] = {}
        for host, proof in found.items():
            if proof is not None:
                by_test.setdefault(proof.test, []).append(host)
        tests += [f"* {feature}: " + "; ".join(f"{', '.join(h)}: `{test}`" for test, h in by_test.items())] * bool(
            by_test
        )
    return "\n".join([*lines, "", "## The tests behind the cells", "", *tests, ""])


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(page(read_record()), end="")
