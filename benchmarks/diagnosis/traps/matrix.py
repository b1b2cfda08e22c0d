"""The confusion matrix: traps against rules, in numbers of dumps."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from megatron_rc.analyze import rules
from megatron_rc.analyze.diagnosis import Diagnosis
from megatron_rc.jobs.describe import table

BENIGN = {"RC404", "RC501", "RC502"}
"""Rules that name a cause without a fault; RC501 always joins them."""
RULES = sorted(rules.RULES)
_COLOURS = LinearSegmentedColormap.from_list("answers", ["#c62828", "#f2f2f2", "#2e7d32"])
"""From dumps with another answer over none to those with the wanted one."""

TEMPLATE = Path(__file__).parents[1] / "confusion.md"
"""The page around the matrix; parts of it are written by analyze_docs.py."""


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
        counted = f"{seeds} seed{'s' * (seeds != 1)}"
        return TEMPLATE.read_text(encoding="utf-8").format(table=self.markdown(), command=command, seeds=counted)

    def draw(self, path: Path) -> None:
        """The picture: green where the wanted rule answered, red where another one did."""
        figure = Figure(figsize=(11.4, 0.24 * len(self.rows) + 1), layout="constrained")
        axes = figure.subplots()
        shares = [
            [row.answers[code] / row.dumps * (1 if self.expected(row, code) else -1) for code in RULES]
            for row in self.rows
        ]
        axes.pcolormesh(shares, cmap=_COLOURS, vmin=-1, vmax=1, edgecolors="white", lw=2, rasterized=True)
        for y, row in enumerate(self.rows):
            for code, dumps in row.answers.items():
                place = RULES.index(code) + 0.5, y + 0.5
                axes.text(*place, f"{dumps}", color="white", size=8, ha="center", va="center")
        axes.set_xticks(np.arange(len(RULES)) + 0.5, RULES, rotation=60)
        axes.set_yticks(np.arange(len(self.rows)) + 0.5, [row.name for row in self.rows])
        axes.set_title("dumps by the rule that answered; green: the wanted one, red: another", size=10, loc="left")
        axes.tick_params(length=0, labelsize=9, labeltop=True, labelbottom=False)
        axes.invert_yaxis()
        axes.spines[:].set_visible(False)
        with rc_context({"svg.hashsalt": "confusion", "svg.fonttype": "none"}):
            figure.savefig(path, metadata={"Date": None})
