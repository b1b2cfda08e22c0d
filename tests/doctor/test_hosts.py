"""What doctor says of codebases that patch knows, and of the Python that would run them."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
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
