"""Scripts that tests write, and a copy of what the scripts of launch/ read."""

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def write_script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def copy_of_launch(folder: Path, python: str) -> Path:
    """Copy launch/ to ``folder``, with the script ``python`` as .venv/bin/python; its {python} is this interpreter."""
    shutil.copytree(ROOT / "launch", folder / "launch")
    for name in ("setup.py", "pyproject.toml", "constraints-cpu.txt"):
        shutil.copy(ROOT / name, folder)
    write_script(folder / ".venv/bin/python", python.replace("{python}", sys.executable))
    return folder
