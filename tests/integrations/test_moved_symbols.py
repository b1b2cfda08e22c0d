"""The script that is pointed at a newer checkout of a host names each symbol that moved, and where to."""

import subprocess
import sys
from pathlib import Path

import pytest
from host_table import commits

ROOT = Path(__file__).parents[2]
SKYRL = "log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None"


def run(host: str, tree: Path) -> tuple[int, list[str]]:
    command = [sys.executable, str(ROOT / "launch/moved_symbols.py"), host, str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    return done.returncode, done.stdout.splitlines() + done.stderr.splitlines()


@pytest.mark.parametrize(
    ("name", "source", "status", "line"),
    [
        ("ppo_utils", f"def ppo_policy_loss({SKYRL}):\n    pass\n", 0, ": as expected"),
        ("ppo_utils", "def ppo_policy_loss(log_probs, batch):\n    pass\n", 1, "takes (log_probs, batch), but"),
        ("losses", "class Losses:\n    def ppo_policy_loss(self, batch): ...\n", 1,
         "ppo_policy_loss: gone; skyrl/backends/skyrl_train/utils/losses.py:2 Losses.ppo_policy_loss(self, batch)"),
        ("ppo_utils", "", 1, "gone; nothing defines ppo_policy_loss"),
    ],
)  # fmt: skip
def test_symbols_stay_change_move_or_are_gone(name: str, source: str, status: int, line: str, tmp_path: Path) -> None:
    folder = tmp_path / "skyrl/backends/skyrl_train/utils"
    folder.mkdir(parents=True)
    (folder / f"{name}.py").write_text(source)
    found, lines = run("skyrl", tmp_path)
    assert found == status and lines[0] == "skyrl, tested at commit a9564572eb8e" and line in lines[1], lines


def test_another_name_is_answered_with_those_that_are_known(tmp_path: Path) -> None:
    found, lines = run("unknown", tmp_path)
    assert found == 2 and "megatron-lm" in lines[-1] and "trl" in lines[-1]


def test_every_commit_is_that_of_the_table_of_what_ran() -> None:
    tested = commits()
    for host in ("prime-rl", "skyrl", "trl"):
        assert tested[host] in (ROOT / "launch/moved_symbols.py").read_text(), host
