"""Learning rates that the tuning seeds choose, the ranking of methods, and the runs of the plan that are left."""

import dataclasses
import math
from pathlib import Path

import pytest

from collapse import made_up as lab
from collapse import methods, plan
from collapse.rows import Row
from collapse.rules import CANNOT_TELL, SUPPORTS, Claim, Comparison, answers, final
from collapse.runs import TUNING, Arm, Results
from megatron_rc.jobs import grid as grids

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]

RECIPES = ROOT / "launch/recipes/collapse"
TUNED = (TUNING, TUNING + 1)
ENDS = {"token-tis": {1e-4: 0.8, 3e-4: 0.5}, "seq-tis": {1e-4: 0.6, 3e-4: 0.9}}
"""Final accuracy on the tuning seeds."""


def runs(method: str, lr: float, final: float, seeds: tuple[int, ...]) -> list[Row]:
    made = [lab.run("lag", "16", method, lr, seed, False)[0] for seed in seeds]
    return [dataclasses.replace(row, final=final) for row in made]


def results(**changed: dict[float, float]) -> Results:
    """Every method at its rates on the tuning seeds; on the seeds that are reported, 3e-4 ends 10 points higher."""
    ends = {name.replace("_", "-"): each for name, each in changed.items()} or ENDS
    rows = [row for name, each in ends.items() for lr, final in each.items() for row in runs(name, lr, final, TUNED)]
    rows += [
        row
        for name in ends
        for lr, final in ((1e-4, 0.7), (3e-4, 0.8))
        for row in runs(name, lr, final + 0.05 * (name == "seq-tis"), (1, 2, 3, 4, 5))
    ]
    return Results(rows)


def arm(results: Results, method: str) -> Arm:
    return Arm.of(next(row for row in results.rows if row.method == method))


OWN = Comparison(
    "own", final, "more", {"mechanism": "lag", "method": "seq-tis"}, {"method": "token-tis"}, own_rates=True
)


def test_the_tuning_seeds_choose_the_rate_that_ends_highest_whatever_the_reported_ones_say() -> None:
    made = results()
    assert {name: methods.chosen(made, arm(made, name)) for name in ENDS} == {"token-tis": 1e-4, "seq-tis": 3e-4}


def test_a_rate_with_fewer_tuning_seeds_or_a_run_that_broke_is_not_chosen() -> None:
    made = results()
    made.tuning = [row for row in made.tuning if (row.method, row.lr, row.seed) != ("seq-tis", 3e-4, TUNING)]
    assert methods.chosen(made, arm(made, "seq-tis")) is None
    broken = results()
    broken.tuning = [dataclasses.replace(row, final=math.nan) if row.lr == 3e-4 else row for row in broken.tuning]
    assert methods.chosen(broken, arm(broken, "seq-tis")) == 1e-4


def test_each_arm_is_compared_at_its_own_rate() -> None:
    (answer,) = answers(Claim("x", "", (OWN,)), results())
    assert answer.case.startswith("lr 0.0003 against 0.0001, ")
    assert (answer.answer, answer.why.split(":")[0]) == (SUPPORTS, "final accuracy 85.0 against 70.0")


def test_without_a_chosen_rate_the_comparison_was_not_run() -> None:
    made = results()
    made.tuning = []
    (answer,) = answers(Claim("x", "", (OWN,)), made)
    assert (answer.answer, answer.why, methods.rates(made)) == (CANNOT_TELL, "not run yet", "")


def test_the_table_marks_the_chosen_rates() -> None:
    lines = methods.rates(results()).splitlines()
    assert [line.split(" | ")[2:] for line in lines[2:]] == [
        ["seq-tis", "75 %, 0 of 0 failed", "**85 %, 0 of 0 failed** |"],
        ["token-tis", "**70 %, 0 of 0 failed**", "80 %, 0 of 0 failed |"],
    ]


def test_the_ranking_is_of_the_setting_with_most_arms_and_pairs_its_seeds() -> None:
    ends = {"seq-tis": (0.8, 0.9, 1.0), "token-tis": (0.9, 0.95), "icepop": (0.7, math.nan)}
    made = [lab.run("lag", "4", name, 3e-4, 1, False)[0] for name in ("seq-tis", "none")]
    for name, finals in ends.items():
        for seed, end in enumerate(finals, 1):
            made.append(dataclasses.replace(lab.run("lag", "16", name, 3e-4, seed, False)[0], final=end))
    made.append(dataclasses.replace(made[-1], control="random-mask", seed=3, final=0.1))
    where, lines = methods.ranking(Results(made))
    assert where.startswith("lag 16, lr 0.0003, ")
    assert [line.split(" | ")[:5] for line in lines.splitlines()[2:]] == [
        ["| token-tis", "2", "92.5%", "90.0%", "+7.5 [-8.3, +23.3]"],  # 10 and 5 points
        ["| seq-tis", "3", "90.0%", "80.0%", ""],
        ["| icepop", "2", "35.0%", "0.0%", "-50.0 [-302.6, +202.6]"],  # -10 and -90: a run that broke ends at 0
        ["| icepop, random-mask", "1", "10.0%", "10.0%", "-90.0"],
    ]
    assert methods.ranking(Results([])) == ("", "")


def test_what_is_left_of_the_plan_are_the_runs_of_its_recipes_without_a_row(tmp_path: Path) -> None:
    every = {path.stem: plan.planned(path) for path in RECIPES.glob("*.yaml")}
    wanted = set(sorted(every["turns"])[:3]) | set(sorted(every["precision"])[-2:])
    done = {run for runs in every.values() for run in runs} - wanted
    (tmp_path / "long.yaml").write_text("left over from another time")
    files = plan.write_left(done, RECIPES, tmp_path)
    assert (
        [file.name for file in files]
        == sorted(file.name for file in tmp_path.iterdir())
        == ["precision.yaml", "turns.yaml"]
    )
    assert {run for file in files for run in plan.planned(file)} == wanted
    for file in files:
        left, whole = grids.load(file), grids.load(RECIPES / file.name)
        # home is the folder of the file
        assert dataclasses.replace(left, cells=whole.cells, home=whole.home) == whole
