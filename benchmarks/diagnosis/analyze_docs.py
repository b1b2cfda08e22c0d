"""Write what docs/analyze.md and docs/rules/ say of `megatron-rc analyze` from its code.

    python benchmarks/diagnosis/analyze_docs.py

The lines between `<!-- NAME: written by ... -->` and `<!-- end of NAME -->` are replaced.
"""

import ast
import contextlib
import inspect
import re
import sys
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folders of benchmarks/ are packages

from diagnosis import real_dumps, sizes
from megatron_rc.analyze import columns, conditions, terminal
from megatron_rc.analyze.commands import PAGE_LINE
from megatron_rc.analyze.diagnosis import diagnose_dump
from megatron_rc.analyze.rules import RULES
from megatron_rc.analyze.rules.rule import Page
from megatron_rc.jobs.describe import table

ROOT = Path(__file__).parents[2]
ANALYZE, INDEX, REFERENCE, CONFUSION = (
    ROOT / f"docs/{name}.md" for name in ("analyze", "rules/index", "rules/reference", "rules/confusion")
)
WIDTH = 100
"""Columns of a printed report."""
THRESHOLDS = (
    "statistics.outcome_filter.LARGEST_CHANCE", "statistics.sums.ZERO_BELOW", "statistics.sign_flips.RUN",
    "statistics.timeline.JUMP_LEVEL", "statistics.significance.LARGEST_SHARE", "statistics.honesty.KAPPA_ERROR",
    "statistics.tail.LIMIT", "recommendation.NEGLIGIBLE", "recommendation.USEFUL", "statistics.bound.FLAT",
    "statistics.bound.CUSTOMARY", "statistics.what_if.MOST_CORRECT_LOST", "statistics.what_if.MOST_QUARTER_LOST",
)  # fmt: skip
"""Constants that the page explains besides those of the rules."""


def column_tables() -> str:
    known = {"column per token, besides the two log-probs": columns.TOKEN_COLUMNS}
    known["column per response"] = columns.SEQUENCE_COLUMNS
    rows = {title: [(f"`{name}`", c.kind, c.meaning) for name, c in each.items()] for title, each in known.items()}
    return "\n".join(table((title, "kind", "meaning"), each) for title, each in rows.items()).strip()


def number_table() -> str:
    rows = [(f"`{name}`", number.meaning) for name, number in conditions.NUMBERS.items()]
    return table(("number", "meaning"), rows).strip()


def threshold_table() -> str:
    """Every number that the file of a rule names, with its docstring, and THRESHOLDS."""
    modules = {f"rules.{code.lower()}" for code in RULES} | {name.rpartition(".")[0] for name in THRESHOLDS}
    rows = []
    for module in sorted(modules, key=lambda name: (not name.startswith("rules."), name)):
        imported = import_module(f"megatron_rc.analyze.{module}")
        for place, after in pairwise(ast.parse(inspect.getsource(imported)).body):
            match place, after:
                case ast.Assign(targets=[ast.Name(id=name)]), ast.Expr(value=ast.Constant(value=str(reason))):
                    value, listed = getattr(imported, name), f"{module}.{name}" in THRESHOLDS
                    if isinstance(value, (int, float)) and (module.startswith("rules.") or listed):
                        constant = f"`{module.rpartition('.')[2]}.{name}`"
                        rows.append((constant, f"{value:g}", " ".join(reason.split())))
    return table(("constant", "value", "reason"), rows).strip()


def rule_table() -> str:
    """Every rule, with what its file says first."""
    rows = []
    for code in sorted(RULES):
        first = (import_module(f"megatron_rc.analyze.rules.{code.lower()}").__doc__ or "").partition(": ")[2]
        found = " ".join(first.split())
        link = f"[{code}](../../megatron_rc/analyze/rules/{code.lower()}.md)"
        rows.append((link, Page(code).title, found.rstrip(".")))
    return table(("code", "cause", "what it sees"), rows).strip()


def rule_pictures() -> str:
    drawn = [code for code in sorted(RULES) if (ROOT / f"docs/images/rules/{code}.svg").is_file()]
    return "\n\n".join(f"![{code}: {Page(code).title}](../images/rules/{code}.svg)" for code in drawn)


def report(dump: str, host: str, end: str = "") -> str:
    """What `megatron-rc analyze` prints, started in the repository, up to the line ``end``."""
    with contextlib.chdir(ROOT):
        diagnosis = diagnose_dump(dump)
    command = f"$ megatron-rc analyze {dump}" + (f" --host {host}" if host else "")
    text = terminal.text(diagnosis, width=WIDTH, host=host)
    rest = "..." if end else PAGE_LINE.format("analysis.html")
    return "\n".join(["```text", command, text.partition(f"\n{end}\n")[0] if end else text, rest, "```"])


BLOCKS: dict[str, tuple[Path, Callable[[], str]]] = {
    "columns": (REFERENCE, column_tables),
    "numbers": (REFERENCE, number_table),
    "healthy": (ANALYZE, lambda: report("examples/dumps/healthy.parquet", "")),
    "sick": (ANALYZE, lambda: report("examples/dumps/sick.parquet", "slime", end="Who explains |l|")),
    "thresholds": (REFERENCE, threshold_table),
    "rules": (INDEX, rule_table),
    "pictures": (INDEX, rule_pictures),
    "real": (CONFUSION, real_dumps.matrix),
    "sizes": (CONFUSION, sizes.matrix),
}
"""Page and text of each generated part."""


def part(name: str, text: str) -> re.Match[str]:
    """The generated part of a page with that text, as the group ``body``."""
    match = re.search(rf"<!-- {name}: written by .* -->\n(?P<body>(?s:.*?))\n<!-- end of {name} -->", text)
    assert match is not None, f"the page has no part {name}"
    return match


def replace_part(page: Path, name: str, body: str) -> None:
    first, behind = part(name, text := page.read_text(encoding="utf-8")).span("body")
    page.write_text(text[:first] + body + text[behind:], encoding="utf-8")


def main() -> None:
    for name, (page, body) in BLOCKS.items():
        replace_part(page, name, body())


if __name__ == "__main__":
    main()
