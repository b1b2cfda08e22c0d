"""Pages in Debian's chromium: what a reader sees at several widths, in light and in dark."""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

WIDTHS = (360, 420, 1400)
CONTRAST = 4.5
"""Least contrast of text; WCAG 2, level AA."""
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND"),
    "--virtual-time-budget=10000",
)
SCRIPT = Path(__file__).with_name("page_facts.js")


def chromium() -> str:
    """The browser; a test that calls this is skipped without one."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    return found


def opened(page: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """The document after its scripts have run, on stdout."""
    command = [chromium(), *FLAGS, *flags, f"--user-data-dir={page.with_suffix('.user')}", "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)


def seen(pages: Mapping[str, str], selectors: Sequence[str], folder: Path, *, dark: bool) -> dict[str, dict[str, Any]]:
    """What a reader sees of each page at each width, by "NAME WIDTH".

    ``sideways``: pixels that the page is too wide; ``faint``: texts without contrast; ``alone``: panels beside which a
    row is empty; ``bottoms``: where the first element of each selector ends; ``heading``: text of the heading.
    """
    given = {"pages": pages, "widths": WIDTHS, "selectors": selectors, "contrast": CONTRAST}
    frame, text = folder / "frame.html", json.dumps(given).replace("<", "\\u003c")
    frame.write_text(
        f'<!DOCTYPE html><meta charset="utf-8"><body><script id="given" type="application/json">{text}</script>'
        f"<script>{SCRIPT.read_text(encoding='utf-8')}</script>",
        encoding="utf-8",
    )
    done = opened(frame, f"--blink-settings=preferredColorScheme={0 if dark else 1}")
    match = re.search(r'<pre id="found">(.*)</pre>', done.stdout, re.DOTALL)
    assert match, done.stderr
    return dict(json.loads(html.unescape(match[1])))
