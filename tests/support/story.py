"""The code in the docstring of a module: what its computation comes down to."""

import textwrap
from types import ModuleType
from typing import Any

import torch


def story(module: ModuleType, **given: Any) -> dict[str, Any]:
    """The names that this code defines; ``given``: those that it reads."""
    lines = [line for line in module.__doc__.splitlines() if line.startswith("    ")]
    names: dict[str, Any] = {"torch": torch, **given}
    exec(textwrap.dedent("\n".join(lines)), names)
    return names
