"""Gaps measured on real models, by this project and by others: atlas.csv, a figure per row, and docs/atlas.md of it."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

from megatron_rc.files import read_csv

FILE = Path(__file__).with_name("atlas.csv")
BY_CONFIDENCE = "eps_mad"
"""Statistic of the rows that give the mean of |eps| by the trainer's probability, from the unsure to the certain."""


class Row(NamedTuple):
    """One figure."""

    model: str
    kind: str
    trainer: str
    sampler: str
    precision: str
    statistic: str
    value: float
    low: float
    high: float
    note: str
    source: str
    quote: str


@cache
def rows() -> list[Row]:
    """Every row of the file."""
    return read_csv(Row, FILE)


def by_confidence() -> dict[str, list[float]]:
    """Model and precision -> mean of |eps| in each range of `statistics.displacement.EDGES`."""
    found = dict[str, list[float]]()
    for row in rows():
        if row.statistic == BY_CONFIDENCE:
            found.setdefault(f"{row.model}, {row.precision}", []).append(row.value)
    return found
