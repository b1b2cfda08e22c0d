"""What doctor says of codebases that patch knows, of scripts of theirs with our lines, and of the Python beneath."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flag_traps import traps
from refusals import run

from megatron_rc.doctor.host.checks import PRESENCE, HostFacts, check_host, examine_hosts, read_hosts
from megatron_rc.doctor.host.flags import Flags
from megatron_rc.doctor.python import ENVIRONMENT, Environment, read_environment
from megatron_rc.doctor.registry import Finding, worst
from megatron_rc.exit_status import ExitStatus
from megatron_rc.integrations import symbols
from megatron_rc.integrations.flag_rules import FlagRule
from megatron_rc.integrations.hosts import HOSTS
from megatron_rc.integrations.symbols import Host
from megatron_rc.source import body_of, definition

STUB = Path(__file__).parents[1] / "support/hosts/megatron_training"
HOST, MODULE, RULE = "megatron-training", "megatron.training.training", "get_optimizer_param_scheduler"


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path with the files of megatron-core 0.19.2 that doctor reads."""
    for file, text in {
        "core/__init__.py": "raise RuntimeError('doctor imports nothing of a host')",
        "core/package_info.py": "MAJOR = 0\nMINOR = 19\nPATCH = 2\nPRE_RELEASE = ''\n",
        "core/datasets/Makefile": "default:\n",
        "training/__init__.py": "raise RuntimeError('doctor imports nothing of a host')",
        "training/training.py": (STUB / "megatron/training/training.py").read_text(),
    }.items():
        path = tmp_path / "megatron" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    # the stand-in's own code counts as tested
    training = tmp_path / "megatron/training/training.py"
    of_stub = {f"{MODULE}.{name}": {body_of(definition(training, name))} for name in ("train_step", RULE)}
    monkeypatch.setattr(symbols, "known_bodies", lambda: of_stub)
    return tmp_path / "megatron"


def found(name: str = HOST) -> dict[str, Finding]:
    (facts,) = read_hosts([name], None)
    return {finding.check: finding for finding in check_host(facts)}


def test_a_host_that_suits_the_patch_is_good_and_nothing_of_it_is_imported(stub: Path) -> None:
    findings = found()
    assert {f.status for f in findings.values() if f.decided} == {"good"}
    assert {f.found for f in findings.values() if not f.decided} == {"the host's flags are not known"}
    assert "0.19.2" in findings["version"].found
    step = findings[f"{MODULE}.train_step"]
    assert "takes (forward_step_func, data_iterator, model, optimizer," in step.found and "pools" in step.found
    assert "megatron.training" not in sys.modules


@pytest.mark.parametrize(
    ("status", "change", "check", "sentence"),
    [
        ("error", ("iteration=None", "step=None"), "train_step", "but the patch was made for"),
        ("error", ("def train_step", "def one_step"), "train_step", "is missing from"),
        ("warning", ("def get_optimizer_param", "def optimizer_param"), RULE, "refuses only settings that need it"),
        ("error", ("MINOR = 19", "MINOR = 16"), "version", "0.16.2, and patch knows 0.17, 0.18"),
        ("warning", ("p2p_communicator=None", "p2p_communicator=None, clock=None"), "train_step", "takes clock"),
        ("warning", ("MINOR = 19", "MINOR = 99"), "version", "of its symbols were compared"),
        ("note", ("increment=1", "increment=2"), "train_step", "its code is not that of 0.17.1"),
    ],
)
def test_a_changed_host_is_an_error_and_one_with_more_a_warning(
    stub: Path, status: str, change: tuple[str, str], check: str, sentence: str
) -> None:
    file = stub / ("core/package_info.py" if check == "version" else "training/training.py")
    file.write_text(file.read_text().replace(*change))
    (finding,) = [f for name, f in found().items() if name.endswith(check)]
    assert finding.status == status, finding.found
    assert sentence in finding.found and finding.fix


def test_comments_annotations_and_docstrings_are_not_code(stub: Path) -> None:
    path = stub / "training/training.py"
    commented = path.read_text().replace("for _ in range", "# once more\n    for _ in range")
    path.write_text(commented.replace(f"def {RULE}(optimizer):", f'def {RULE}(optimizer: int) -> str:\n    """New."""'))
    assert {finding.status for finding in found().values() if finding.decided} == {"good"}


@pytest.mark.parametrize(
    ("host", "python", "status"),
    [
        ("megatron-lm", "3.11.9", "error"), ("megatron-lm", "3.12.0", "good"), ("slime", "3.13.0", "good"),
        ("nemo-rl", "3.12.1", "error"), ("nemo-rl", "3.13.5", "good"), ("verl", "3.13.0", "error"),
        ("verl", "3.11.2", "good"),
    ],
)  # fmt: skip
def test_a_python_that_the_host_does_not_take_is_an_error(host: str, python: str, status: str) -> None:
    (facts,) = read_hosts([host], None)
    finding = PRESENCE["python"].run(replace(facts, is_importable=True, python=python))
    assert finding.status == status and python in finding.found


def test_a_wheel_without_the_makefile_that_training_runs_is_a_warning(stub: Path) -> None:
    (stub / "core/datasets/Makefile").unlink()
    finding = found()["dataset-helpers"]
    assert finding.status == "warning" and "no Makefile" in finding.found and "compile_helpers" in finding.fix


