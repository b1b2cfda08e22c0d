"""Write what docs/analyze.md says of `megatron-rc analyze` from its code.

    python benchmarks/diagnosis/analyze_docs.py

The lines between `<!-- NAME: ... -->` and `<!-- end of NAME -->` are replaced.
"""

import contextlib
import io
import re
from pathlib import Path

from rich.console import Console

from megatron_rc.analyze import columns, gate, terminal
from megatron_rc.analyze.diagnosis import diagnose_dump
from megatron_rc.jobs.describe import table

ROOT = Path(__file__).parents[2]
ANALYZE = ROOT / "docs/analyze.md"
WIDTH = 118
"""Columns of a printed report."""
NUMBERS = {
    "k3": "mean k3",
    "sigma": "noise of a logit that would give this gap",
    "kappa": "mean(−l) / mean(l² / 2)",
    "mean_ratio": "mean ρ",
    "surprise": "mean of ρ (−log π − H), nats; needs the column `entropy`",
    "z_rho": "statistic of the mean ratio",
    "z_W": "statistic of the surprise; needs the column `entropy`",
    "exact": "share of tokens whose two log-probs are equal bit for bit",
    "ess": "effective share of the responses",
    "k_hat": "k-hat of token ratios",
    "k_hat_sequence": "k-hat of the weights of whole responses",
    "damaged": "responses left out because of a log-prob that is NaN, infinite or above 0",
    "corrupt": "rows that could not be read",
}
"""Meaning of each number that a gate knows."""


def column_tables() -> str:
    parts = []
    per_token = "column per token, beside the two log-probs"
    for title, known in ((per_token, columns.TOKEN_COLUMNS), ("column per response", columns.SEQUENCE_COLUMNS)):
        rows = [(f"`{name}`", column.kind, column.meaning) for name, column in known.items()]
        parts.append(table((title, "kind", "meaning"), rows))
    return "\n".join(parts).strip()


def number_table() -> str:
    return table(("number", "meaning"), [(f"`{name}`", NUMBERS[name]) for name in gate.NUMBERS]).strip()


def report(dump: str, host: str) -> str:
    """What `megatron-rc analyze` prints, started in the repository."""
    with contextlib.chdir(ROOT):
        diagnosis = diagnose_dump(dump)
    console = Console(file=io.StringIO(), width=WIDTH, highlight=False)
    terminal.show(diagnosis, console=console, host=host)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    command = f"$ megatron-rc analyze {dump}" + (f" --host {host}" if host else "")
    return "\n".join(["```text", command, *lines, "analysis.html", "```"])


BLOCKS = {
    "columns": column_tables,
    "numbers": number_table,
    "healthy": lambda: report("examples/dumps/healthy.parquet", ""),
    "sick": lambda: report("examples/dumps/sick.parquet", "slime"),
}


def analyze_page(text: str) -> str:
    """docs/analyze.md with its generated parts written again."""
    for name, body in BLOCKS.items():
        pattern = re.compile(rf"(<!-- {name}: [^\n]* -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        text = pattern.sub(lambda match, body=body: f"{match[1]}{body()}\n{match[2]}", text)
    return text


def main() -> None:
    ANALYZE.write_text(analyze_page(ANALYZE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
