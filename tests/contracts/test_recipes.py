"""Every recipe is a job or a grid that can start, and repeats nothing of its base."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_rc.jobs.grid import GridSettings, cells
from megatron_rc.schema import from_dict, load_yaml
from megatron_rc.settings import job as settings

FOLDER = Path(__file__).parents[2] / "launch/recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.name)
def test_every_recipe_is_a_valid_job_or_grid(path: Path) -> None:
    data = load_yaml(path)
    assert cells(from_dict(GridSettings, data)) if "axes" in data else settings.load(path)


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
