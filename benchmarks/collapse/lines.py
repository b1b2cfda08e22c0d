"""Paragraphs, items and times of the page."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from collapse.rows import Row


def paragraph(*parts: str) -> str:
    return textwrap.fill(" ".join(parts), 118, break_long_words=False, break_on_hyphens=False) + "\n"


def item(*parts: str) -> str:
    return textwrap.fill(f"* {' '.join(parts)}", 118, subsequent_indent="  ", break_on_hyphens=False)


def hours(rows: Sequence[Row]) -> str:
    seconds = sum(row.seconds for row in rows)
    return f"{seconds / 3600:.1f} process-hours" if seconds >= 3600 else f"{seconds / 60:.0f} process-minutes"
