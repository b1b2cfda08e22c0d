"""docs/changing.md tells the truth: each usual change is applied to a copy, in the files of its row and no others."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from changes import CHANGES, Change

ROOT = Path(__file__).parents[2]
ROWS = {
    cells[1].strip(): cells[2]
    for line in (ROOT / "docs/changing.md").read_text().splitlines()
    if line.startswith("| ") and len(cells := line.split("|")) > 3
}
"""First cell -> second cell."""


def named(cell: str) -> set[str]:
    """Files and folders of code before the first semicolon, from the root of the repository."""
    names = re.findall(r"`([\w./-]+(?:\.py|/))`", cell.partition(";")[0])
    return {name if (ROOT / name).exists() else f"megatron_rc/{name}" for name in names}


def problems(change: Change, cell: str) -> list[str]:
    """What the row and the change say differently."""
    files, folders = {file for file, _, _ in change.edits}, {str(Path(file).parent) + "/" for file in change.new}
    most = 3 if any(file.startswith("triton_kernels/") for file in files) else 2
    found = [f"the row lacks {file}" for file in sorted(files - named(cell))]
    for name in sorted(named(cell) - files):
        if not any(folder.startswith(name) for folder in folders):
            found.append(f"the change does not touch {name}")
    found += [f"no folder of the row has {folder}" for folder in sorted(folders)
              if not any(folder.startswith(name) for name in named(cell) if name.endswith("/"))]  # fmt: skip
    if len(files) + len(change.new) > most and not change.unlimited:
        found.append(f"{len(files) + len(change.new)} files are more than {most}")
    return found


def test_a_row_that_is_wrong_would_be_noticed() -> None:
    change = Change("", (("megatron_rc/batch.py", "", ""),), "", {"megatron_rc/tasks/x.py": ""})
    assert problems(change, "`batch.py`, a file in `tasks/`; `cli.py`") == []
    assert problems(change, "`cli.py`") == [
        "the row lacks megatron_rc/batch.py", "the change does not touch megatron_rc/cli.py",
        "no folder of the row has megatron_rc/tasks/",
    ]  # fmt: skip
    many = change._replace(new={f"megatron_rc/tasks/{x}.py": "" for x in "xy"})
    assert problems(many, "`batch.py`, a file in `tasks/`") == ["3 files are more than 2"]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.row)
def test_the_files_of_a_row_are_those_of_the_change(change: Change) -> None:
    assert problems(change, ROWS[change.row]) == []
    for file, anchor, _ in change.edits:
        assert (ROOT / file).read_text().count(anchor) == 1, f"{file} has this once: {anchor!r}"


@pytest.mark.full
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.row)
def test_the_change_works_in_a_copy(change: Change, tmp_path: Path) -> None:
    for folder in ("megatron_rc", "triton_kernels"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file, anchor, text in change.edits:
        path = tmp_path / file
        path.write_text(path.read_text().replace(anchor, text.replace("ANCHOR", anchor)))
    for file, text in change.new.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    here = f"import megatron_rc\nassert megatron_rc.__file__.startswith({str(tmp_path)!r}), megatron_rc.__file__\n"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, "-c", here + change.live], cwd=tmp_path, env=environment, text=True,
                         capture_output=True, timeout=300)  # fmt: skip
    assert ran.returncode == 0, ran.stderr
