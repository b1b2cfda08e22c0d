"""A kernel of every family that is wrong in one line fails the test that is named for it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


class Wrong(NamedTuple):
    file: str
    """In triton_kernels/."""
    line: str
    """As it is there, once."""
    becomes: str
    test: str
    """In tests/kernels/."""


WRONG = {
    # an entropy without the part of the other lanes
    "row statistics": Wrong(
        "row_statistics.py",
        "row_shifted = tl.sum(keep * (shifted + down * total), 0) * inverse",
        "row_shifted = tl.sum(keep * shifted, 0) * inverse",
        "test_rows.py::test_temperature_divides_the_logits_and_the_gradient",
    ),
    # the temperature of the log-prob alone
    "row gradient": Wrong(
        "row_gradient.py",
        "slope *= -inverse",
        "slope *= -1.0",
        "test_rows.py::test_temperature_divides_the_logits_and_the_gradient",
    ),
    # a token exactly on a bound is dropped
    "correction": Wrong(
        "gates.py",
        "(value <= bounds[5 + 2 * INDEX])) == 0",
        "(value < bounds[5 + 2 * INDEX])) == 0",
        "test_correction_contract.py::test_a_ratio_exactly_on_a_bound_is_kept",
    ),
    # the gradient of the KL term with the wrong sign
    "policy loss": Wrong(
        "policy_loss.py",
        "gain += kl_coef * (-ratio * distance)",
        "gain += kl_coef * (ratio * distance)",
        "test_policy_loss.py::test_k3_of_near_and_far_policies_keeps_its_relative_accuracy",
    ),
    # only the low 8 bits of the ids are compared
    "routes": Wrong(
        "compare_routes.py",
        "matched |= (a_ids == b_id[:, None]).to(tl.int32)",
        "matched |= ((a_ids & 255) == (b_id[:, None] & 255)).to(tl.int32)",
        "test_routes.py::test_ids_that_agree_in_their_low_bits_only_differ",
    ),
}


def check_out(wrong: Wrong, folder: Path) -> None:
    for name in ("megatron_rc", "triton_kernels"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "triton_kernels" / wrong.file
    source = file.read_text()
    assert source.count(wrong.line) == 1, f"{wrong.file} has {source.count(wrong.line)} times: {wrong.line}"
    file.write_text(source.replace(wrong.line, wrong.becomes))


# each of these tests starts a process; without --full, only one of them runs
@pytest.mark.interpreter
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "row gradient" else pytest.mark.full) for name in WRONG]
)
def test_it_fails_its_test_by_an_assertion(family: str, tmp_path: Path) -> None:
    wrong = WRONG[family]
    check_out(wrong, tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", f"tests/kernels/{wrong.test}"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == pytest.ExitCode.TESTS_FAILED, ran.stdout + ran.stderr
    assert "AssertionError" in ran.stdout or "E       assert" in ran.stdout, ran.stdout
    assert "1 failed" in ran.stdout
