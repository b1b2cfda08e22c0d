"""Findings on a terminal, in a log and as JSON."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_rc.doctor.registry import Finding, worst

STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan", "good": "green"}
ORDER = tuple(STYLES)
MOST_NAMES = 3
"""Checks that say the same and are named one by one; of more, only their number is printed."""
LINE = 150
"""Characters of the line about the checks that passed, which names what they found where that fits."""


def show_all(found: Mapping[str, Sequence[Finding]], *, console: Console, passed: bool = False) -> None:
    """Print the findings of every subject, those with errors first."""
    for subject, findings in sorted(found.items(), key=lambda one: worst(one[1]) != "error"):
        show(subject, findings, console=console, passed=passed)


def show(subject: str, findings: Sequence[Finding], *, console: Console, passed: bool = False) -> None:
    """Print mismatches of a subject, gravest first, then undecided checks, then one line about those that passed.

    ``passed``: print each of those, too.

    A terminal gets a table, anything else one or two plain lines per finding.
    """
    console.print(f"{subject}: {summary(findings)}", markup=False, soft_wrap=True)
    decided = sorted((f for f in findings if f.decided and f.status != "good"), key=lambda f: ORDER.index(f.status))
    missing = sorted((f for f in findings if not f.decided), key=lambda f: (f.found, f.fix))
    undecided = [replace(f, found=f"not decided: {f.found}") for f in _joined(missing)]
    good = [finding for finding in findings if finding.status == "good"]
    shown = [*decided, *undecided, *(_joined(good) if passed else ())]
    if console.is_terminal and shown:
        console.print(_table(shown))
    for finding in () if console.is_terminal else shown:
        console.print(f"{finding.status:<8}{finding.check}: {_sentence(finding.found)}", markup=False, soft_wrap=True)
        if finding.fix:
            console.print(f"{'':<8}fix: {finding.fix}", markup=False, soft_wrap=True)
    if good and not passed:
        line = f"{len(good)} check{'s' * (len(good) > 1)} passed"
        named = f"{line}: {'; '.join(finding.found for finding in good)}"
        console.print(named if len(named) <= LINE else line, style=STYLES["good"], markup=False, soft_wrap=True)


def _joined(findings: Iterable[Finding]) -> list[Finding]:
    """One finding for neighbours that say the same, with the names of their checks, or their number."""
    groups = [list(same) for _, same in groupby(findings, lambda f: (f.found, f.fix))]
    names = [", ".join(f.check for f in same) if len(same) <= MOST_NAMES else f"{len(same)} checks" for same in groups]
    return [replace(same[0], check=name) for name, same in zip(names, groups, strict=True)]


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
