"""Releases of other packages are known in `megatron_rc.versions` alone; everything else reads it or agrees with it."""

import ast
import re
import sys
from email.message import Message
from pathlib import Path

import pytest
from constraints import pins

from megatron_rc import versions
from megatron_rc.integrations.hosts import HOSTS
from megatron_rc.jobs.run import train
from megatron_rc.settings.job import JobSettings
from megatron_rc.versions import MEGATRON_CORE, PYTHON, SGLANG, TESTED, TRITON, Range, is_older, is_release

ROOT = Path(__file__).parents[2]
LITERAL = re.compile(r"(?<![\w.])(0\.5\.\d+|0\.(1[5-9]|2\d)(\.\d+)?|3\.\d+(\.\d+)?)(?![\d.]*\d)")
"""What a release of SGLang, megatron-core, Triton or Python looks like."""
TEXTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
TEST_COMMAND = TESTED[0]


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
        assert host.versions in (versions.VERL, versions.NEMO_RL) or set(host.versions) <= set(MEGATRON_CORE)
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
