"""The committed table has no wrong verdict, and a tree without rows adds those that are not good."""

from pathlib import Path

from host_scripts.verdicts import judge, rows, wrong


def test_no_verdict_of_the_committed_table_is_wrong() -> None:
    table = rows()
    assert len(table) > 200 and not wrong(table)
    assert all(row["line"] and row["truth"] in ("good", "note", "warning", "error") for row in table)


def test_a_verdict_other_than_good_gets_a_row_and_rows_of_other_scripts_are_stale(tmp_path: Path) -> None:
    (tmp_path / "slime").mkdir()
    (tmp_path / "slime/run.sh").write_text("python train.py --use-tis --rollout-temperature 0\n")
    table = judge(tmp_path)
    assert {row["verdict"] for row in table if row["written"] == "before"} == {"stale"}
    assert [row["check"] for row in wrong(table)] == ["temperature"]
