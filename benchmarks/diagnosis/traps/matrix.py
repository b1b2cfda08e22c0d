"""The confusion matrix: traps against rules, in numbers of dumps."""

from collections import Counter
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from megatron_rc.analyze import rules
from megatron_rc.analyze.diagnosis import Diagnosis
from megatron_rc.jobs.describe import table

BENIGN = {"RC404", "RC501", "RC502"}
"""Rules that name a cause without a fault; RC501 always joins them."""
RULES = sorted(rules.RULES)
_CELL, _NAME, _HEAD = 38, 270, 70
_RIGHT, _WRONG, _EMPTY = "#2e7d32", "#c62828", "#f2f2f2"
_LEGEND = (_RIGHT, "dumps with the wanted answer"), (_WRONG, "dumps with another answer")

MORE = Path(__file__).parents[1] / "confusion_more.md"
"""What follows the matrix; parts of it are written by analyze_docs.py."""


@dataclass
class Row:
    """The answers to one trap."""

    name: str
    kind: str
    answer: str
    level: str
    dumps: int = 0
    rights: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    """Dumps by the code that answered."""

    def add(self, diagnosis: Diagnosis) -> None:
        self.dumps += 1
        self.rights += self.right(diagnosis)
        self.answers.update({verdict.code for verdict in diagnosis.verdicts})

    def right(self, diagnosis: Diagnosis) -> bool:
        """The wanted rule answered with the wanted level, also as one of two, and no other one but RC501 next to
        benign causes."""
        verdicts = {
            self.answer if self.answer in verdict.one_of else verdict.code: verdict.level
            for verdict in diagnosis.verdicts
        }
        allowed = {self.answer} | ({"RC501"} if self.answer in BENIGN else set())
        return verdicts.get(self.answer) == self.level and set(verdicts) <= allowed


@dataclass(frozen=True)
class Matrix:
    rows: list[Row]

    def expected(self, row: Row, code: str) -> bool:
        return code == row.answer or (code == "RC501" and row.answer in BENIGN)

    def markdown(self) -> str:
        """A table of dumps by trap and rule."""
        lines = []
        for row in self.rows:
            cells = [str(row.answers[code] or "") for code in RULES]
            lines.append([row.name, row.kind, f"{row.answer} {row.level}", *cells, f"{row.rights} of {row.dumps}"])
        return table(("trap", "kind", "wanted", *RULES, "right"), lines)

    def page(self, seeds: int) -> str:
        """The document with picture and table."""
        command = f"python benchmarks/diagnosis/confusion.py --seeds {' '.join(map(str, range(seeds)))} --docs"
        return (
            "# Which rule answers to which trap\n\n"
            "Each row is a dump of a small model (vocabulary 4,096, 18,000 to 34,000 tokens of responses of up to 160) "
            "with one fault.\n*Real engine*: the embedded engine runs with that fault. *Real server*: an SGLang server "
            "does, for one seed and with 12,000 to 14,000 tokens. *Injected*: the logs of a healthy dump\nare changed. "
            f"The sampler computes in bf16, the trainer in fp32. A number counts dumps, of {seeds} "
            f"seed{'s' * (seeds != 1)}, in which\nthe rule answered; RC501 "
            "also answers next to the other benign causes.\n\n"
            "![traps against rules](../images/confusion.svg)\n\n"
            f"{self.markdown()}\n"
            f"`{command}` writes this page.\n\n" + MORE.read_text(encoding="utf-8")
        )

    def svg(self) -> str:
        """The picture: green where the wanted rule answered, red where another one did."""
        width, height = _NAME + _CELL * len(RULES) + 30, _HEAD + 20 * len(self.rows) + 34
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        ]
        for column, code in enumerate(RULES):
            x = _NAME + _CELL * column + _CELL / 2
            parts.append(f'<text x="{x}" y="{_HEAD - 8}" transform="rotate(-60 {x} {_HEAD - 8})">{code}</text>')
        for index, row in enumerate(self.rows):
            y = _HEAD + 20 * index
            parts.append(f'<text x="{_NAME - 8}" y="{y + 14}" text-anchor="end">{escape(row.name)}</text>')
            for column, code in enumerate(RULES):
                share = row.answers[code] / row.dumps
                colour = _EMPTY if not share else _RIGHT if self.expected(row, code) else _WRONG
                x = _NAME + _CELL * column
                parts.append(
                    f'<rect x="{x}" y="{y}" width="{_CELL - 2}" height="18" fill="{colour}" '
                    f'fill-opacity="{0.25 + 0.75 * share if share else 1:.2f}"/>'
                )
                if share:
                    parts.append(
                        f'<text x="{x + _CELL / 2 - 1}" y="{y + 13}" text-anchor="middle" fill="#ffffff">'
                        f"{row.answers[code]}</text>"
                    )
        y = _HEAD + 20 * len(self.rows) + 10
        for place, (colour, meaning) in enumerate(_LEGEND):
            x = _NAME + 230 * place
            parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{colour}"/>')
            parts.append(f'<text x="{x + 20}" y="{y + 11}">{meaning}</text>')
        return "\n".join([*parts, "</svg>"]) + "\n"
