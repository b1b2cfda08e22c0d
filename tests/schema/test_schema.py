"""Configuration in and out: one sentence that names the dotted field and the nearest known name."""

import dataclasses
from pathlib import Path
from typing import Annotated

import pytest
from refusals import refuses
from typer.testing import CliRunner

from megatron_rc import RolloutCorrection, Weight, schema
from megatron_rc.cli import app
from megatron_rc.jobs.describe import describe
from megatron_rc.schema.choice import Choice
from megatron_rc.settings import job as settings
from megatron_rc.settings.job import JobSettings

ROOT = Path(__file__).parents[2]


def read(text: str) -> JobSettings:
    return schema.from_dict(JobSettings, schema.load_yaml(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {lrr: 1}", r"unknown field 'train.lrr'; did you mean 'lr'\?"),
        ("trian: {lr: 1}", r"unknown field 'trian'; did you mean 'train'\?"),
        ("train: {lr: fast}", "train.lr: .*number.*'fast'"),
        ("train: {lr: -1}", "train: lr must be > 0, got -1"),
        ("rollout: {dtype: fp8}", "rollout.dtype: .*'fp32'.*got 'fp8'"),
        ("rollout: {engine: recorded}", "recorded_path must name a recorded dump"),
        ("rollout: {samples_per_prompt: 1}", "samples_per_prompt must be >= 2"),
        ("parallel: {tensor: 0}", "tensor must be >= 1"),
        ("train: [1, 2]", "train: .*got \\[1, 2\\]"),
        ("correction: {weight: {levle: token}}", "unknown field 'correction.weight.levle'; did you mean 'level'"),
        ("train: {min_lr: 1.0, lr: 0.1}", "min_lr must be <= lr"),
        ("loss: {clip_lower: 1.5}", r"loss: clip_lower must be in \[0, 1\] .* got clip_lower=1.5"),
        ("loss: {dual_clip: 1}", "loss: dual_clip must be > 1"),
        ("rollout: {top_k: 0}", r"rollout: top_k must be -1 \(off\) or >= 1, got 0"),
        ("rollout: {hidden: {top_p: 0}}", r"rollout.hidden: top_p must be in \(0, 1\], got 0"),
        ("rollout: {engine: sglang, hidden: {top_p: 0.9}}", "hidden must keep its defaults when engine is 'sglang'"),
        ("rollout: {engine: recorded, recorded_path: x, hidden: {top_p: 0.9}}", "hidden must keep its defaults when"),
        ("rollout: {amplify_fixed: true}", "rollout: amplify_fixed must be false where no weights are served"),
        ("rollout: {amplify: 0.1, amplify_seed: 3}", "rollout: amplify_seed must be null without amplify_fixed"),
    ],
)
def test_a_wrong_value_is_one_sentence_naming_the_field(text, message):
    assert "\n" not in refuses(message, read, text)


def test_a_preset_is_written_out_wherever_a_correction_stands_and_assignments_change_it() -> None:
    for text in ("correction: token-tis", "correction: {preset: token-tis}"):
        assert read(text).correction == RolloutCorrection.preset("token-tis")
        changed = settings.load(text, ["correction.weight.upper=3", "correction.old=current"]).correction
        assert changed == RolloutCorrection(Weight(upper=3.0), old="current")
        assert settings.load(text, ["correction.preset=veto"]).correction == RolloutCorrection.preset("veto")
    refuses(r"unknown preset 'tokn-tis'; did you mean 'token-tis'\?", read, "correction: tokn-tis")


def test_assignments_leave_the_given_fields_as_they_are() -> None:
    data = {"train": {"steps": 3}}
    assert schema.from_dict(JobSettings, data, assignments=["train.steps=7"]).train.steps == 7
    assert data == {"train": {"steps": 3}}


def test_settings_survive_a_round_trip_through_yaml():
    job = read("train: {lr: 1e-5, steps: 3}\nrollout: {top_p: 0.9}\ncorrection: {weight: {upper: 3.0}}")
    assert job.train.lr == 1e-5
    assert read(schema.dump_yaml(schema.to_dict(job))) == job


