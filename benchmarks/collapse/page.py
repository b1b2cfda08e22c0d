"""docs/collapse.md and its figures, from the committed results and the claims."""

import math
import re
import statistics
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from collapse import checks, rules
from collapse.claims import CLAIMS
from collapse.drawings import draw
from collapse.figure_data import FigureSettings, Picture, pictures
from collapse.figures import FIGURES
from collapse.methods import REFERENCE, ranking, rates
from collapse.rows import UNSEEN, Row
from collapse.rules import Answer, Claim, answers, counted, span, verdict
from collapse.runs import PLAIN, TUNING, Results, by_arm
from megatron_rc.jobs.describe import table
from megatron_rc.report.endpoints import Endpoints

TEMPLATE, _NOTES = (Path(__file__).with_name(name) for name in ("page.md", "notes.md"))
NOTES = dict(re.findall(r"^## (\S+)\n\n(.*?)\n*(?=^## |\Z)", _NOTES.read_text(), re.MULTILINE | re.DOTALL))
"""Maps the letter of a claim, or the name of a figure, to what the page says below it."""
IMAGES = "images/collapse"
"""Folder of the figures, seen from docs/."""
GAP_HEADINGS = ("task", "gap", "runs", "k3", "std of log-ratio", "T / T*", "mismatch k3", "staleness k3",
                "gradient norm", "fell", "collapsed", "failed")  # fmt: skip
MEASURED = ("k3_early", "sigma", "depth", "mismatch_k3", "staleness_k3")
EVENTS = ("fell", "collapsed", "failed")


def write(results: Results, docs: Path) -> None:
    """Write docs/collapse.md, and draw the figures that it shows; figures that it no longer shows are deleted."""
    drawn = [(figure, pictures(figure, results)) for figure in FIGURES]
    folder = docs / IMAGES
    for figure, each in drawn:
        for picture in each:
            draw(figure, picture.data, folder / f"{picture.name}.png")
    names = {picture.name for _, each in drawn for picture in each}
    for file in folder.glob("*.png"):
        if file.stem not in names:
            file.unlink()
    (docs / "collapse.md").write_text(text(results))


def text(results: Results) -> str:
    """The page: the blocks of page.md with their fields filled in. A field that stands alone is a block of its own."""
    fields = _fields(results)
    return "\n\n".join(_block(block, fields) for block in TEMPLATE.read_text().strip().split("\n\n")) + "\n"


def _block(block: str, fields: Mapping[str, Any]) -> str:
    if alone := re.fullmatch(r"{(\w+)}", block):
        return str(fields[alone[1]]).strip("\n")
    items = [part.format(**fields) for part in re.split(r"\n(?=\* )", block)]
    return "\n".join(_filled(item, "  " if item.startswith("* ") else "") for item in items)


