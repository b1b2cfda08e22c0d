"""A host's own example script with the lines of our page: doctor finds no error in it, and says what is still wrong."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from flag_traps import traps

from megatron_rc.doctor.host.flags import Flags

MILES = "examples/infra_features/low_precision/run-"
ENABLE = "--custom-megatron-init-path megatron_rc.integrations.slime.enable"


def script(variable: str, name: str) -> Path:
    path = Path(os.environ.get(variable, ""), name)
    if variable not in os.environ or not path.is_file():
        pytest.skip(f"{variable} names no tree with {name}")
    return path


def judged(host: str, flags: Flags, at_least: int = 11) -> tuple[set[str], set[str]]:
    """(checks that warn, checks that are undecided); none is an error, and ``at_least`` so many are decided."""
    findings = traps(host, flags).values()
    status = {finding.check: finding.status for finding in findings if finding.decided}
    assert len(status) >= at_least and "error" not in status.values(), status
    return {check for check in status if status[check] == "warning"}, {f.check for f in findings if not f.decided}


def with_enable(text: str, folder: Path) -> str:
    """A script of slime or miles with the two flags of our page, and without weights of its own."""
    text = re.sub(r"(?m)^ *--use-tis *\n", "", text)
    (folder / "rc.yaml").write_text("megatron_rc: {correction: token-tis, lr_rule: length_decay}\n")
    return text.replace("train.py", f"train.py --custom-config-path {folder}/rc.yaml {ENABLE}")


@pytest.mark.host("slime", proof="own code", feature="no error of doctor in its own script with our lines")
@pytest.mark.parametrize(("name", "warnings"), [("run-qwen3-4B.sh", set()), ("run-qwen3-30B-A3B.sh", {"moe-replay"})])
def test_two_flags_more_make_a_script_of_slime_a_corrected_one(name: str, warnings: set[str], tmp_path: Path) -> None:
    own = script("SLIME_DIR", f"scripts/{name}")
    text = with_enable(own.read_text(), tmp_path)
    assert "source" in text and "models" in text
    (tmp_path / "models").symlink_to(own.parent / "models")
    (tmp_path / name).write_text(text)
    assert judged("slime", Flags.of_file(tmp_path / name))[0] == warnings


@pytest.mark.host("miles", proof="own code", feature="no error of doctor in its own script with our lines")
@pytest.mark.parametrize(
    ("name", "model", "warnings"),
    [("qwen3-4b-fp8", "qwen3-4B", set()), ("qwen3-30b-a3b-fp8-two-nodes", "qwen3-30B-A3B", {"moe-replay"})],
)
def test_two_flags_more_make_a_script_of_miles_a_corrected_one(
    name: str, model: str, warnings: set[str], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text := with_enable(script("MILES_DIR", f"{MILES}{name}.sh").read_text(), tmp_path))
    flags = Flags.of_file(tmp_path / name)
    # a program of miles prints flags of the model into an array
    warned, undecided = judged("miles", flags, 1)
    assert flags.hidden == ("${MODEL_ARGS[@]}",) and not warned
    assert undecided >= {"router-dtype", "moe-replay", "megatron-rc-settings"}
    program = script("MILES_DIR", "miles/utils/external_utils/model_args_utils.py")
    printed = subprocess.run([sys.executable, program, model], capture_output=True, text=True, check=True).stdout
    text, replaced = re.subn(r"(?m)^read -ra MODEL_ARGS .*$", f"MODEL_ARGS=({printed.strip()})", text)
    (tmp_path / name).write_text(text)
    assert replaced == 1 and judged("miles", Flags.of_file(tmp_path / name)) == (warnings, set())


@pytest.mark.host("megatron-lm", proof="own code", feature="no error of doctor in its own script with our lines")
@pytest.mark.parametrize(
    ("model", "warnings", "open_checks"),
    [(None, set(), {"gathered-logits"}), ("qwen3_4b", set(), set()), ("qwen3_30b_a3b_moe", {"router-dtype"}, set())],
)
def test_words_before_train_rl_make_the_command_of_megatron_lm_a_corrected_one(
    model: str | None, warnings: set[str], open_checks: set[str], tmp_path: Path
) -> None:
    page = script("MEGATRON_LM_DIR", "examples/rl/README.md").read_text()
    (command,) = re.findall(r"```bash\n([^`]*torchrun[^`]*)```", page)
    assert command.count("train_rl.py") == 1
    if model is not None:
        # its file has the flags that the page writes out for another model
        own = script("MEGATRON_LM_DIR", f"examples/rl/model_configs/{model}.sh")
        command = f"source {own}\n{command[command.index('torchrun') :]}"
    options = "--rc-preset token-tis --rc-lr-rule length_decay"
    words = f"-m megatron_rc patch {options} train_rl.py --rl-inference-logprobs-is-correction"
    (tmp_path / "run.sh").write_text(command.replace("train_rl.py", words))
    assert judged("megatron-lm", Flags.of_file(tmp_path / "run.sh")) == (warnings, open_checks)


@pytest.mark.host("megatron-training", proof="own code", feature="no error of doctor in its own script with our lines")
@pytest.mark.parametrize(
    ("name", "warnings"),
    [("gpt3/train_gpt3_175b_distributed", set()), ("mixtral/train_mixtral_8x7b_distributed", {"router-dtype"})],
)
def test_a_script_of_pretrain_has_no_flag_that_stands_in_the_way_of_the_patch(name: str, warnings: set[str]) -> None:
    flags = Flags.of_file(script("MEGATRON_LM_DIR", f"examples/{name}.sh"))
    assert "pretrain_gpt.py" in flags.words and judged("megatron-training", flags, 6) == (warnings, set())


@pytest.mark.host("verl", proof="own code", feature="no error of doctor in its own script with our lines")
@pytest.mark.parametrize(
    ("name", "warnings"),
    [("qwen3_8b_megatron", set()), ("qwen3_30b_a3b_megatron", {"moe-replay"}), ("deepseek_v4_veomni", set())],
)
def test_one_variable_makes_a_script_of_verl_a_corrected_one(name: str, warnings: set[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("MEGATRON_RC_CONFIG", "{correction: token-tis}")
    monkeypatch.setenv("HF_HUB_CACHE", "/nonexistent")
    assert judged("verl", Flags.of_file(script("VERL_DIR", f"examples/grpo_trainer/run_{name}.sh")))[0] == warnings


@pytest.mark.host("nemo-rl", proof="own code", feature="no error of doctor in its own script with our lines")
@pytest.mark.parametrize("name", ["1B", "8B_megatron", "8B_megatron_fp8", "70B_megatron_fp8"])
def test_words_before_the_script_make_a_configuration_of_nemo_rl_a_corrected_one(name: str) -> None:
    own = script("NEMO_RL_DIR", f"examples/configs/grpo_math_{name}.yaml")
    words = "-m megatron_rc patch --rc-host nemo-rl --rc-preset token-tis examples/run_grpo.py --config"
    assert not judged("nemo-rl", Flags([*words.split(), str(own)]))[0]
