"""A name that a setting once had is refused with the new one, and `migrate` rewrites a file in place."""

from pathlib import Path

import pytest
from jobs import ROOT
from typer.testing import CliRunner

from megatron_rc import schema
from megatron_rc.cli import app
from megatron_rc.integrations.run_script import patch_settings
from megatron_rc.integrations.slime.settings import SlimeSettings
from megatron_rc.jobs.describe import describe
from megatron_rc.learning_rate.length_decay import LengthDecaySettings
from megatron_rc.learning_rate.mismatch import MismatchSettings
from megatron_rc.settings import job, renamed
from megatron_rc.settings.renamed import Renamed, rewritten

GRID = """\
# a grid
base: base.yaml
job:
  rollout: {engine: &e 'hf', sglang: {max_staleness: 3}, replay_path: a # dump
           }
axes:
  gap:  # updates
    none: {}
    lag: {rollout.staleness: 4, train.lr: 1}
"""
GRID_NOW = """\
# a grid
base: base.yaml
job:
  rollout: {engine: &e embedded, sglang: {max_lag: 3}, recorded_path: a # dump
           }
axes:
  gap:  # updates
    none: {}
    lag: {rollout.lag: 4, train.lr: 1}
"""
WRAPPED = (
    Renamed("old.rule", "how"),
    Renamed("decay", "lr_rule", constant=("rule", "decay")),
    Renamed("old", "lr_rule", constant=("rule", "mismatch")),
)


@pytest.mark.parametrize(
    ("text", "assigned", "sentence"),
    [
        ("lr_decay: {decay_period: 9}", (), "lr_decay is now lr_rule with rule: length_decay"),
        ("name: x", ["lr_gate.floor=0.2"], "lr_gate is now lr_rule with rule: mismatch"),
        ("rollout: {staleness: 2}", (), "rollout.staleness is now rollout.lag"),
        ("name: x", ["rollout.sglang.max_staleness=2"], "rollout.sglang.max_staleness is now rollout.sglang.max_lag"),
        ("rollout: {engine: replay}", (), "rollout.engine: replay is now rollout.engine: recorded"),
    ],
)
def test_an_old_name_is_refused_with_the_new_one_and_the_remedy(text, assigned, sentence) -> None:
    with pytest.raises(ValueError) as caught:
        job.load(text, assigned)
    assert str(caught.value) == f"{sentence}; `megatron-rc migrate FILE.yaml` rewrites a file with old names"


def test_an_old_section_of_a_patched_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renamed, "RENAMED", WRAPPED)
    with pytest.raises(ValueError, match="^decay is now lr_rule with rule: decay; `megatron-rc migrate FILE"):
        patch_settings(assignments=["decay.period=3"])
    with pytest.raises(ValueError, match="^old.rule is now old.how; "):
        schema.from_dict(SlimeSettings, {"old": {"rule": 3}})


