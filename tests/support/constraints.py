"""The exact versions of a constraints or requirements file."""

import re
from pathlib import Path

from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def pins(file: str) -> dict[str, str]:
    lines = [line.partition("#")[0].strip() for line in (ROOT / file).read_text().splitlines()]
    parsed = [re.fullmatch(r"([\w.-]+)==([\w.]+)", line) for line in lines if line]
    assert all(parsed), f"{file} holds exact versions only"
    return {canonicalize_name(p[1]): p[2] for p in parsed if p}
