"""Findings on a terminal, in a log and as JSON."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_rc.doctor.registry import Finding

STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan", "good": "green"}
ORDER = tuple(STYLES)


def show(subject: str, findings: Sequence[Finding], *, console: Console) -> None:
    """Print mismatches of a subject, gravest first, then undecided checks, then good ones.

    A terminal gets a table, anything else one or two plain lines per finding.
    """
    console.print(f"{subject}: {summary(findings)}", markup=False, soft_wrap=True)
    decided = sorted((f for f in findings if f.decided and f.status != "good"), key=lambda f: ORDER.index(f.status))
    missing = sorted((f for f in findings if not f.decided), key=lambda f: (f.found, f.fix))
    undecided = [replace(f, found=f"not decided: {f.found}") for f in _joined(missing)]
    good = _joined(f for f in findings if f.status == "good")
    if console.is_terminal:
        console.print(_table([*decided, *undecided, *good]))
        return
    for finding in (*decided, *undecided, *good):
        console.print(f"{finding.status:<8}{finding.check}: {_sentence(finding.found)}", markup=False, soft_wrap=True)
        if finding.fix:
            console.print(f"{'':<8}fix: {finding.fix}", markup=False, soft_wrap=True)


def _joined(findings: Iterable[Finding]) -> list[Finding]:
    """One finding for neighbours that say the same, with the names of all their checks."""
    groups = [list(same) for _, same in groupby(findings, lambda f: (f.found, f.fix))]
    return [replace(same[0], check=", ".join(f.check for f in same)) for same in groups]


def summary(findings: Sequence[Finding]) -> str:
    """Numbers by status, such as '1 error, 2 warnings, 3 notes, 20 good'."""
    counts = {status: sum(f.status == status for f in findings) for status in ORDER}
    named = [f"{n} {status}{'s' if n > 1 and status != 'good' else ''}" for status, n in counts.items() if n]
    return ", ".join(named)


def to_json(results: Mapping[str, Sequence[Finding]]) -> str:
    """A JSON object with the findings of each subject, in the order of the registry."""
    return json.dumps({subject: [asdict(f) for f in findings] for subject, findings in results.items()}, indent=2)


def _table(findings: Sequence[Finding]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    table.add_column("check", max_width=24)
    table.add_column("found and fix", ratio=1)
    for f in findings:
        text = escape(_sentence(f.found)) + (f"\n[bold]fix:[/] {escape(f.fix)}" if f.fix else "")
        table.add_row(f"[{STYLES[f.status]}]{f.status}[/]", escape(f.check), text)
    return table


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."
