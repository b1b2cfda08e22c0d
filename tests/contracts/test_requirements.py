"""What an installation requires: nothing that replaces a host's packages, and enough for what needs no torch."""

import os
import re
import subprocess
import sys
from email.message import Message
from pathlib import Path

import pytest
from built_wheel import ROOT, installed, requirements, with_requirements
from host_pins import BROUGHT_BY_HOSTS, HOST_PINS, held
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from megatron_rc import versions
from megatron_rc.exit_status import ExitStatus


def unconditional(metadata: Message) -> list[Requirement]:
    return [r for r in requirements(metadata) if "extra" not in str(r.marker)]


def test_the_light_core_requires_nothing_that_a_host_brings(metadata: Message) -> None:
    names = {canonicalize_name(r.name) for r in unconditional(metadata)}
    assert names == {"numpy", "pyarrow", "pydantic", "pyyaml", "rich", "typer"}
    assert not names & BROUGHT_BY_HOSTS


def test_nothing_that_a_host_brings_is_bounded_from_above(metadata: Message) -> None:
    operators = {str(r): {s.operator for s in r.specifier} for r in requirements(metadata)}
    assert {text: found for text, found in operators.items() if found - {">=", ">", "!="}} == {}


@pytest.mark.parametrize("host", HOST_PINS)
def test_every_requirement_admits_what_the_host_holds(host: str, metadata: Message) -> None:
    pins = dict(HOST_PINS[host])
    assert SpecifierSet(metadata["Requires-Python"]).contains(pins.pop("python", "3.12"))
    for requirement in requirements(metadata):
        pin = pins.get(canonicalize_name(requirement.name))
        # pip keeps an installed pre-release, if the numbers admit it
        assert pin is None or requirement.specifier.contains(held(pin), prereleases=True), (str(requirement), pin)
    assert set(pins) <= {canonicalize_name(r.name) for r in requirements(metadata)}


def test_recipes_of_hosts_install_the_light_core() -> None:
    pages = sorted((ROOT / "docs/hosts").glob("*.md"))
    installed = [line for page in pages for line in page.read_text().splitlines() if "pip install" in line]
    assert len(installed) >= 3
    # a constraints file pins what the host brings, and so does an extra that names it
    assert [
        line for line in installed if "constraints" in line or "[" in line.split("#")[0].partition("pip install")[2]
    ] == []


def test_an_extra_is_named_for_every_module_that_it_brings(metadata: Message) -> None:
    distributions = {"megatron": "megatron-core", "math_verify": "math-verify", "reasoning_gym": "reasoning-gym"}
    for extra, modules in versions.MODULES_OF_EXTRA.items():
        brought = {canonicalize_name(r.name) for r in requirements(metadata) if f'extra == "{extra}"' in str(r.marker)}
        assert {distributions.get(m, m) for m in modules} <= brought, extra


@pytest.fixture(scope="module")
def light(wheel: Path, metadata: Message, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of an environment with the wheel and what it requires, and nothing else."""
    python = installed(wheel, tmp_path_factory.mktemp("light") / "venv")
    with_requirements(python, requirements(metadata))
    return python


COMMAND = "import sys; sys.modules |= dict.fromkeys(('fcntl', 'resource')); from megatron_rc.cli import main; main()"
"""Without what Linux alone has."""


def run(python: Path, *arguments: str, command: str = COMMAND) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of ``megatron-rc`` with these arguments."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TRITON"))}
    program = [str(python), "-c", command, *arguments]
    done = subprocess.run(program, capture_output=True, text=True, env=environment | {"COLUMNS": "200"})
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [("doctor",), ("doctor", "--host", "slime"), ("settings",), ("presets",), ("demo",), ("explain", "RC303")],
    ids=" ".join,
)
def test_the_light_core_runs_what_needs_no_torch(light: Path, arguments: tuple[str, ...]) -> None:
    status, said, errors = run(light, *arguments)
    assert errors == "" and said
    # a host that somebody names and that is not there is an error of doctor, not of the command
    assert status == (ExitStatus.WRONG if "--host" in arguments else ExitStatus.DONE)


def test_the_light_core_reports_a_run(light: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "phase": "train", "reward": 0.5}\n')
    status, said, errors = run(light, "report", str(tmp_path))
    assert (status, errors) == (0, "") and Path(said.strip()).is_file()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("train", str(ROOT / "launch/recipes/quickstart_single.yaml")), "megatron-rc train"),
        (("plan", str(ROOT / "launch/recipes/quickstart_single.yaml")), "megatron-rc plan"),
        (("doctor", "--sglang", "http://127.0.0.1:1"), "megatron-rc doctor with --sglang, --config or --hf-path"),
    ],
)
def test_a_command_that_needs_torch_says_so_in_one_sentence(light: Path, arguments: tuple[str, ...], what: str) -> None:
    status, _, said = run(light, *arguments)
    assert (status, said) == (2, f"megatron-rc: error: {what} needs torch: {versions.installing('train')}\n")


def test_a_name_that_needs_torch_says_so_and_settings_need_none(light: Path) -> None:
    status, _, said = run(light, command="from megatron_rc import correct")
    last = f"megatron_rc.versions.MissingExtra: megatron_rc.correct needs torch: {versions.installing('train')}"
    assert status == 1 and said.splitlines()[-1] == last
    torch_free = "RolloutCorrection, Weight, Rejection, LengthDecayLR, SurgeDetector, patch"
    use = f"from megatron_rc import {torch_free}; print(RolloutCorrection.from_yaml('token-tis').weight.upper)"
    assert run(light, command=use)[:2] == (0, "2.0\n")


HEAVY = {"torch", "triton", "transformers", "megatron.core", "numpy", "pyarrow", "matplotlib"}


def test_doctor_is_quick_where_torch_is_installed_too() -> None:
    count = "import atexit, sys; atexit.register(lambda: print('\\nLOADED', *sys.modules));"
    _, said, _ = run(Path(sys.executable), "doctor", command=count + COMMAND)
    loaded = said.rpartition("\nLOADED")[2].split()
    assert sorted(HEAVY & set(loaded)) == []
    # the standard library, typer and rich; typer's newer releases load pydantic
    assert 100 < len(loaded) < 600


NEED_TORCH = "table_of_corrections or shows_the_table or this_python_is or cannot_be_read_is_one or reference_pages"
"""Tests of modules that need no torch, which use it themselves."""


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_tests_that_need_no_torch_pass_beside_the_light_core(wheel: Path, metadata: Message, tmp_path: Path) -> None:
    python = installed(wheel, tmp_path / "venv")
    tools = map(Requirement, ("pytest", "pytest-timeout", "hypothesis"))
    with_requirements(python, [*unconditional(metadata), *tools])
    rooms = [f"tests/{room}" for room in ("analyze", "doctor", "report", "schema", "settings")]
    selected = ["-m", "not full", "-k", f"not ({NEED_TORCH})", "--continue-on-collection-errors"]
    quiet = ["--noconftest", "--quiet", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [python, "-m", "pytest", *quiet, *selected, *rooms], cwd=ROOT, env=os.environ | {"PYTHONSAFEPATH": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert "\nFAILED" not in done.stdout and int(re.findall(r"(\d+) passed", done.stdout)[0]) > 900, done.stdout[-4000:]
    # a module that cannot be imported is one that needs an extra
    of_extras = {"torch", "psutil", "matplotlib", "tensorboard", "wandb_workspaces"}
    assert {*re.findall(r"No module named '(\w+)", done.stdout)} <= of_extras
