"""The frame of a page that needs no network: style sheet and script; light and dark follow the reader's system."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import PurePath
from typing import Any

from megatron_rc.drawing.colours import SERIES, style_sheet

_HERE = resources.files("megatron_rc.drawing")
STYLE = style_sheet() + (_HERE / "frame.css").read_text(encoding="utf-8")
SCRIPT = (_HERE / "frame.js").read_text(encoding="utf-8")
"""Shows the points of all series nearest to the pointer, in a box next to it."""


def document(title: str, body: str, *, head: str = "", style: str = "") -> str:
    """A whole HTML page.

    Args:
        title: plain text.
        body, head: HTML inside ``main``, and HTML in the head after the declaration of the encoding.
        style: rules that follow the style sheet.
    """
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">{head}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style></head><body><main>"
        f"{body}</main><script>{SCRIPT}</script></body></html>\n"
    )


def card(title: str, unit: str, inside: str, sentence: str) -> str:
    """A panel: HTML under a heading, and HTML of what it means; a unit and a meaning may be missing."""
    small = f" <small>{escape(unit)}</small>" if unit else ""
    return f"<article><h2>{escape(title)}{small}</h2>{inside}{f'<p>{sentence}</p>' if sentence else ''}</article>"


def folded(title: str, inside: str, *, opened: bool = False) -> str:
    """HTML that a click on its title opens or closes."""
    return f"<details{' open' * opened}><summary>{escape(title)}</summary>{inside}</details>"


def legend(names: Iterable[str], colours: Sequence[str] = SERIES) -> str:
    """The names of curves, in the order of their colours."""
    pairs = zip(names, itertools.cycle(colours), strict=False)
    shown = "".join(f'<span><i class="{colour}"></i>{escape(name)}</span>' for name, colour in pairs)
    return f'<div class="legend">{shown}</div>'


def tile(value: str, label: str, note: str) -> str:
    """HTML of a value, with what it is."""
    return f'<div class="tile"><b>{value}</b><span>{escape(label)}</span><small>{escape(note)}</small></div>'


def details(title: str, rows: Mapping[str, Any], opened: bool = False) -> str:
    """A table that a click on its title opens or closes; nothing without rows."""
    if not rows:
        return ""
    body = "".join(f"<tr><th>{escape(str(k))}</th><td>{escape(plain(v))}</td></tr>" for k, v in rows.items())
    return folded(title, f"<table>{body}</table>", opened=opened)


def without_folder(text: str) -> str:
    """``text``, or .../NAME if it is an absolute path, which would name folders of this machine."""
    return f".../{PurePath(text).name}" if PurePath(text).is_absolute() else text


def plain(value: Any) -> str:
    """A setting as YAML has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
