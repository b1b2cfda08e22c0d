"""Runs of the collapse lab that are made again say what their committed rows say."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import environment

from collapse.reading import read
from collapse.rows import stages
from collapse.runs import load

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]

RECIPES = ROOT / "launch/recipes/collapse"


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not stages(), reason="no run of the lab is committed")
def test_three_cells_that_run_again_agree_within_the_spread_of_their_seeds(tmp_path: Path) -> None:
    recipe = RECIPES / "quick.yaml"
    command = [sys.executable, "-m", "megatron_rc", "grid", str(recipe), "--output", str(tmp_path / "quick")]
    subprocess.run([*command, "--workers", "2"], env=environment(), check=True)
    again, results = read(recipe, tmp_path / "quick")[0], load(recipes=RECIPES)
    assert len(again) == 3
    for row in again:
        arm = {before.seed: before for before in results.rows if (before.world, before.run) == (row.world, row.run)}
        before, spread = arm[row.seed], statistics.stdev(each.final for each in arm.values())
        # two honest runs of one cell and one seed differ by rounding alone, of two cells by what the seeds spread
        assert row.final == pytest.approx(before.final, abs=2 * spread), row.run
        assert row.fell == before.fell, row.run
        assert row.k3_early == pytest.approx(before.k3_early, rel=0.5, abs=1e-9), row.run
