"""What commit 259cf36 wrote is still read: dump, metrics, settings and checkpoints of tests/support/earlier/."""

import re
import shutil
from pathlib import Path

import pytest
from jobs import ROOT, finished_job
from typer.testing import CliRunner

from megatron_rc import schema
from megatron_rc.analyze.diagnosis import diagnose_dump
from megatron_rc.cli import app
from megatron_rc.jobs.folder import set_aside
from megatron_rc.settings.renamed import load_finished

EARLIER = ROOT / "tests/support/earlier"
ARMS = ("decay", "gate")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(EARLIER, tmp_path / "earlier")
    return tmp_path / "earlier"


def test_an_earlier_dump_has_the_tokens_and_the_gap_that_it_had() -> None:
    found = diagnose_dump(EARLIER / "decay/dump")
    assert (found.evidence.whole.tokens, found.corrupt.count) == (734, 0)
    assert found.evidence.whole.k3 == pytest.approx(0.00031996707771537796, rel=1e-9)
    assert [verdict.code for verdict in found.verdicts] == ["RC502"]


@pytest.mark.parametrize("arm", ARMS)
def test_an_earlier_run_gets_a_report(folder: Path, arm: str) -> None:
    done = CliRunner().invoke(app, ["report", str(folder / arm)])
    assert done.exit_code == 0, done.output
    page = (folder / arm / "report.html").read_text()
    titles = {"Warm-up: cross-entropy", "Reward", "k3 by lag", "Tokens by lag", "Corrected share", "Learning-rate rule"}
    assert titles <= {title.strip() for title in re.findall("<h2>([^<]*)", page)}


# at the next step, by the earlier version; how a replayed step ends depends on nothing that machines round differently
GOES_ON = {
    "decay": {"step": 5, "lr": 1.25e-4, "lr_rule/scale": 0.5, "lag": 1},
    "gate": {"step": 3, "lr": 7.5e-5, "lr_rule/scale": 0.5, "grad_norm": 2.7919, "old/k3": 2.5568e-4, "loss": 0.030916},
}  # fmt: skip


@pytest.mark.parametrize("arm", ARMS)
def test_an_earlier_job_goes_on_as_it_did(folder: Path, arm: str) -> None:
    expected = GOES_ON[arm]
    assigned = [f"output={folder / arm}", f"train.steps={expected['step']}"]
    settings = folder / arm / "settings.yaml"
    assert " is now " in str(CliRunner().invoke(app, ["train", str(settings)]).exception)
    now = load_finished(settings)
    if now["rollout"]["recorded_path"]:
        now["rollout"]["recorded_path"] = str(folder / "decay/dump")
    settings.write_text(schema.dump_yaml(now))
    last = finished_job(folder / arm / "settings.yaml", *(word for each in assigned for word in ("--set", each)))[-1]
    assert {name: last[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_a_fresh_job_moves_aside_what_a_job_wrote_and_nothing_else(folder: Path) -> None:
    wrote = {path.name for path in (folder / "decay").iterdir()}
    (folder / "decay/notes.txt").write_text("mine")
    (folder / "decay/hf").mkdir()
    assert set_aside(folder / "decay") == folder / "decay/earlier-1"
    assert {path.name for path in (folder / "decay").iterdir()} == {"notes.txt", "earlier-1"}
    assert {path.name for path in (folder / "decay/earlier-1").iterdir()} == {*wrote, "hf"}
    assert set_aside(folder / "decay") is None
