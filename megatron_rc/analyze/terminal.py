"""The summary of a diagnosis on one screen."""

import io
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from megatron_rc.analyze import report_text
from megatron_rc.analyze.conditions import Outcome
from megatron_rc.analyze.diagnosis import Diagnosis
from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.headline import excluded, headline
from megatron_rc.analyze.readers import FORMATS
from megatron_rc.analyze.rules.rule import DOUBTS, HOSTS, Level
from megatron_rc.analyze.statistics.what_if import Missing
from megatron_rc.analyze.token_text import Decode, in_context, probabilities, worst_tokens

STYLES = {
    Level.BUG: "bold red",
    Level.SUSPECT: "bold yellow",
    Level.UNDECIDED: "bold yellow",
    Level.LAG: "bold blue",
    Level.NUMERICS: "bold green",
}
WIDTH = 110
"""Characters of a line where nobody says how wide the screen is."""
INDENT = (0, 0, 0, 2)
"""Padding of what belongs to a verdict: top, right, bottom, left."""
TOP_FACTORS = 3
"""Most factors that are printed; the page has all of them."""
IN_FULL = 2
"""With at most this many verdicts, each is printed in full; with more, only the first is."""
TOP_METHODS = 8
"""Most corrections that are printed; the page has all of them."""
TOP_TOKENS = 5
"""Tokens whose text is printed; the page has more."""
BAR = 20
"""Characters of a bar of 100 %."""


def host_named(name: str) -> str:
    """A codebase as the pages of the rules call it, however its letters are written.

    Raises ValueError for one that they do not know.
    """
    names = {host.lower(): host for host in ("", *HOSTS)}
    if name.lower() in names:
        return names[name.lower()]
    problem = f"dumps of {name} are read, but no fixes are written for it" if name in FORMATS else ""
    raise ValueError(f"--host: {problem or f'unknown codebase {name!r}'}; known: {', '.join(HOSTS)}")


def text(diagnosis: Diagnosis, *, width: int = WIDTH, host: str = "", share: bool = False) -> str:
    """What `show` prints, without colours and without spaces at the ends of lines."""
    file = io.StringIO()
    # in a notebook rich would write into the cell
    console = Console(file=file, width=width, color_system=None, force_jupyter=False, highlight=False)
    show(diagnosis, console=console, host=host, share=share)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def show(diagnosis: Diagnosis, *, console: Console, host: str = "", share: bool = False) -> None:
    """Print a diagnosis, 40 lines at most on `WIDTH` columns.

    ``host``: print the fixes for this codebase, too. ``share``: leave out the path, and sentences that may name servers
    and ids.
    """
    if diagnosis.hidden_sampling_possible:
        console.print(f"[yellow]{report_text.NO_ENTROPY}[/]")
    source = "A rollout dump" if share else " ".join([diagnosis.source, *diagnosis.only])
    console.print(f"[bold]{escape(source)}[/] ({escape(diagnosis.format)}): {report_text.size(diagnosis.evidence)}")
    console.print(f"[{STYLES[diagnosis.level]}]{headline(diagnosis)}[/]")
    if filtered := diagnosis.evidence.outcome_filter.sentence:
        console.print(f"[yellow]{filtered}[/]")
    _show_verdicts(diagnosis, console, host, share)
    for line in report_text.accepted(diagnosis, share):
        console.print(f"[dim]{escape(line)}[/]")
    if shown := excluded(diagnosis):
        console.print(f"[dim]{shown}[/]")
    console.print(f"[bold]{escape(diagnosis.recommendation.headline)}[/]")
    _show_numbers(diagnosis, console)
    _show_rest(diagnosis, console, share)


def show_what_if(diagnosis: Diagnosis, *, console: Console) -> None:
    """Print what the best methods would do, the recommended one first, or why that is not known."""
    table = diagnosis.what_if
    if isinstance(table, Missing):
        console.print(f"[yellow]{escape(table.sentence)}[/]")
        return
    recommended = diagnosis.recommendation.method
    head = ("method", "tokens", "answers", "by length", "right", "ESS", "bias", "cosine", "drift")
    shown = Table(*head, box=None, padding=(0, 2, 0, 0))
    shown.title, shown.title_justify = f"What if, on {table.tokens:,} tokens (share kept)", "left"
    for row in sorted(table.rows, key=lambda row: row.name != recommended)[:TOP_METHODS]:
        cells = (row.name, *report_text.what_if_cells(row))
        shown.add_row(*map(escape, cells), style="red" if row.warnings else "bold" if row.name == recommended else "")
    console.print()
    console.print(shown)
    if reason := report_text.what_if_gaps(table, with_signs=False):
        console.print(f"[dim]{escape(reason)}[/]")
    for name, columns in table.not_run.items():
        console.print(f"[dim]Not computed: {name} needs {', '.join(columns)}[/]")
    console.print(f"\nWhat weights of tokens leave. {report_text.drift_sentence(table.drift)}", highlight=False)
    left = Table(*report_text.DRIFT_HEAD, box=None, padding=(0, 2, 0, 0))
    for at in table.drift.by_length:
        left.add_row(*report_text.drift_cells(at))
    console.print(left)


