"""Every recipe is a job or a grid that can start and repeats nothing of its base, and that of the first run learns."""

import resource
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import ROOT, finished_job, train, typed_job

from megatron_rc.jobs.grid import GridSettings, cells
from megatron_rc.schema import from_dict, load_yaml
from megatron_rc.settings import job

FOLDER = ROOT / "launch/recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.name)
def test_every_recipe_is_a_valid_job_or_grid(path: Path) -> None:
    data = load_yaml(path)
    assert cells(from_dict(GridSettings, data)) if "axes" in data else job.load(path)


def repeated(changes: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """The fields that both have, with the same value."""
    names = []
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            names += [f"{key}.{name}" for name in repeated(value, base[key])]
        elif key in base and base[key] == value:
            names.append(key)
    return names


def test_a_recipe_states_what_differs_from_its_base_alone() -> None:
    derived = 0
    for path in sorted(FOLDER.rglob("*.yaml")):
        changes = yaml.safe_load(path.read_text())
        if base := changes.pop("base", None):
            derived += 1
            assert repeated(changes, load_yaml(path.parent / base)) == [], path.name
    assert derived >= 14


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
