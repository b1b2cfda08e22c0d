"""What analyze says of the committed dumps of a real language model: tests/support/data/real and .../sampled.

benchmarks/real/sampled.py made most of the second folder. benchmarks/real/dumps.py of commit e68b32c0 made the first
one, from steps of each row of gap.yaml, and those of the second that are parts of steps.yaml. Limits were found on one
half of the dumps. The other half, called aside, was judged after the limits were committed, so no dump may be replaced.

Injected into log mu: "sentinel" is -9999.0 for 2 % of the tokens, "zeros" 0.0 for 5 %, "not a number" NaN for 0.2 %,
"paired wrongly" the log-probs of the next response.
"""

from functools import cache
from pathlib import Path

from megatron_rc.analyze.diagnosis import Diagnosis, diagnose_dump
from megatron_rc.analyze.headline import headline
from megatron_rc.analyze.known import Known
from megatron_rc.analyze.rules.rule import Level, Verdict
from megatron_rc.jobs.describe import table

DATA = Path(__file__).parents[2] / "tests/support/data"
WANTED = {
    "another-prompt": "RC205", "base-2": "RC108", "hidden-min-p-0.05": "RC103", "hidden-penalty-1.1": "RC103",
    "hidden-temperature-0.9": "RC103", "hidden-top-k-20": "RC103", "hidden-top-p-0.95": "RC103", "logged-bias": "RC307",
    "logged-min-p-0.05": "RC102", "logged-penalty-1.1": "RC105", "logged-penalty-1.2": "RC105",
    "logged-temperature-0.9": "RC101", "logged-top-k-20": "RC102", "logged-top-p-0.95": "RC102",
    "one-server-stale": "RC303", "paired-wrongly": "RC208", "sentinel": "RC209", "shifted-by-one": "RC201",
    "turn-positions": "RC206", "zeros": "RC203",
}  # fmt: skip
"""Fault -> the rule that must answer. Nobody is to be accused in a healthy dump, nor in those of other faults, which
no rule can tell from healthy noise of some engine at this size."""
NOBODY = "nobody"


@cache
def diagnosed(file: Path, precision: str = "") -> Diagnosis:
    return diagnose_dump(file, known=Known(precision) if precision else None)


def files(folder: str) -> dict[str, list[Path]]:
    """Kind of dump -> its files."""
    found: dict[str, list[Path]] = {}
    for file in sorted((DATA / folder).glob("*.parquet")):
        found.setdefault(kind(file), []).append(file)
    return found


def kind(file: Path) -> str:
    """Healthy ones of the first folder are one kind, whatever their precision."""
    stem = file.stem.removesuffix("-aside")
    if file.parent.name == "sampled":
        return stem.rpartition("-")[0]
    return "healthy" if stem.startswith("healthy") else next(name for name in INJECTED if stem.startswith(name))


INJECTED = ("base-2", "not-a-number", "paired-wrongly", "sentinel", "shifted-by-one", "two-decimals", "zeros")


def accusing(diagnosis: Diagnosis) -> list[Verdict]:
    """The verdicts that call something a fault."""
    return [verdict for verdict in diagnosis.verdicts if verdict.level in (Level.BUG, Level.SUSPECT)]


def answer(diagnosis: Diagnosis) -> str:
    """Codes of the rules that accuse, or what the report says instead."""
    if accused := accusing(diagnosis):
        return ", ".join(verdict.code for verdict in accused)
    if diagnosis.level is not Level.NUMERICS:
        return str(diagnosis.level)
    return headline(diagnosis).partition(":")[0].lower()


def right(name: str, diagnosis: Diagnosis) -> bool:
    """The wanted rule accuses and no other one, or nobody is accused where nobody is to be."""
    return [verdict.code for verdict in accusing(diagnosis)] == ([WANTED[name]] if name in WANTED else [])


def matrix() -> str:
    """A row per kind: what was wanted, and how many dumps of either half were right."""
    rows = []
    for folder in ("sampled", "real"):
        for name, members in files(folder).items():
            halves = ([f for f in members if f.stem.endswith("aside") == aside] for aside in (False, True))
            counts = (f"{sum(right(name, diagnosed(f)) for f in half)} of {len(half)}" for half in halves)
            said, known = (
                "; ".join(dict.fromkeys(answer(diagnosed(file, precision)) for file in members))
                for precision in ("", "bf16")
            )
            only = known if folder == "sampled" else ""
            rows.append((name.replace("-", " "), WANTED.get(name, NOBODY), *counts, said, only))
    head = ("dump", "to accuse", "limits found", "kept aside", "answers", "with --precision bf16")
    return table(head, rows).strip()