def test_a_host_that_is_not_here_is_an_error_only_when_it_was_asked_for() -> None:
    assert found("miles")["importable"].status == "error"
    findings = examine_hosts([], [], None)
    assert list(findings) == [*(f"host {name}" for name in HOSTS), "Python environment"]
    assert [(f.check, f.status) for f in findings["host miles"]] == [("importable", "note")]
    assert "radixark/miles" in findings["host miles"][0].fix
    # on a login node the flags are all that can be checked
    given = examine_hosts(["miles"], ["--rollout-temperature", "1"], None)["host miles"]
    assert given[0].status == "warning" and worst(given) == "warning", given


def test_a_host_is_known_to_doctor_by_its_table_alone() -> None:
    problem = "volume {args.volume} is above {args.limit}"
    rule = FlagRule("loud", lambda args: args.volume > args.limit, problem, "Lower --volume.", "it is quiet", "warning")
    table = {"flag_rules": (rule,), "flag_defaults": {"volume": 3, "limit": 9}, "where": "Ask the neighbours."}
    unknown = Host("newcomer", "newcomer_host", (), (), lambda: None, **table)
    for flags, sentence in ((["--volume", "11"], "volume 11 is above 9"), ([], "it is quiet")):
        facts = HostFacts(unknown, False, None, {}, Flags(flags), asked=True)
        checked = {finding.check: finding for finding in check_host(facts)}
        assert checked["importable"].fix == "Ask the neighbours."
        assert (checked["loud"].found, checked["loud"].fix) == (sentence, "Lower --volume." if flags else "")
        assert "router-dtype" in checked


LIBRARIES = {"torch": "2.13", "triton": "3.9", "transformer_engine": "2.20", "apex": "0.1", "flash_attn": "2.8"}


@pytest.mark.parametrize(
    ("changes", "check", "status", "sentence"),
    [
        ({}, "apex", "good", "NVIDIA Apex 0.1"),
        ({"apex_kernels": False}, "apex", "warning", "is not NVIDIA's"),
        ({"libraries": {**LIBRARIES, "apex": None}}, "apex", "note", "NVIDIA Apex is missing"),
        ({"libraries": {**LIBRARIES, "transformer_engine": None}}, "transformer-engine", "note", "context parallelism"),
        ({"libraries": {**LIBRARIES, "flash_attn": None}}, "flash-attn", "note", "packed sequences"),
        ({"megatron_core": None}, "megatron-core", "note", "not installed"),
        ({"megatron_core": "0.15.3"}, "megatron-core", "warning", "0.15.3 is none of 0.16"),
        ({"megatron_core": "0.19.0rc1"}, "megatron-core", "good", "0.19.0rc1"),
    ],
)
def test_what_a_python_lacks(changes: dict[str, Any], check: str, status: str, sentence: str) -> None:
    facts = Environment(**{"megatron_core": "0.19.2", "libraries": LIBRARIES, "apex_kernels": True} | changes)
    (finding,) = [f for f in ENVIRONMENT.run(facts) if f.check == check]
    assert finding.status == status, finding.found
    assert sentence in finding.found
    assert bool(finding.fix) == (status != "good")


def test_this_python_is_read_as_it_is() -> None:
    here = read_environment()
    assert here.megatron_core == "0.16.1" and here.libraries["transformer_engine"] is None
    assert str(here.libraries["torch"]).startswith("2.") and worst(ENVIRONMENT.run(here)) == "note"


def test_errors_have_a_status_of_their_own_and_json_has_them(stub: Path) -> None:
    ended = run("doctor", "--host", HOST, "--json", "--", "--cuda-graph-impl", "full_iteration")
    errors = [f["check"] for f in json.loads(ended.stdout)[f"host {HOST}"] if f["status"] == "error"]
    assert (ended.status, errors) == (ExitStatus.WRONG, ["full-iteration-graph"])
    assert run("doctor", "--host", HOST, "--", "--cuda-graph-impl", "local").status == 0


def test_flags_come_from_a_file_or_a_launch_script(stub: Path, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    comment = "# not now: --moe-enable-routing-replay --moe-router-fusion"
    script.write_text(f"{comment}\ntorchrun train.py \\\n  --cuda-graph-impl=full_iteration \\\n  $MORE\n")
    status, said, _ = run("doctor", "--host", HOST, "--flags-file", script)
    assert status == ExitStatus.WRONG and "error   full-iteration-graph" in said and "flags may hide in $MORE" in said
    assert "not decided: --moe-router-fusion may be set in $MORE" in said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--host", "megatron"], "host must be 'auto' or one of 'megatron-lm'"),
        (["--", "--lr", "1"], "flags need exactly one --host"),
        (["--host", HOST, "--flags-file", "{folder}/none.sh"], "flags_file must be a file"),
        (["--host", HOST, "--flags-file", "{folder}/open.sh"], "cannot be split into words"),
        (["--host", HOST, "--flags-file", "{folder}/open.sh", "--", "--lr"], "not both"),
        (["--host", "megatron-lm", "--", "--rl-default-temperature", "hot"], "--rl-default-temperature must be"),
        (["--sglang", "http://127.0.0.1:9"], "http://127.0.0.1:9 refuses connections"),
        (["--sglang", "127.0.0.1:9"], "urls must start with http://"),
        (["--hf-path", "{folder}"], "has no config.json"),
        (["--config", "{folder}/none.yaml"], "no such file"),
    ],
)
def test_what_cannot_be_read_is_one_sentence_and_status_2(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "open.sh").write_text("echo 'open")
    assert (ended := run("doctor", *(a.format(folder=tmp_path) for a in arguments))).is_refusal(sentence), ended


def test_looking_at_hosts_imports_no_megatron() -> None:
    code = (
        "import sys; from megatron_rc.doctor.host.checks import examine_hosts; examine_hosts([], [], None);"
        "sys.exit(any(m.partition('.')[0] in ('megatron', 'transformer_engine') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0


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
