"""Findings that somebody has accepted, until a date in the file .megatron-rc.toml of a project or for good."""

import datetime
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rc import schema

FILE = Path(".megatron-rc.toml")
"""Read from the current folder where no other file is named."""
FOR_GOOD = datetime.date.max
"""The last day of a finding that an earlier report already had."""


@dataclass(frozen=True)
class Accepted:
    """A finding of one rule that decides nothing until a date."""

    code: str
    """Code of a rule, such as RC303."""
    reason: str
    until: datetime.date
    """The last day."""

    def __post_init__(self) -> None:
        if not self.reason.strip():
            raise ValueError(f"reason must say why {self.code} is accepted")

    @property
    def holds(self) -> bool:
        return datetime.date.today() <= self.until

    @property
    def is_baseline(self) -> bool:
        """Whether it comes from an earlier report, in which it kept later rules from being judged, as it does now."""
        return self.until == FOR_GOOD

    @property
    def state(self) -> str:
        if self.is_baseline:
            return "does not count"
        return f"{'accepted until' if self.holds else 'no longer accepted since'} {self.until}"


@dataclass(frozen=True)
class _File:
    accept: tuple[Accepted, ...] = ()


def read_accepted(path: Path) -> tuple[Accepted, ...]:
    """The accepted findings in a file, one per code.

    Raises ValueError where it is not TOML, or an entry has not just a code, a reason and a date.
    """
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        found = schema.from_dict(_File, data).accept
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    codes = [each.code for each in found]
    if twice := [code for code in codes if codes.count(code) > 1]:
        raise ValueError(f"{path}: {twice[0]} is accepted twice")
    return found
