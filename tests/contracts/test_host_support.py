"""The table of hosts says what ran: it is printed from the record, and every test that it names exists."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from types import SimpleNamespace

import host_support
import pytest
from host_support import FEATURES, Proof, page, read_record, strongest

from megatron_rc.integrations.hosts import HOSTS

ROOT = Path(__file__).parents[2]
PROOFS = {proof for hosts in FEATURES.values() for proofs in hosts.values() for proof in proofs}


def test_the_page_is_what_its_command_prints() -> None:
    assert (ROOT / "docs/hosts/support.md").read_text() == page(read_record())


def test_the_tests_of_the_table_exist_and_the_record_knows_no_other() -> None:
    for file in {proof.test.partition("::")[0] for proof in PROOFS}:
        defined = {
            node.name
            for node in ast.parse((ROOT / "tests" / file).read_text()).body
            if isinstance(node, ast.FunctionDef)
        }
        assert {proof.test.partition("::")[2] for proof in PROOFS if proof.test.startswith(f"{file}::")} <= defined
    assert {*read_record()["passed"]} <= {proof.name for proof in PROOFS}


def test_the_table_has_every_host_at_the_commit_that_its_table_of_symbols_states() -> None:
    assert HOSTS.keys() <= host_support.HOSTS.keys()
    for name, commit in read_record()["commits"].items():
        assert commit == host_support.HOSTS[name][1]
    for name, (_, tested) in host_support.HOSTS.items():
        assert name not in HOSTS or tested in HOSTS[name].tested or name == "megatron-training"


def test_the_strongest_test_that_passed_counts_and_nothing_is_not_run() -> None:
    proofs = [Proof("source", "a.py::test", "source"), Proof("recorded", "a.py::test", "recorded")]
    assert strongest(proofs, ["a.py::test[recorded]"]) is proofs[1]
    assert strongest(proofs, ["a.py::test[source]", "a.py::test[recorded]"]) is proofs[0]
    assert strongest(proofs, []) is None
    first = page({"commits": {}, "passed": []})
    assert "own code |" not in first and first.count("| not run") == len(FEATURES) * len(host_support.HOSTS)


def test_a_run_adds_what_passed_and_takes_out_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_support, "RECORD", tmp_path / "ran.json")
    for variable, _ in host_support.HOSTS.values():
        if variable:
            monkeypatch.delenv(variable, raising=False)
    (tmp_path / "COMMIT").write_text("0123456789abcdef\n")
    monkeypatch.setenv("SLIME_DIR", str(tmp_path))
    first, second = sorted(proof for proof in PROOFS if proof.case)[:2]

    def run(**outcomes: str) -> dict[str, object]:
        recorder = host_support._Recorder()
        for proof, outcome in zip((first, second), outcomes.values(), strict=True):
            nodeid = f"tests/{proof.test}[x-{proof.case}-y]"
            recorder.pytest_runtest_logreport(SimpleNamespace(nodeid=nodeid, when="call", outcome=outcome))
        recorder.pytest_sessionfinish()
        return json.loads((tmp_path / "ran.json").read_text())  # type: ignore[no-any-return]

    assert run(first="passed", second="skipped") == {"commits": {"slime": "0123456789ab"}, "passed": [first.name]}
    assert run(first="skipped", second="passed")["passed"] == sorted([first.name, second.name])
    assert run(first="failed", second="skipped")["passed"] == [second.name]
