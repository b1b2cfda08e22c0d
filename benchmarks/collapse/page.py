"""docs/collapse.md and its figures, from the committed results and the claims."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collapse import checks, page_runs
from collapse.claims import (
    BY_CASE,
    CANNOT_TELL,
    CONTRADICTS,
    IN_PART,
    MATTERS,
    P_LIMIT,
    SUPPORTS,
    Answer,
    Claim,
    answers,
    counted,
    verdict,
)
from collapse.drawings import draw
from collapse.figure_data import FigureSettings, Picture, pictures
from collapse.methods import REFERENCE, ranking, rates
from collapse.page_runs import filled, hours
from collapse.rows import UNSEEN
from collapse.runs import TUNING, Results
from megatron_rc import schema
from megatron_rc.jobs.describe import table

CLAIMS, TEMPLATE = (Path(__file__).with_name(name) for name in ("claims.yaml", "page.md"))
IMAGES = "images/collapse"
"""Folder of the figures, seen from docs/."""


@dataclass(frozen=True, kw_only=True)
class Statement:
    """The file of the claims."""

    claims: tuple[Claim, ...]
    figures: tuple[FigureSettings, ...]


def statement(path: Path = CLAIMS) -> Statement:
    return schema.from_dict(Statement, schema.load_yaml(path))


def write(results: Results, docs: Path, path: Path = CLAIMS) -> None:
    """Write docs/collapse.md, and draw the figures that it shows; figures that it no longer shows are deleted.

    Raises:
        ValueError: there are no committed runs.
    """
    if not results.rows:
        raise ValueError("no run is committed: python benchmarks/collapse/verdict.py --read FOLDER of a grid")
    said = statement(path)
    drawn = [(figure, pictures(figure, results)) for figure in said.figures]
    folder = docs / IMAGES
    for figure, each in drawn:
        for picture in each:
            draw(figure, picture.data, folder / f"{picture.name}.png")
    names = {picture.name for _, each in drawn for picture in each}
    for file in folder.glob("*.png"):
        if file.stem not in names:
            file.unlink()
    (docs / "collapse.md").write_text(text(results, said))


def text(results: Results, said: Statement) -> str:
    """The page, without touching a file: the blocks of page.md with their fields filled in.

    A field that stands alone is a block of its own, left out where it is empty; a section with a field that is None
    is left out whole.
    """
    fields = _fields(results, said)
    kept = [
        section
        for section in re.split(r"\n\n(?=## )", TEMPLATE.read_text().strip())
        if all(fields[name] is not None for name in re.findall(r"{(\w+)", section))
    ]
    filled = (_block(block, fields) for block in "\n\n".join(kept).split("\n\n"))
    return "\n\n".join(filter(None, filled)) + "\n"


def _block(block: str, fields: Mapping[str, Any]) -> str:
    if alone := re.fullmatch(r"{(\w+)}", block):
        return str(fields[alone[1]]).strip("\n")
    items = [part.format(**fields) for part in re.split(r"\n(?=\* )", block)]
    return "\n".join(filled(item, "  " if item.startswith("* ") else "") for item in items)


def _fields(results: Results, said: Statement) -> dict[str, Any]:
    given = [(claim, answers(claim, results)) for claim in said.claims]
    figures = ["\n".join(_figure(f, picture, results)) for f in said.figures for picture in pictures(f, results)]
    ranking_gap, ranked = ranking(results)
    enough = sum(answer.enough for _, each in given for answer in each)
    return {
        "count": len(results.rows),
        "summary": _summary(given),
        "first_figure": "".join(figures[:1]),
        "claims": "\n".join(part for claim, each in given for part in _claim(claim, each)),
        "ranking_gap": ranking_gap,
        "reference": REFERENCE,
        "ranking": ranked or None,
        "tuning": TUNING,
        "rates": rates(results) or None,
        "not_reproduced": _not_reproduced(given),
        "figures": "\n".join(figures[1:]),
        **page_runs.fields(results),
        "unseen": UNSEEN,
        **{"supports": SUPPORTS, "contradicts": CONTRADICTS, "cannot_tell": CANNOT_TELL},
        **{"in_part": IN_PART.strip(), "by_case": BY_CASE, "p_limit": P_LIMIT},
        "points": {name: 100 * least for name, least in MATTERS.items()},
        "factor": 10 ** MATTERS["k3_early"],
        **{"enough": enough, "by_chance": enough / 20},
        "failing_exact_runs": "; ".join(checks.failing_exact_runs(results)) or "none",
        "falls_with_strength": "; ".join(checks.falls_with_strength(results)) or "none",
    }


def _summary(given: Sequence[tuple[Claim, list[Answer]]]) -> str:
    rows = [
        [f"[{claim.letter}](#{_anchor(claim)})", claim.claim, f"**{verdict(claim, each)}**", _decisive(each)]
        for claim, each in given
    ]
    return table(("", "claim", "answer", "the comparisons that decide it"), rows)


def _decisive(given: Sequence[Answer]) -> str:
    """The first comparison that supports a claim, the first that contradicts it, and how many others there are."""
    count = [answer for answer in given if not answer.beside]
    said = []
    for side in (SUPPORTS, CONTRADICTS):
        found = [answer for answer in count if answer.answer == side]
        more = f" ({len(found) - 1} more)" if len(found) > 1 else ""
        said += [f"*{side.capitalize()}*: {each.question}: {each.why}{more}." for each in found[:1]]
    left = sum(answer.answer == CANNOT_TELL for answer in count)
    return " ".join([*said, f"{left} of {len(count)} cannot tell." if left else ""]).strip()


def _title(claim: Claim) -> str:
    return f"({claim.letter}) {claim.claim}"


def _anchor(claim: Claim) -> str:
    """The name by which a link finds the section of a claim."""
    kept = [character for character in _title(claim).lower() if character.isalnum() or character in " -_"]
    return "".join(kept).replace(" ", "-")


HEADINGS = ("comparison", "answer", "what the runs say, 90 % interval", "runs of both arms", "T / T*", "vocabulary")


def _claim(claim: Claim, given: Sequence[Answer]) -> Iterator[str]:
    yield f"## {_title(claim)}\n"
    yield f"**{verdict(claim, given).capitalize()}.**" + (f" {claim.limits}" if claim.limits else "") + "\n"
    rows: dict[bool, list[list[str]]] = {True: [], False: []}
    for each in given:
        rows[each.enough].append([each.question, each.answer, each.why, each.seeds, each.depth, each.vocabulary])
    if rows[True]:
        yield table(HEADINGS, rows[True])
    if few := rows[False]:
        what = f"{counted(len(few), 'comparison')} with fewer seeds than the claim asks for, or none"
        yield f"<details><summary>{what}</summary>\n\n{table(HEADINGS, few)}\n</details>\n"


def _figure(figure: FigureSettings, picture: Picture, results: Results) -> Iterator[str]:
    title = picture.data["title"]
    yield f"![{title}]({IMAGES}/{picture.name}.png)\n"
    stages = sorted({results.stage_of(row) for row in picture.runs})
    commands = ", ".join(f"`megatron-rc grid launch/recipes/collapse/{stage}.yaml`" for stage in stages)
    runs = f"{len(picture.runs)} runs, {hours(picture.runs)}: {commands}."
    yield filled(" ".join(filter(None, (f"*{title}.*", figure.note, runs)))) + "\n"


def _not_reproduced(given: Sequence[tuple[Claim, list[Answer]]]) -> str:
    against = [
        [f"({claim.letter})", each.question, each.why, each.depth]
        for claim, answered in given
        for each in answered
        if each.answer == CONTRADICTS and verdict(claim, answered) != SUPPORTS
    ]
    heads = ("claim", "comparison", "what the runs say, 90 % interval", "T / T*")
    return table(heads, against) if against else "No comparison contradicts its claim."
