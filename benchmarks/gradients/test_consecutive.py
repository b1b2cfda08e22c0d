"""Cosines of consecutive gradients on the page are those of the committed steps, and those of the runs."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from gradients.consecutive import LAG, arms_of, curves_of, section
from gradients.steps import EXACT_ARM, Step, steps_of
from gradients.truth import CONSECUTIVE
from megatron_rc import schema
from megatron_rc.files import read_csv, write_csv
from megatron_rc.jobs import grid

pytestmark = pytest.mark.full


def runs(seeds: int = 6, later: int = 2) -> list[Step]:
    """Runs of two arms: the cosine is 0.25 with an exact sampler, and follows log k3 by ``later`` steps without one."""
    generator, steps = np.random.default_rng(0), []
    for seed in range(seeds):
        surprise = generator.normal(size=121)
        for step in range(1, 121):
            follows = 0.5 + 0.1 * surprise[step - later] if step > later else 0.5
            fixed = {"ess": 0.9, "grad_norm": 1.0, "length": 10.0, "reward": 0.5}
            steps.append(Step("none", seed, step, cosine=follows, k3=math.exp(surprise[step] / 9) / 20, **fixed))
            steps.append(Step(EXACT_ARM, seed, step, cosine=0.25 if step > 1 else math.nan, k3=0.0, **fixed))
    return steps


def test_the_first_table_holds_means_of_phases_and_the_depth_of_the_gap() -> None:
    lines = [line for line in section(runs()).splitlines() if line.startswith(("| exact", "| `none`"))]
    assert arms_of(runs()) == [EXACT_ARM, "none"]
    assert lines[0] == "| exact sampler | 6 |" + " 0.25 ± 0.00 (0) |" * 4
    assert lines[1].startswith("| `none` | 6 | 0.49 ± 0.02 (1) | 0.50 ± 0.02 (0.99) |")


def test_a_quantity_that_follows_k3_by_two_steps_is_found_to() -> None:
    [line] = [line for line in section(runs()).splitlines() if line.startswith("| cosine of consecutive gradients")]
    _, correlation, distance, _ = line.split(" | ")
    assert float(correlation.split()[0]) > 0.9 and distance == "+2 steps [+2, +2]"


def test_rollouts_younger_than_the_lag_are_left_out_of_the_order() -> None:
    run = [step for step in runs(1) if step.arm == "none"]
    k3, norm = curves_of(run, "grad_norm")
    assert len(k3) == 120 - LAG
    np.testing.assert_allclose(np.exp(k3), [step.k3 for step in run[LAG:]])
    np.testing.assert_allclose(norm, 0)


def test_steps_are_those_of_the_metrics_of_the_finished_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no finished run of consecutive.yaml"):
        steps_of(CONSECUTIVE, tmp_path / "grid")
    plan = grid.load(CONSECUTIVE, output=str(tmp_path / "grid"))
    cells = [cell for cell in grid.cells(plan, {"method": ["none", "two-policies"]}) if cell.seed == 2]
    for cell in cells:
        cell.folder.mkdir(parents=True)
        settings = grid._settings(grid._fields(plan, cell.choices))
        assert settings.train.grad_cosine
        (cell.folder / "settings.yaml").write_text(schema.dump_yaml(schema.to_dict(settings)))
        when = "current" if cell.choices["method"] == "two-policies" else "old"
        measured = {f"{when}/k3": 0.1, f"{when}/ess_token": 0.8, "grad_norm": 2.0, "response_length/mean": 7.5}
        records = [
            {"phase": "rl", "step": step, **measured, "reward/mean": 0.5, **({"grad_cosine": 0.3} if step > 1 else {})}
            for step in range(int(settings.train.steps) + 1)
        ]
        (cell.folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    steps = steps_of(CONSECUTIVE, tmp_path / "grid")
    assert [(step.arm, step.seed, step.step) for step in steps[:2]] == [(EXACT_ARM, 2, 1), (EXACT_ARM, 2, 2)]
    assert len(steps) == 360
    for place, arm in ((239, "none"), (359, "none, old: rollout")):
        assert steps[place] == Step(arm, 2, 120, 0.3, 0.1, 0.8, 2.0, 7.5, 0.5)
    assert math.isnan(steps[0].cosine) and steps[1].horizon_ratio == 1.5
    write_csv(Step, steps, tmp_path / "steps.csv", digits=5)
    assert str(read_csv(Step, tmp_path / "steps.csv")) == str(steps)
