"""The version of Megatron-Core, read from its file."""

from __future__ import annotations

import ast
from pathlib import Path

from megatron_rc.integrations.symbols import find_module


def megatron_core_version() -> str | None:
    """MAJOR.MINOR.PATCH and the pre-release that Python would import, without importing it; None where it is absent."""
    spec = find_module("megatron.core.package_info")
    if spec is None or spec.origin is None:
        return None
    constants: dict[str, object] = {
        target.id: node.value.value
        for node in ast.parse(Path(spec.origin).read_bytes()).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    release = ".".join(str(constants[part]) for part in ("MAJOR", "MINOR", "PATCH"))
    return f"{release}{constants.get('PRE_RELEASE', '')}"
