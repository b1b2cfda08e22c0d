"""The table of hosts says what the marks on the tests say."""

from pathlib import Path
from types import SimpleNamespace

import host_table
import pytest
from host_table import PAGE, PROOFS, TREES, commits, marks, page

from megatron_rc.integrations.hosts import HOSTS


def test_the_page_is_what_its_command_writes() -> None:
    assert PAGE.read_text() == page(commits())
    found = marks()
    assert {host for _, host in found} == {*TREES}
    assert {proof for proofs in found.values() for proof in proofs} == {*PROOFS}


def test_the_table_has_every_host_at_the_commit_that_its_table_of_symbols_states() -> None:
    assert HOSTS.keys() <= TREES.keys()
    tested = commits()
    assert [name for name in HOSTS if TREES[name] and tested[name] not in HOSTS[name].tested] == []


@pytest.mark.parametrize(("outcomes", "row"), [("passed passed", True), ("passed skipped", False), ("failed", False)])
def test_a_commit_enters_when_all_tests_on_own_code_passed_with_it(
    outcomes: str, row: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_table, "PAGE", tmp_path / "support.md")
    (tmp_path / "support.md").write_text(PAGE.read_text())
    (tmp_path / "COMMIT").write_text("0123456789abcdef\n")
    monkeypatch.setenv("SLIME_DIR", str(tmp_path))
    monkeypatch.setenv("MILES_DIR", str(tmp_path))
    monkeypatch.setattr(host_table, "OUTCOMES", {})
    mark = pytest.mark.host("slime", "miles", proof="own code", feature="bounds by lag").mark
    for outcome in outcomes.split():
        item = SimpleNamespace(name="test[slime-1]", iter_markers=lambda _: [mark])
        report = SimpleNamespace(when="call", outcome=outcome, passed=outcome == "passed")
        hook = host_table.pytest_runtest_makereport(item)  # type: ignore[arg-type]
        next(hook)
        with pytest.raises(StopIteration):
            hook.send(report)  # type: ignore[arg-type]
    before = commits()
    host_table.pytest_sessionfinish()
    assert commits() == before | ({"slime": "0123456789ab"} if row else {})
