"""The examples run as they stand, and the code of the README does what it says."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from jobs import script_environment

ROOT = Path(__file__).parents[2]


@cache
def printed(example: Path) -> str:
    """What an example prints; each is run once."""
    command = [sys.executable, str(example)]
    done = subprocess.run(command, env=script_environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


# the loop that exists learns little from its old rollouts, one batch teaches nothing, and the others have a test each
APART = ("existing_loop", "correct_a_batch", "patch_existing_loop", "replay_routes")
LEARNING = sorted(path for path in (ROOT / "examples").glob("*.py") if path.stem not in APART)


@pytest.mark.parametrize("example", LEARNING, ids=lambda path: path.name)
def test_an_example_learns(example: Path):
    rewards = [float(found) for found in re.findall(r"reward ([\d.]+)", printed(example))]
    assert rewards[-1] > rewards[0] + 0.2


def test_a_loop_that_exists_learns_twice_as_much_by_one_line_and_is_left_alone_when_only_measured():
    alone = printed(ROOT / "examples/existing_loop.py").splitlines()
    before, after = printed(ROOT / "examples/patch_existing_loop.py").split("after: ")
    # measuring changes no loss, learning rate or reward
    assert [line for line in before.splitlines() if line.startswith("step")] == alone
    rates = {int(step): rate for step, rate in re.findall(r"step (\d+): .*LR ([\d.e-]+)", after)}
    assert [rates[step] for step in (1, 50, 60, 80)] == ["1.0e-02", "1.0e-02", "5.0e-03", "5.0e-03"]
    last = [float(re.findall(r"step 80: reward ([\d.]+)", part)[0]) for part in (before, after)]
    assert last[1] > 2 * last[0] and last[1] > 0.6
    numbers = r"k3 ([\d.]+), ESS of pi/mu ([\d.]+); the loss had ESS ([\d.]+) with weights up to ([\d.]+)"
    (measured,), (acted,) = re.findall(numbers, before), re.findall(numbers, after)
    # weights of 1 are no sign of a small gap
    assert measured[2:] == ("1.0000", "1.000") and float(measured[0]) > 1e-4 and float(measured[1]) < 0.9
    assert float(acted[2]) < 1 < float(acted[3]) <= 2
    assert "existing-loop, restored" in after


def test_replayed_routes_close_a_part_of_the_gap_in_a_plain_loop_that_learns():
    said = printed(ROOT / "examples/replay_routes.py")
    rewards = [float(found) for found in re.findall(r"reward ([\d.]+)", said)]
    assert rewards[-1] > rewards[0] + 0.2
    own, replayed = (
        re.findall(r"k3 without replay ([\d.]+), as trained ([\d.]+)", part) for part in said.split("(R3)")
    )
    assert len(own) == len(replayed) == 6
    assert all(without == trained for without, trained in own)
    # the last line is the mean over all steps: a single batch may show either, by a few tokens
    assert float(replayed[-1][0]) > float(replayed[-1][1])


def test_the_code_of_the_readme_is_an_example_that_runs():
    example = ROOT / "examples/correct_a_batch.py"
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code == example.read_text().partition('"""\n\n')[2]
    assert re.fullmatch(r"k3 0\.00\d\d, ESS 0\.9\d\d\n", printed(example))