def _fields(results: Results) -> dict[str, Any]:
    given = [(claim, answers(claim, results)) for claim in CLAIMS]
    figures = ["\n".join(_figure(f, picture, results)) for f in FIGURES for picture in pictures(f, results)]
    ranking_gap, ranked = ranking(results)
    enough = sum(answer.enough for _, each in given for answer in each)
    return {
        "count": len(results.rows),
        "summary": _summary(given),
        "first_figure": "".join(figures[:1]),
        "claims": "\n".join(part for claim, each in given for part in _claim(claim, each)),
        "ranking_gap": ranking_gap,
        "reference": REFERENCE,
        "ranking": ranked,
        "tuning": TUNING,
        "rates": rates(results),
        "not_reproduced": _not_reproduced(given),
        "figures": "\n".join(figures[1:]),
        **_run_fields(results),
        "unseen": UNSEEN,
        **{"supports": rules.SUPPORTS, "contradicts": rules.CONTRADICTS, "cannot_tell": rules.CANNOT_TELL},
        **{"in_part": rules.IN_PART.strip(), "by_case": rules.BY_CASE, "p_limit": rules.P_LIMIT},
        "points": {name: 100 * least for name, least in rules.MATTERS.items()},
        "factor": 10 ** rules.MATTERS["k3_early"],
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
    for side in (rules.SUPPORTS, rules.CONTRADICTS):
        found = [answer for answer in count if answer.answer == side]
        more = f" ({len(found) - 1} more)" if len(found) > 1 else ""
        said += [f"*{side.capitalize()}*: {each.question}: {each.why}{more}." for each in found[:1]]
    left = sum(answer.answer == rules.CANNOT_TELL for answer in count)
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
    yield " ".join([f"**{verdict(claim, given).capitalize()}.**", *NOTES.get(claim.letter, "").split()]) + "\n"
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
    runs = f"{len(picture.runs)} runs, {_hours(picture.runs)}: {commands}."
    yield _filled(" ".join(filter(None, (f"*{title}.*", NOTES.get(figure.name), runs)))) + "\n"


def _not_reproduced(given: Sequence[tuple[Claim, list[Answer]]]) -> str:
    against = [
        [f"({claim.letter})", each.question, each.why, each.depth]
        for claim, answered in given
        for each in answered
        if each.answer == rules.CONTRADICTS and verdict(claim, answered) != rules.SUPPORTS
    ]
    heads = ("claim", "comparison", "what the runs say, 90 % interval", "T / T*")
    return table(heads, against) if against else "No comparison contradicts its claim."


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(
        " ".join(text.split()), 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _hours(rows: Sequence[Row]) -> str:
    seconds = sum(row.seconds for row in rows)
    return f"{seconds / 3600:.1f} process-hours" if seconds >= 3600 else f"{seconds / 60:.0f} process-minutes"


def _run_fields(results: Results) -> dict[str, Any]:
    """What page.md says of the runs."""
    rows = results.rows
    served = sum(row.evaluated == "served" for row in rows)
    whose = f"In {served} runs the sampler's weights answered, in the others the trainer's."
    heads = ("task", "vocabulary", "runs", "seeds", "mean response length T", "T / T*", "k3, first quarter")
    worlds = results.worlds().items()
    return {
        "hours": _hours(rows),
        "stages": _listed({results.stage_of(row) for row in rows}),
        "worlds": table(heads, [_world(label, [r for r in rows if r.world == world]) for world, label in worlds]),
        "mechanisms": _mechanisms(results),
        "rules": _rules(results),
        "answers": min(row.answers for row in rows),
        "evaluated": whose if served else "The trainer's own weights answered.",
        **{
            name: span([getattr(row, name) for row in rows]) for name in ("vocabulary", "length", "steps", "depth_seen")
        },
    }


def _listed(stages: Iterable[str]) -> str:
    return ", ".join(f"`{stage}`" for stage in sorted(stages))


def _world(label: str, rows: Sequence[Row]) -> list[str]:
    spans = [span([getattr(row, name) for row in rows]) for name in ("vocabulary", "length", "depth_seen", "k3_seen")]
    return [label, spans[0], str(len(rows)), str(len({row.seed for row in rows})), *spans[1:]]


def _rules(results: Results) -> str:
    used = {row.stage: _rule(results.rules.get(row.stage, Endpoints())) for row in results.rows}
    rules = {rule: _listed(stage for stage in used if used[stage] == rule) for rule in used.values()}
    return "\n".join(_filled(f"* {stages}: {rule}", "  ") for rule, stages in rules.items())


def _rule(rules: Endpoints) -> str:
    return (
        f"a run is judged by the means of {rules.window} consecutive evaluations. It has **fallen** where this mean "
        f"lies {rules.fall:.0%} or more below its maximum so far. It has **collapsed** when at least its last "
        f"{rules.to_end} means have fallen, "
        "or a value was not finite; a fall that it recovered from is a **relapse**. It has **failed** when its last "
        f"mean is below {rules.failure:.0%} of that of the exact sampler with the same seed."
    )


def _mechanisms(results: Results) -> str:
    """A line per mechanism and strength, of each task, at every learning rate that was run."""
    arms = by_arm(results.select(PLAIN | {"method": "none"}))
    worlds = results.worlds()
    rates = {arm.lr for arm in arms}
    lines = []
    for arm in sorted(arms, key=lambda arm: (worlds[arm.world], arm.mechanism != "exact", arm.rank)):
        rows = arms[arm]
        gap = f"{arm.mechanism} {arm.strength}".strip() + (f", lr {arm.lr:g}" if len(rates) > 1 else "")
        seen = statistics.median(row.k3_early for row in rows) >= UNSEEN
        numbers = [_median(rows, name) if seen else "0" for name in MEASURED]
        shares = [f"{hits} of {runs}" for hits, runs in (results.count(rows, event) for event in EVENTS)]
        norm = _median(rows, "grad_norm")
        lines.append([worlds[arm.world], gap, str(len(rows)), *numbers, norm, *shares])
    return table(GAP_HEADINGS, lines)


def _median(rows: Sequence[Row], name: str) -> str:
    """Two digits; empty where no run measured it, and 0 for what is rounding."""
    known = [value for row in rows if not math.isnan(value := getattr(row, name))]
    if not known:
        return ""
    value = statistics.median(known)
    return "0" if name.endswith("k3") and value < UNSEEN else f"{value:.2g}"