def test_migrate_rewrites_files_and_their_bases_in_place_and_says_what(tmp_path: Path) -> None:
    grid, base, current = (tmp_path / name for name in ("grid.yaml", "base.yaml", "current.yaml"))
    grid.write_text(GRID)
    base.write_bytes(b"job: {rollout: {staleness: 1}}\r\n")
    current.write_text("rollout: {lag: 1}  # staleness: 3\n")
    grid.chmod(0o640)
    done = CliRunner().invoke(app, ["migrate", str(grid), str(current)])
    assert done.exit_code == 0 and done.output.splitlines() == [
        f"{grid}: rollout.engine: hf is now rollout.engine: embedded",
        f"{grid}: rollout.replay_path is now rollout.recorded_path",
        f"{grid}: rollout.staleness is now rollout.lag",
        f"{grid}: rollout.sglang.max_staleness is now rollout.sglang.max_lag",
        f"{current}: every name is current",
        f"{base}: rollout.staleness is now rollout.lag",
    ]
    assert grid.read_text() == GRID_NOW and oct(grid.stat().st_mode)[-3:] == "640"
    assert base.read_bytes() == b"job: {rollout: {lag: 1}}\r\n"
    assert current.read_text() == "rollout: {lag: 1}  # staleness: 3\n"
    assert CliRunner().invoke(app, ["migrate", str(grid)]).output.splitlines()[0] == f"{grid}: every name is current"


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00", b"a: [1", b"- 1\n", b"a: 1\n---\nb: 2\n"])
def test_a_file_that_cannot_be_read_is_one_sentence_and_stays(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "x.yaml"
    if content is not None:
        path.write_bytes(content)
    done = CliRunner().invoke(app, ["migrate", str(path)])
    assert isinstance(done.exception, ValueError) and str(path) in str(done.exception)
    assert "\n" not in str(done.exception)
    assert content is None or path.read_bytes() == content


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("decay: {period: 3} # x\nold: null\n", "lr_rule: {rule: decay, period: 3} # x\n"),
        ("decay: {}\n", "lr_rule: {rule: decay}\n"),
        ("decay: null\nold:\n  # why\n  rule: a\n  b: 1\n", "lr_rule:\n  # why\n  rule: mismatch\n  how: a\n  b: 1\n"),
        ("decay: null\nold:\nx: 1\n", "lr_rule:\nx: 1\n"),
        ("{old: ~, decay: &a {}}", "{lr_rule: &a {rule: decay}}"),
        ("{decay: {}, old: ~}", "{lr_rule: {rule: decay}}"),
        ("host: 1\nmegatron_rc:\n  decay: {p: 1}\ndecay: {}\n",
         "host: 1\nmegatron_rc:\n  lr_rule: {rule: decay, p: 1}\ndecay: {}\n"),
        ("axes: {a: {b: {decay.p: 1, decay.q: 2}}}",
         "axes: {a: {b: {lr_rule.rule: decay, lr_rule.p: 1, lr_rule.q: 2}}}"),
        ("axes:\n  a:\n    b:\n      decay.p: 1\n",
         "axes:\n  a:\n    b:\n      lr_rule.rule: decay\n      lr_rule.p: 1\n"),
        ("axes: {decay: {decay: {x: 1}}}", "axes: {decay: {decay: {x: 1}}}"),
    ],
)  # fmt: skip
def test_a_section_may_get_a_field_that_says_what_it_was(monkeypatch: pytest.MonkeyPatch, text, expected) -> None:
    monkeypatch.setattr(renamed, "RENAMED", WRAPPED)
    found, changes = rewritten(text, "x")
    assert found == expected and bool(changes) == (text != expected)
    assert ("null is gone" in str(changes)) == (": null" in text or "old: ~" in text)
    assert rewritten(expected, "x") == (expected, [])


def test_what_a_finished_run_wrote_needs_no_migration() -> None:
    earlier = ROOT / "tests/support/earlier"
    decay, gate = (job.of_finished(earlier / name) for name in ("decay", "gate"))
    assert decay.rollout.lag == 1 and decay.lr_rule == LengthDecaySettings(decay_period=3)
    assert gate.rollout.engine == "recorded" and isinstance(gate.lr_rule, MismatchSettings)
    assert (gate.lr_rule.action, gate.lr_rule.floor) == ("halve", 0.2)


def test_every_new_name_is_a_setting() -> None:
    known = {field.name for settings in (job.JobSettings, SlimeSettings) for field in describe(settings)}
    now = {row.old: row.new for row in renamed.RENAMED if "." not in row.old}
    for row in renamed.RENAMED:
        section, _, _ = row.old.rpartition(".")
        assert ".".join(filter(None, [now.get(section, section), row.new])) in known


def test_the_changelog_has_every_old_name_next_to_the_new_one() -> None:
    section = (ROOT / "CHANGELOG.md").read_text().partition("### Renamed")[2].partition("### Removed")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    for row in renamed.RENAMED:
        parts = [row.old.split(".")[-1], row.new, *row.values, *row.values.values()]
        assert any(all(part in "".join(cells) for part in parts) for cells in rows), row
