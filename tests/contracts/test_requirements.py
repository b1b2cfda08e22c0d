"""What an installation requires, and the releases of other packages, which megatron_rc.versions alone knows."""

import ast
import os
import re
import subprocess
import sys
from email.message import Message
from pathlib import Path

import pytest
from built_wheel import BROUGHT_BY_HOSTS, HOST_PINS, ROOT, held, installed, pins, requirements, with_requirements
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from megatron_rc import versions
from megatron_rc.exit_status import ExitStatus
from megatron_rc.integrations.hosts import HOSTS
from megatron_rc.jobs.run import train
from megatron_rc.settings.job import JobSettings
from megatron_rc.versions import MEGATRON_CORE, PYTHON, SGLANG, TESTED, TRITON, Range, is_older, is_release

COMMAND = "import sys; sys.modules |= dict.fromkeys(('fcntl', 'resource')); from megatron_rc.cli import main; main()"
"""Without what Linux alone has."""
HEAVY = {"torch", "triton", "transformers", "megatron.core", "numpy", "pyarrow", "matplotlib"}
NEED_TORCH = "table_of_corrections or shows_the_table or this_python_is or cannot_be_read_is_one or reference_pages"
"""Tests of modules that need no torch, which use it themselves."""
LITERAL = re.compile(r"(?<![\w.])(0\.5\.\d+|0\.(1[5-9]|2\d)(\.\d+)?|3\.\d+(\.\d+)?)(?![\d.]*\d)")
"""What a release of SGLang, megatron-core, Triton or Python looks like."""
TEXTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
TEST_COMMAND = TESTED[0]


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


def test_doctor_is_quick_where_torch_is_installed_too() -> None:
    count = "import atexit, sys; atexit.register(lambda: print('\\nLOADED', *sys.modules));"
    _, said, _ = run(Path(sys.executable), "doctor", command=count + COMMAND)
    loaded = said.rpartition("\nLOADED")[2].split()
    assert sorted(HEAVY & set(loaded)) == []
    # the standard library, typer and rich; typer's newer releases load pydantic
    assert 100 < len(loaded) < 600


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_tests_that_need_no_torch_pass_beside_the_light_core(wheel: Path, metadata: Message, tmp_path: Path) -> None:
    python = installed(wheel, tmp_path / "venv")
    with_requirements(python, [*unconditional(metadata), *map(Requirement, ("pytest", "pytest-timeout", "hypothesis"))])
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


def strings(path: Path) -> list[tuple[int, str]]:
    """Line and text of every string of a file that is no docstring."""
    tree = ast.parse(path.read_text())
    documentation = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    constants = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in documentation]
    return [(n.lineno, n.value) for n in constants if isinstance(n.value, str)]


def script(name: str) -> str:
    return (ROOT / "launch" / name).read_text()


def test_no_other_module_states_a_release() -> None:
    files = [p for p in sorted((ROOT / "megatron_rc").rglob("*.py")) if p.name != "versions.py"]
    assert len(files) > 50
    stated = [f"{p.relative_to(ROOT)}:{line}: {s}" for p in files for line, s in strings(p) if LITERAL.search(s)]
    # which releases the symbols of a host were tried with is a statement about that host
    assert [one for one in stated if "run on CPU" not in one] == []


def test_the_constraints_pin_what_the_first_row_says() -> None:
    cpu, server = pins("constraints-cpu.txt"), pins("launch/sglang_cpu/requirements.txt")
    assert (cpu["megatron-core"], cpu["triton"], server["sglang"]) == TEST_COMMAND[1:4]
    assert pins("constraints-gpu.txt")["megatron-core"] == TEST_COMMAND.core


def test_the_test_command_prepares_what_the_table_says() -> None:
    (wheels,) = re.findall(r"^\s*prepare_megatron_training (.+)$", script("test.sh"), re.MULTILINE)
    assert wheels.replace(" ", ", ") in [row.core for row in TESTED]
    (prepared,) = re.findall(r"prepare_triton (\S+)", script("test.sh"))
    (older,) = {prepared, *re.findall(r"(?:triton-|== )(\d+\.\d+\.\d+)", script("test.sh"))}
    assert older in [row.triton for row in TESTED]


