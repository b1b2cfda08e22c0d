"""The first run of docs/first_run.md: the page shows the recipe, every YAML of it is a job, and the run learns."""

import resource
from pathlib import Path

import pytest
from jobs import ROOT, finished_job, train, typed_job

from megatron_rc.settings import job

RECIPE = ROOT / "launch/recipes/laptop.yaml"
FEW = ("warmup.steps=2", "warmup.batch_size=4", "train.steps=2", "rollout.prompts_per_step=2")


def test_the_page_shows_the_recipe_and_its_own_job_is_one(tmp_path: Path) -> None:
    shown, own = ((ROOT / "docs/first_run.md").read_text().split("```yaml\n")[n].split("```")[0] for n in (1, 2))
    assert shown == RECIPE.read_text()
    (tmp_path / "my.yaml").write_text(own.replace("launch/recipes/laptop.yaml", str(RECIPE)))
    mine = job.load(tmp_path / "my.yaml")
    assert mine.correction.weight and mine.rollout.lag and mine.task == job.load(RECIPE).task


def test_the_first_run_takes_one_process_and_writes_its_report(tmp_path: Path) -> None:
    records = finished_job(RECIPE, *train(RECIPE, tmp_path, *FEW)[2:])
    assert [record["step"] for record in records if "eval/accuracy" in record] == [0, 2]
    assert (tmp_path / "report.html").is_file()


@pytest.mark.full
def test_the_first_run_gains_20_points_in_4_gigabytes(tmp_path: Path) -> None:
    records = typed_job(RECIPE, *train(RECIPE, tmp_path)[2:])
    accuracy = [record["eval/accuracy"] for record in records if "eval/accuracy" in record]
    assert accuracy[-1] - accuracy[0] >= 0.2
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 4 * 2**20  # KiB
