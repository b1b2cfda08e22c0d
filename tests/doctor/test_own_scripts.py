"""A host's own example script with the lines of our page: doctor finds no error in it, and says what is still wrong."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rc.doctor.host.facts import read_hosts
from megatron_rc.doctor.host.flags import Flags
from megatron_rc.doctor.host.traps import flag_checks
from megatron_rc.integrations.hosts import HOSTS

VERL = "examples/grpo_trainer/run_"
NEMO = "examples/configs/grpo_math_"


def script(variable: str, name: str) -> Path:
    """A file of the tree that a variable names."""
    path = Path(os.environ.get(variable, ""), name)
    if variable not in os.environ or not path.is_file():
        pytest.skip(f"{variable} names no tree with {name}")
    return path


def found(host: str, flags: Flags) -> dict[str, set[str]]:
    """Decided checks that are not good, by status."""
    (facts,) = read_hosts([host], flags)
    findings = flag_checks(HOSTS[host]).run(replace(facts, is_importable=True))
    assert sum(finding.decided for finding in findings) > 10
    return {
        status: {finding.check for finding in findings if finding.decided and finding.status == status}
        for status in ("error", "warning")
    }


@pytest.mark.parametrize(("name", "warnings"), [("run-qwen3-4B.sh", set()), ("run-qwen3-30B-A3B.sh", {"moe-replay"})])
def test_two_flags_more_make_a_script_of_slime_a_corrected_one(name: str, warnings: set[str], tmp_path: Path) -> None:
    own = script("SLIME_DIR", f"scripts/{name}")
    (tmp_path / "rc.yaml").write_text("megatron_rc: {correction: token-tis, lr_decay: {}}\n")
    enable = "--custom-megatron-init-path megatron_rc.integrations.slime.enable"
    text = own.read_text().replace("train.py", f"train.py --custom-config-path {tmp_path}/rc.yaml {enable}")
    for line in ("source", "models"):
        assert line in text
    (tmp_path / "models").symlink_to(own.parent / "models")
    (tmp_path / name).write_text(text)
    assert found("slime", Flags.of_file(tmp_path / name)) == {"error": set(), "warning": warnings}


@pytest.mark.parametrize(
    ("name", "warnings"),
    [("qwen3_8b_megatron", set()), ("qwen3_30b_a3b_megatron", {"moe-replay"}), ("deepseek_v4_veomni", set())],
)
def test_one_variable_makes_a_script_of_verl_a_corrected_one(
    name: str, warnings: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_RC_CONFIG", "{correction: token-tis}")
    monkeypatch.setenv("HF_HUB_CACHE", "/nonexistent")
    flags = Flags.of_file(script("VERL_DIR", f"{VERL}{name}.sh"))
    assert found("verl", flags) == {"error": set(), "warning": warnings}


@pytest.mark.parametrize("name", ["1B", "8B_megatron", "8B_megatron_fp8", "70B_megatron_fp8"])
def test_words_before_the_script_make_a_configuration_of_nemo_rl_a_corrected_one(name: str) -> None:
    own = script("NEMO_RL_DIR", f"{NEMO}{name}.yaml")
    words = "-m megatron_rc patch --rc-host nemo-rl --rc-preset token-tis examples/run_grpo.py --config"
    assert found("nemo-rl", Flags([*words.split(), str(own)])) == {"error": set(), "warning": set()}