def show_tokens(evidence: Evidence, decode: Decode, *, console: Console) -> None:
    """Print the text of the worst tokens, one per line."""
    console.print("[bold]Where the two sides differ most[/]")
    for token in worst_tokens(evidence, TOP_TOKENS):
        before, own, after = map(escape, in_context(evidence, token, decode))
        console.print(
            Padding(f"{probabilities(evidence, token)}: [dim]{before}[/][bold]{own}[/][dim]{after}[/]", INDENT)
        )


def show_outcomes(outcomes: Sequence[Outcome], *, console: Console) -> None:
    """Print whether each condition holds."""
    for outcome in outcomes:
        state = "[green]holds[/]" if outcome.holds else "[bold red]fails[/]"
        console.print(f"{state} {escape(outcome.condition)}: {escape(outcome.sentence)}", soft_wrap=True)


def _show_verdicts(diagnosis: Diagnosis, console: Console, host: str, share: bool) -> None:
    in_full = len(diagnosis.verdicts) if len(diagnosis.verdicts) <= IN_FULL else 1
    for index, verdict in enumerate(diagnosis.verdicts):
        page = verdict.page
        support = "; ".join(
            filter(None, [report_text.support(verdict), report_text.price(diagnosis.evidence, verdict)])
        )
        title = f"[{STYLES[verdict.level]}]{verdict.code}[/] [bold]{escape(page.title)}[/]"
        console.print(title + (f" ({support})" if support else ""))
        if index < in_full and not share:
            console.print(Padding(escape(report_text.sentence(verdict)), INDENT))
        if index == 0 and verdict.level in DOUBTS:
            console.print(Padding(f"[bold]Decide:[/] {escape(' '.join(page.experiment.split()))}", INDENT))
    wrong = [verdict for verdict in diagnosis.verdicts if verdict.level in DOUBTS]
    if host:
        for verdict in wrong:
            console.print(Padding(f"[bold]{verdict.code} in {host}:[/] {escape(verdict.page.fixes[host])}", INDENT))
    elif wrong:
        others = f", and for {', '.join(verdict.code for verdict in wrong[1:])}" if len(wrong) > 1 else ""
        console.print(Padding(f"[bold]Fixes:[/] megatron-rc explain {wrong[0].code}{others}", INDENT))


def _show_numbers(diagnosis: Diagnosis, console: Console) -> None:
    evidence = diagnosis.evidence
    size = report_text.size_lines(evidence)
    if course := report_text.course(diagnosis):
        size.append(("course", course))
    factors = [
        (title, f"{explained:.1%}", "█" * round(BAR * explained), p)
        for title, explained, p, _ in report_text.factor_lines(evidence)[:TOP_FACTORS]
    ]
    console.print()
    for title, lines in (
        ("Honesty", report_text.honesty_lines(evidence, evidence.whole)),
        ("Size", size),
        ("Who explains |l|", factors),
    ):
        shown = Table(box=None, padding=(0, 2, 0, 0), show_header=False, title=title, title_justify="left")
        for line in lines:
            shown.add_row(*map(escape, line))
        console.print(shown)


def _show_rest(diagnosis: Diagnosis, console: Console, share: bool) -> None:
    judgement = diagnosis.judgement
    if judgement.not_run:
        by_columns: dict[str, list[str]] = {}
        for code, columns in judgement.not_run.items():
            by_columns.setdefault(", ".join(columns), []).append(code)
        missing = "; ".join(f"{columns} ({', '.join(codes)})" for columns, codes in by_columns.items())
        console.print(f"[dim]Not run, columns missing: {missing}[/]")
    if judgement.not_judged:
        first = next(iter(judgement.not_judged.values()))
        console.print(f"[dim]Not judged before {first} is fixed: {', '.join(judgement.not_judged)}[/]")
    if left_out := report_text.left_out(diagnosis):
        console.print(f"[yellow]{left_out}[/]")
    if diagnosis.corrupt.first and not share:
        console.print(f"[yellow]The first: {escape(diagnosis.corrupt.first[0])}[/]")
    if diagnosis.ignored and not share:
        more = f"; the page names all {len(diagnosis.ignored):,} kinds" if len(diagnosis.ignored) > 1 else ""
        console.print(f"[dim]{escape(diagnosis.ignored[0])}{more}[/]")
