"""The summary of a diagnosis on one screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from megatron_rc.analyze import words
from megatron_rc.analyze.diagnosis import Diagnosis
from megatron_rc.analyze.gate import Outcome
from megatron_rc.analyze.rules.rule import Level
from megatron_rc.analyze.what_if import Missing

STYLES = {
    Level.BUG: "bold red",
    Level.SUSPECT: "bold yellow",
    Level.STALENESS: "bold blue",
    Level.NUMERICS: "bold green",
}
TOP_FACTORS = 5
TOP_METHODS = 8
BAR = 20


def show(diagnosis: Diagnosis, *, console: Console, host: str = "") -> None:
    """Print a diagnosis.

    Args:
        host: print the fix for this host only.
    """
    evidence = diagnosis.evidence
    steps = len(evidence.by_step) or 1
    size = f"{evidence.whole.tokens:,} loss tokens, {evidence.sequences:,} responses, {steps:,} step{'s' * (steps > 1)}"
    console.print(f"[bold]{escape(diagnosis.source)}[/] ({escape(diagnosis.format)}): {size}")
    console.print(f"[{STYLES[diagnosis.level]}]{words.HEADLINES[diagnosis.level]}[/]")
    if diagnosis.hidden_sampling_possible:
        console.print(f"[yellow]{words.NO_ENTROPY}[/]")
    _show_verdicts(diagnosis, console, host)
    console.print(f"\n[bold]{escape(diagnosis.recommendation.headline)}[/]")
    _show_numbers(diagnosis, console)
    _show_rest(diagnosis, console)


def show_what_if(diagnosis: Diagnosis, *, console: Console) -> None:
    """Print what the best methods would do, the recommended one first, or why that is not known."""
    table = diagnosis.what_if
    if isinstance(table, Missing):
        console.print(f"[yellow]{escape(table.sentence)}[/]")
        return
    recommended = diagnosis.recommendation.method
    shown = Table(
        "method", "tokens", "answers", "by length", "right", "ESS", "bias", "cosine", box=None, padding=(0, 2, 0, 0)
    )
    shown.title, shown.title_justify = f"What if, on {table.tokens:,} tokens (share kept)", "left"
    for row in sorted(table.rows, key=lambda row: row.name != recommended)[:TOP_METHODS]:
        cells = (row.name, *words.what_if_cells(row))
        shown.add_row(*map(escape, cells), style="red" if row.warnings else "bold" if row.name == recommended else "")
    console.print()
    console.print(shown)
    for name, columns in table.not_run.items():
        console.print(f"[dim]Not computed: {name} needs {', '.join(columns)}[/]")


def show_gate(outcomes: Sequence[Outcome], *, console: Console) -> None:
    """Print whether each condition of a gate holds."""
    for outcome in outcomes:
        state = "[green]holds[/]" if outcome.holds else "[bold red]fails[/]"
        console.print(f"{state} {escape(outcome.condition)}: {escape(outcome.sentence)}", soft_wrap=True)


def _show_verdicts(diagnosis: Diagnosis, console: Console, host: str) -> None:
    for verdict in diagnosis.verdicts:
        page, support = verdict.page, words.support(verdict)
        console.print(
            f"\n[{STYLES[verdict.level]}]{verdict.code}[/] [bold]{page.title}[/]" + (f" ({support})" if support else "")
        )
        console.print(Padding(escape(verdict.sentence[0].upper() + verdict.sentence[1:] + "."), (0, 0, 0, 2)))
        if verdict.level in (Level.BUG, Level.SUSPECT):
            console.print(Padding(f"[bold]Decide:[/] {escape(page.experiment)}", (0, 0, 0, 2)))
            for name, fix in page.fixes.items():
                if not host or name == host:
                    console.print(Padding(f"[bold]{name}:[/] {escape(fix)}", (0, 0, 0, 2)))


def _show_numbers(diagnosis: Diagnosis, console: Console) -> None:
    evidence = diagnosis.evidence
    honesty = Table(box=None, padding=(0, 2, 0, 0), show_header=False, title="Honesty", title_justify="left")
    for line in words.honesty_lines(evidence, evidence.whole):
        honesty.add_row(*map(escape, line))
    console.print()
    console.print(honesty)
    size = Table(box=None, padding=(0, 2, 0, 0), show_header=False, title="Size", title_justify="left")
    for name, text in words.size_lines(evidence):
        size.add_row(name, escape(text))
    if diagnosis.timeline is not None and (course := words.course(diagnosis.decomposition, diagnosis.timeline)):
        size.add_row("course", escape(course))
    console.print(size)
    factors = Table(box=None, padding=(0, 2, 0, 0), show_header=False, title="Who explains |l|", title_justify="left")
    ranked = sorted(evidence.profiles.values(), key=lambda profile: -profile.explained)
    for profile in ranked[:TOP_FACTORS]:
        name = next(name for name, other in evidence.profiles.items() if other is profile)
        test = evidence.factor_tests.get(name)
        p = words.probability(evidence.adjusted.get(test.name)) if test else "one value"
        factors.add_row(profile.factor.title, f"{profile.explained:.1%}", "█" * round(BAR * profile.explained), p)
    console.print(factors)


def _show_rest(diagnosis: Diagnosis, console: Console) -> None:
    judgement, evidence = diagnosis.judgement, diagnosis.evidence
    if judgement.not_run:
        rules = "; ".join(f"{code} needs {', '.join(columns)}" for code, columns in judgement.not_run.items())
        console.print(f"[dim]Not run: {rules}[/]")
    if judgement.not_judged:
        first = next(iter(judgement.not_judged.values()))
        console.print(f"[dim]Not judged before {first} is mended: {', '.join(judgement.not_judged)}[/]")
    for kind, count in evidence.damaged.items():
        places = ", ".join(map(str, evidence.damaged_places))
        console.print(f"[yellow]{count:,} responses left out ({kind} log-probs), the first: number {places}[/]")
    corrupt = diagnosis.corrupt
    if corrupt.count or corrupt.files:
        console.print(
            f"[yellow]{corrupt.count:,} corrupt rows and {corrupt.files:,} unreadable files left out, the first: "
            f"{escape(corrupt.first[0])}[/]"
        )
    for sentence in diagnosis.ignored:
        console.print(f"[dim]{escape(sentence)}[/]")
