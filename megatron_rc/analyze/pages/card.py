"""What a page is made of: cards with a heading, a picture or table, and a sentence; all texts are escaped here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

from megatron_rc.drawing import frame

STYLE = (resources.files("megatron_rc.analyze.pages") / "card.css").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str
    kind: str = ""
    """words: a sentence, name: a few words, room: the column of bars, red: a value to worry about."""
    bar: float | None = None
    """Length of a bar that replaces the text, from 0 to 1."""


def card(
    title: str,
    inside: str,
    meaning: str = "",
    healthy: str = "",
    unit: str = "",
    *,
    legend: Sequence[tuple[str, str]] = (),
) -> str:
    """HTML of a card: ``inside`` is HTML, all else plain text; ``legend`` has the class of a colour and its text."""
    shown = frame.legend([text for _, text in legend], [kind for kind, _ in legend]) if legend else ""
    ending = f" <em>Healthy: {escape(healthy)}</em>" if meaning and healthy else ""
    return frame.card(title, unit, inside + shown, escape(meaning) + ending)


def table(rows: Iterable[Sequence[str | Cell]], *, head: Sequence[str] = (), stacked: bool = False) -> str:
    """HTML of a table; the first cell of a row is its heading. ``stacked``: on a narrow page sentences stand below."""
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    top = f"<thead><tr>{names}</tr></thead>" if head else ""
    body = "".join(
        f"<tr><th>{escape(first.text if isinstance(first, Cell) else first)}</th>{''.join(map(_cell, rest))}</tr>"
        for first, *rest in rows
    )
    kind = ' class="stacked"' if stacked else ""
    return f'<div class="scroll"><table{kind}>{top}<tbody>{body}</tbody></table></div>'


def _cell(cell: str | Cell) -> str:
    if isinstance(cell, str):
        return f"<td>{escape(cell)}</td>"
    kind = f' class="{cell.kind}"' if cell.kind else ""
    inside = escape(cell.text)
    if cell.bar is not None:
        inside = f'<i class="bar" style="width:{100 * min(1.0, max(0.0, cell.bar)):.1f}%"></i>'
    return f"<td{kind}>{inside}</td>"