def test_a_new_row_of_a_table_is_taken_documented_and_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"low": "for soup.", "high": ""}

    @dataclasses.dataclass
    class Kitchen:
        heat: Annotated[str, Choice(table)] = "low"
        """How hot."""
        other: Annotated[str, Choice(table)] | None = None

    monkeypatch.setattr("megatron_rc.jobs.describe._docstrings", lambda cls: {"heat": "How hot."})
    monkeypatch.setitem(table, "middle", "for rice.")
    heat, other = describe(Kitchen)
    assert (heat.type, heat.doc) == ("low | high | middle", "How hot. low: for soup. middle: for rice.")
    assert (other.type, other.doc) == ("low | high | middle | null", "low: for soup. middle: for rice.")
    assert schema.from_dict(Kitchen, {"heat": "middle"}).heat == "middle"
    for wrong, end in (("midle", r"; did you mean 'middle'\?"), ("7", ""), ([1], "")):
        with pytest.raises(ValueError, match=rf"^heat: must be one of 'low', 'high', 'middle', got .*{end}$"):
            schema.from_dict(Kitchen, {"heat": wrong})


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2", "nothing-here.yaml"])
def test_what_is_not_a_mapping_of_fields_is_refused(text):
    refuses(r"not valid YAML|must hold a mapping|no such file", schema.load_yaml, text)


def test_a_file_changes_the_fields_of_its_base_and_keeps_the_others(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/first.yaml").write_text(
        "train: {lr: 1.0, steps: 3}\ncorrection: {reject: [{upper: 2.0}, {upper: 3.0}]}\n"
        "lr_rule: {rule: mismatch, floor: 0.2}"
    )
    (tmp_path / "shared/second.yaml").write_text("base: first.yaml\ntrain: {seed: 7}\nlr_rule: null")
    mine = tmp_path / "mine.yaml"
    mine.write_text("base: shared/second.yaml\ntrain: {steps: 9}\ncorrection: {reject: [{upper: 5.0}]}")
    assert schema.load_yaml(mine) == {
        "train": {"lr": 1.0, "steps": 9, "seed": 7}, "correction": {"reject": [{"upper": 5.0}]}, "lr_rule": None,
    }  # fmt: skip


def test_a_base_that_is_missing_or_leads_back_is_one_sentence(tmp_path: Path) -> None:
    a, b, c = (tmp_path / name for name in ("a.yaml", "b.yaml", "c.yaml"))
    a.write_text("base: b.yaml")
    b.write_text("base: a.yaml")
    assert refuses("", schema.load_yaml, a) == f"{a} is its own base: {a} -> {b} -> {a}"
    for written in ("nowhere.yaml", "[a.yaml]"):
        c.write_text(f"base: {written}")
        refuses("base of .*c.yaml must name a YAML file, relative to its folder, got ", schema.load_yaml, c)


def test_one_long_line_is_yaml_text_and_not_the_name_of_a_file():
    assert schema.load_yaml("{task: {options: {path: " + "x" * 400 + "}}}")["task"]["options"]["path"] == "x" * 400


def test_set_reads_the_value_as_yaml_and_makes_missing_sections():
    data = {"train": {"lr": 1.0}}
    for assignment in ("train.steps=7", "rollout.dtype=fp32", "task.options.levels={2x1: 1.0}", "model.hf_path=null"):
        schema.set_field(data, assignment, JobSettings)
    assert data["train"] == {"lr": 1.0, "steps": 7}
    assert data["rollout"] == {"dtype": "fp32"} and data["model"] == {"hf_path": None}
    assert data["task"]["options"]["levels"] == {"2x1": 1.0}
    refuses("key=value", schema.set_field, data, "train.steps", JobSettings)


def test_every_field_of_the_settings_is_documented():
    assert [f.name for f in describe(JobSettings) if not f.doc] == []


@pytest.mark.parametrize("page", ["settings", "presets", "metrics", "versions"])
def test_reference_pages_are_what_the_command_prints(page: str):
    committed = (ROOT / "docs" / f"{page}.md").read_text()
    if page == "presets":  # tables of finished runs follow
        committed = committed[: committed.index("\n## ")]
    assert committed == CliRunner().invoke(app, [page]).stdout, f"megatron-rc {page} > docs/{page}.md"
