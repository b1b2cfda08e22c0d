"""docs/collapse.md and its figures, from the committed results and the claims."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from collapse import checks, methods, page_runs
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
    span,
    verdict,
)
from collapse.drawings import draw
from collapse.figure_data import FigureSettings, Picture, pictures
from collapse.methods import REFERENCE, ranking
from collapse.page_runs import hours, item, paragraph
from collapse.runs import Results
from megatron_rc import schema
from megatron_rc.jobs.describe import table

CLAIMS = Path(__file__).with_name("claims.yaml")
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
    """The page, without touching a file."""
    given = [(claim, answers(claim, results)) for claim in said.claims]
    first, *others = [
        "\n".join(_figure(figure, picture, results)) for figure in said.figures for picture in pictures(figure, results)
    ] or [""]
    parts = [
        *_introduction(results),
        *_summary(given),
        first,
        *(part for claim, each in given for part in _claim(claim, each)),
        *_ranking(results),
        *_rates(results),
        *_not_reproduced(given),
        "## Figures\n",
        *others,
        *page_runs.runs(results),
        *_method(results, given),
        *_checks(results),
        *_limits(results),
    ]
    return "\n".join(parts)


def _introduction(results: Results) -> Iterator[str]:
    yield "# Collapse: what a lab of small runs saw\n"
    yield paragraph(
        "A sampler whose probabilities differ from the trainer's can ruin a run of reinforcement learning. This page",
        f"says when it did in {len(results.rows)} runs of small models, what saved them, and what only seemed to. T is",
        "the mean length of a response and T* = 1 / (2 k3) the horizon, the length at which the product of the ratios",
        "of a response becomes noise. What *fell*, *collapsed* and *failed* mean was [stated before the",
        "runs](#endpoints-stated-before-the-runs). What models of this size cannot say stands [at the",
        "end](#what-models-of-this-size-cannot-say).",
    )
    yield paragraph(
        "Printed by `python benchmarks/collapse/verdict.py --docs` from the committed runs in",
        "`benchmarks/collapse/results/` and the claims in `benchmarks/collapse/claims.yaml`.",
        "No answer on this page is written by hand.",
    )


def _ranking(results: Results) -> Iterator[str]:
    where, lines = ranking(results)
    if lines:
        yield "## Every method at the same gap\n"
        yield paragraph(
            f"All that was run at one setting ({where}), the one that ends highest first. Seeds differ by more than",
            "many methods do, and some methods have fewer of them: what compares them is the difference from",
            f"{REFERENCE} at the same seeds, in points with Student's 90 % interval. A control has a line of its own.",
        )
        yield lines


def _rates(results: Results) -> Iterator[str]:
    if lines := methods.rates(results):
        yield "## Each method at its own learning rate\n"
        yield paragraph(methods.CAPTION)
        yield lines


def _method(results: Results, given: Sequence[tuple[Claim, list[Answer]]]) -> Iterator[str]:
    yield "## Endpoints, stated before the runs\n"
    yield from page_runs.rules(results)
    yield "## How an answer follows\n"
    yield paragraph(
        "Every comparison is between two arms that differ only in what it names. Intervals cover 90 %: that of a",
        "share is Clopper and Pearson's, that of the difference of two shares Newcombe's, that of a mean difference",
        "over seeds Student's, that of a median the one from order statistics.",
    )
    yield item(
        f"**{SUPPORTS}**: the interval lies wholly on the side of the claim; of the time to collapse, log-rank",
        f"p < {P_LIMIT:g} by permutation.",
    )
    yield item(
        f"**{CONTRADICTS}**: it lies wholly on the other side, or excludes every difference that matters:",
        f"{100 * MATTERS['share']:.0f} points of a share of runs, {100 * MATTERS['final']:.0f} points of final",
        f"accuracy, a factor of {10 ** MATTERS['k3_early']:.0f} of k3.",
    )
    yield item(f"**{CANNOT_TELL}**: anything else, fewer seeds than the claim asks for, or no runs.") + "\n"
    yield paragraph(
        "A claim is supported when each of its questions is, in one case at least, and no case contradicts it; while",
        f"some are open, the answer holds *{IN_PART.strip()}*. If one comparison supports what another contradicts,",
        f"the claim *{BY_CASE}*. A claim that something can happen needs one comparison that supports it, and is",
        "contradicted by all those together that have enough seeds, unless one with fewer seeds leans to it. Controls,",
        "and what is shown for comparison, count for no claim. The comparisons are not adjusted for their number:",
        _decided(given),
        "A run that learns too little has failed, too, without ever having fallen.",
    )


def _decided(given: Sequence[tuple[Claim, list[Answer]]]) -> str:
    known = sum(answer.enough for _, each in given for answer in each)
    return f"of the {known} with enough seeds, about {known / 20:.0f} err on either side by chance alone."


def _summary(given: Sequence[tuple[Claim, list[Answer]]]) -> Iterator[str]:
    yield "## The claims\n"
    rows = [
        [f"[{claim.letter}](#{_anchor(claim)})", claim.claim, f"**{verdict(claim, each)}**", _decisive(each)]
        for claim, each in given
    ]
    yield table(("", "claim", "answer", "the comparisons that decide it"), rows)


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
    rows = {
        enough: [
            [each.question, each.answer, each.why, each.seeds, each.depth, each.vocabulary]
            for each in given
            if each.enough == enough
        ]
        for enough in (True, False)
    }
    if rows[True]:
        yield table(HEADINGS, rows[True])
    if rows[False]:
        few = f"{counted(len(rows[False]), 'comparison')} with fewer seeds than the claim asks for, or none"
        yield f"<details><summary>{few}</summary>\n"
        yield table(HEADINGS, rows[False])
        yield "</details>\n"


def _figure(figure: FigureSettings, picture: Picture, results: Results) -> Iterator[str]:
    title = picture.data["title"]
    yield f"![{title}]({IMAGES}/{picture.name}.png)\n"
    stages = sorted({results.stage_of(row) for row in picture.runs})
    commands = ", ".join(f"`megatron-rc grid launch/recipes/collapse/{stage}.yaml`" for stage in stages)
    runs = f"{len(picture.runs)} runs, {hours(picture.runs)}: {commands}."
    yield paragraph(*filter(None, (f"*{title}.*", figure.note, runs)))


def _not_reproduced(given: Sequence[tuple[Claim, list[Answer]]]) -> Iterator[str]:
    yield "## What did not reproduce\n"
    against = [
        [f"({claim.letter})", each.question, each.why, each.depth]
        for claim, answered in given
        for each in answered
        if each.answer == CONTRADICTS and verdict(claim, answered) != SUPPORTS
    ]
    if against:
        yield table(("claim", "comparison", "what the runs say, 90 % interval", "T / T*"), against)
    else:
        yield "No comparison contradicts its claim.\n"


def _checks(results: Results) -> Iterator[str]:
    yield "## Checks of the lab itself\n"
    for title, problems in (
        ("runs of the exact sampler that fell, collapsed or failed", checks.failing_exact_runs(results)),
        (
            "mechanisms that fail less often where they are stronger (Fisher's exact test, one-sided, p < 0.05)",
            checks.falls_with_strength(results),
        ),
    ):
        yield item(f"{title}: {'; '.join(problems) or 'none'}.")
    yield ""


def _limits(results: Results) -> Iterator[str]:
    rows = results.rows
    yield "## What models of this size cannot say\n"
    yield paragraph(
        f"The vocabularies here have {span([row.vocabulary for row in rows])} tokens, mean responses",
        f"{span([row.length for row in rows])} tokens, runs {span([row.steps for row in rows])} steps, and",
        f"T / T* spans {span([row.depth_seen for row in rows])}. Large models have vocabularies of a hundred thousand",
        "tokens, whose tail is where two engines differ most, responses of thousands of tokens, and many layers and",
        "experts whose kernels round differently; noise on weights stands in for that here, and need not have its",
        "structure. What needs a long horizon, thousands of updates, an open task or a GPU's kernels can be absent",
        "here and real there, and what saves a run here can fail there. The answers hold within the ranges above;",
        "outside them this page says nothing.",
    )