def test_what_ran_is_supported() -> None:
    for row in TESTED:
        assert row.python in PYTHON
        assert all(is_release(core, MEGATRON_CORE) for core in row.core.split(", ") if core)
        assert row.triton in TRITON or row.triton == ""
        assert row.sglang in {"", SGLANG.newest}
    assert {PYTHON.oldest, PYTHON.newest} <= {row.python for row in TESTED}


def test_an_installation_takes_the_supported_pythons(metadata: Message) -> None:
    assert metadata["Requires-Python"] == f">={PYTHON.oldest}"
    classifiers = metadata.get_all("Classifier", [])
    named = [found[1] for line in classifiers if (found := re.search(r"Python :: (3\.\d+)$", line))]
    assert (named[0], named[-1], len(named)) == (PYTHON.oldest, PYTHON.newest, 3)
    (candidates,) = re.findall(r"for candidate in (.+) python3; do", script("common.sh"))
    assert candidates.split() == [f"python{version}" for version in named]
    assert f"sys.version_info < ({PYTHON.oldest.replace('.', ', ')})" in script("common.sh")


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_documents_name_supported_releases(path: Path) -> None:
    text = path.read_text()
    core = Range(MEGATRON_CORE[0], MEGATRON_CORE[-1])
    for package, known in (("megatron-core", core), ("SGLang", SGLANG), ("Triton", TRITON), ("Python", PYTHON)):
        for release in re.findall(rf"{package} (\d+\.\d+(?:\.\d+)?)", text):
            assert release in known, f"{path.name}: {package} {release}"


def test_the_readme_names_the_supported_releases() -> None:
    text = (ROOT / "README.md").read_text()
    assert f"megatron-core {MEGATRON_CORE[0]} to {MEGATRON_CORE[-1]}" in text and f"Python {PYTHON.oldest}" in text


def test_hosts_know_releases_that_the_trainer_is_written_for() -> None:
    for host in HOSTS.values():
        own_releases = host.versions in (versions.VERL, versions.NEMO_RL, versions.MS_SWIFT)
        assert own_releases or set(host.versions) <= set(MEGATRON_CORE)
    assert set(versions.SHORT_TRAIN_STEP) <= set(versions.MEGATRON_TRAINING)
    assert versions.SGLANG_KEPT_IDS in SGLANG and versions.SGLANG_WEIGHT_VERSION in SGLANG


@pytest.mark.parametrize(
    ("version", "place"),
    [("0.5.19", "older"), ("0.5.20rc1", "inside"), ("0.5.20", "inside"), ("v0.5.22.post1", "inside"),
     ("0.5.23+cu13", "inside"), ("0.5.24", "newer"), ("0.6.0rc1", "newer"), ("0.4.99", "older"), ("main", "unknown")],
)  # fmt: skip
def test_a_range_holds_its_releases_and_their_builds(version: str, place: str) -> None:
    assert (version in Range("0.5.20", "0.5.23")) is (place == "inside")
    assert is_older(version, "0.5.20") is (place == "older")


@pytest.mark.parametrize(("version", "known"), [("0.20.1rc0", True), ("0.20", True), ("0.2", False), (None, False)])
def test_a_release_begins_with_the_numbers_of_its_minor_release(version: str | None, known: bool) -> None:
    assert is_release(version, ("0.19", "0.20")) is known


def test_a_job_refuses_a_megatron_core_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = tmp_path / "megatron/core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("")
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 12\nPATCH = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="megatron-rc needs megatron-core 0.16 or newer, found 0.12.1"):
        train(JobSettings(), fresh=True, dump=False)


def test_the_matrix_has_a_row_for_every_minor_release() -> None:
    rows = list(versions.matrix())
    assert [row[0] for row in rows] == ["0.16", "0.17", "0.18", "0.19", "0.20"]
    assert [row[5:] for row in rows] == [("no", "no"), *[("yes", "no")] * 3, ("yes", "yes")]


def test_modules_below_folders_without_a_package_file_are_found_without_importing_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bare/inner").mkdir(parents=True)
    (tmp_path / "bare/inner/code.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    found = versions.find_module("bare.inner.code")
    assert found is not None and found.origin == str(tmp_path / "bare/inner/code.py")
    assert versions.find_module("bare.inner.nothing") is None
    assert versions.find_module("bare.inner.code.below") is None
    assert not {"bare", "bare.inner"} & set(sys.modules)
