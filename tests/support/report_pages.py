"""Records and pages of reports: of a small made-up run, parsed, and in Debian's chromium as a reader sees them."""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megatron_rc.report.log import MetricsLog

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


class Page(HTMLParser):
    """Tags, attributes and text of a page; fails on a tag that is closed in the wrong order."""

    VOID = ("meta", "link", "img", "br", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def warmup(steps: Sequence[int]) -> list[dict[str, Any]]:
    return [{"phase": "warmup", "step": s, "cross_entropy": 2 / s} for s in steps]


def rl(steps: Sequence[int]) -> list[dict[str, Any]]:
    return [{"phase": "rl", "step": s, "reward/mean": s / 100, "old/k3": 1e-5 * (s + 1)} for s in steps]


def write_all(folder: Path, records: Sequence[dict[str, Any]]) -> None:
    with MetricsLog(folder) as log:
        for record in records:
            log.write(record)
