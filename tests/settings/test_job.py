"""What the settings of a job take from its correction, and names that they once had."""

import pytest
from jobs import ROOT
from refusals import refusal, refuses

from megatron_rc import schema
from megatron_rc.integrations.run_script import patch_settings
from megatron_rc.integrations.slime.settings import SlimeSettings
from megatron_rc.jobs.describe import describe
from megatron_rc.learning_rate.length_decay import LengthDecaySettings
from megatron_rc.learning_rate.mismatch import MismatchSettings
from megatron_rc.settings import job, renamed
from megatron_rc.settings.renamed import Renamed, load_finished


@pytest.mark.parametrize(
    ("text", "surrogate", "bounds"),
    [
        ("correction: cispo", "cispo", (1.0, 3.0)),
        ("{correction: {preset: cispo, old: recompute}, loss: {clip_upper: 4}}", "cispo", (1.0, 4.0)),
        ("correction: {preset: cispo, surrogate: null}", "ppo", (0.2, 0.28)),
        ("correction: {surrogate: reinforce}", "reinforce", (0.2, 0.28)),
        ("{correction: token-tis, loss: {surrogate: reinforce}}", "reinforce", (0.2, 0.28)),
        ("correction: token-tis", "ppo", (0.2, 0.28)),
    ],
)
def test_a_surrogate_of_the_correction_and_its_bounds_are_those_of_a_job_that_names_none(
    text: str, surrogate: str, bounds: tuple[float, float]
) -> None:
    loss = job.load(text).loss
    assert (loss.surrogate, (loss.clip_lower, loss.clip_upper)) == (surrogate, bounds)


def test_a_preset_that_does_not_exist_is_refused_with_the_nearest() -> None:
    refuses("unknown preset 'cispa'.*cispo", job.load, "correction: cispa")


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
def test_an_old_name_is_refused_with_the_new_one(text, assigned, sentence) -> None:
    assert refusal(job.load, text, assigned) == sentence


def test_an_old_section_of_a_patched_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renamed, "RENAMED", WRAPPED)
    refuses("^decay is now lr_rule with rule: decay$", patch_settings, assignments=["decay.period=3"])
    refuses("^old.rule is now old.how$", schema.from_dict, SlimeSettings, {"old": {"rule": 3}})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("decay: {period: 3}\nold: null", {"lr_rule": {"rule": "decay", "period": 3}}),
        ("old: {rule: a, b: 1}\ndecay: null", {"lr_rule": {"rule": "mismatch", "how": "a", "b": 1}}),
        ("{decay: null, old: null, x: 1}", {"lr_rule": None, "x": 1}),
        ("axes: {decay: {x: 1}}", {"axes": {"decay": {"x": 1}}}),
    ],
)
def test_a_section_may_get_a_field_that_says_what_it_was(monkeypatch, tmp_path, text, expected) -> None:
    monkeypatch.setattr(renamed, "RENAMED", WRAPPED)
    (tmp_path / "settings.yaml").write_text(text)
    assert load_finished(tmp_path / "settings.yaml") == expected


def test_what_a_finished_run_wrote_is_read() -> None:
    decay, gate = (job.of_finished(ROOT / "tests/support/earlier" / name) for name in ("decay", "gate"))
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
