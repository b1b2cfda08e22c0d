"""One row per finished run of the lab, in runs.csv, and all of them as a table of pandas."""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from megatron_rc.files import read_csv, write_csv
from megatron_rc.jobs.grid_settings import GridSettings

FILE = Path(__file__).with_name("runs.csv")
NAN = math.nan
UNSEEN = 1e-7
"""k3 below this is rounding: what opens such a gap does not show in it."""
CHOOSING = (1, 2, 3)
"""Seeds on which settings were found; every comparison is shown without them, too."""
TUNING = 101
"""Seeds from this one on choose learning rates, and are counted nowhere else."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run; numbers that it did not measure are NaN, and empty in the file."""

    task: str
    run: str
    """Its choices on the axes of its recipe, joined by "-": the gap, the method, the learning rate and the variant."""
    seed: int
    warm: str
    """Hash of the checkpoint that it starts from; empty without a warm-up."""
    final: float
    """Mean held-out accuracy of the last 3 evaluations; 0 for a run that broke down."""
    best: float
    """Largest mean of 3 consecutive evaluations."""
    fell_at: float
    """Step at which a mean of 3 evaluations first lay 30 % or more below the best one before."""
    collapsed_at: float
    """Step from which that is so up to the end."""
    steps: int
    k3_early: float = NAN
    """Median over the first quarter of the steps."""
    depth: float = NAN
    """T / T*: mean response length of that quarter over T* = 1 / (2 k3_early)."""
    length: float = NAN
    """Mean response length over all steps, tokens."""
    outside: float = NAN
    """Share of the tokens with pi / mu outside [0.8, 1.28] in the first quarter of the steps, from a dump."""
    clipped: float = NAN
    """Share that PPO's clip stops in that quarter."""
    growth: float = NAN
    """The clipped share of steps 11 to 20 over that of steps 1 to 10."""
    persistence: float = NAN
    """Mean over the first quarter of the steps of the metric `persistence`; from a dump, after the full lag."""
    entropy: float = NAN
    """Mean over the last quarter of the steps, nats; of a run without an update there, that of its last update."""
    entropy_k3: float = NAN
    """Rank correlation of entropy and k3 over the steps."""
    dropped: float = NAN
    """Mean share of the loss tokens that the method drops."""
    grad_norm: float = NAN
    z_surprise: float = NAN
    """z_W of `megatron-rc analyze`, of exact samplers and hidden changes of sampling."""
    half_k3: float = NAN
    """Step at which k3 has gone half of its way, since the sampler reached its full lag; so the others."""
    half_grad_norm: float = NAN
    half_log_ppl: float = NAN
    half_entropy: float = NAN
    half_accuracy: float = NAN
    seconds: float = NAN
    accuracy: tuple[float, ...] = ()
    """The evaluations, equally spaced from step 0 on."""

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.task, self.run, self.seed, self.warm


def add(rows: Iterable[Row], file: Path = FILE) -> int:
    """Add rows to the file, in place of those of the same task, run, seed and warm-up; returns how many there are.

    What only a whole dump tells stays known where the run was made again without one.
    """
    known = {row.key: row for row in (read_csv(Row, file) if file.exists() else [])}
    for row in rows:
        before = known.get(row.key, row)
        kept = {name: getattr(before, name) for name in ("outside", "persistence") if math.isnan(getattr(row, name))}
        known[row.key] = dataclasses.replace(row, **kept)
    write_csv(Row, [row for _, row in sorted(known.items())], file, digits=4)
    return len(known)


def load(file: Path = FILE) -> pd.DataFrame:
    """All rows; `failed`: whether a run ends below 70 % of the exact one of its seed and warm-up, or of its seed."""
    frame = pd.DataFrame([dataclasses.asdict(row) for row in read_csv(Row, file)])
    exact = frame[frame.run.str.fullmatch(r"exact-none-lr-3e-4-plain(-live)?")]
    own, nearest = (exact.groupby(keys).final.mean() for keys in (["task", "seed", "warm"], ["task", "seed"]))
    keys = zip(frame.task, frame.seed, frame.warm, strict=True)
    frame["relative"] = frame.final / [own.get(key, nearest.get(key[:2], NAN)) for key in keys]
    frame["failed"] = frame.relative < 0.7
    for event in ("fell", "collapsed"):
        frame[event] = frame[f"{event}_at"].notna()
    return frame


def task_of(stage: GridSettings) -> str:
    """The name of a recipe's task in the rows."""
    experts = " with experts" if stage.job["model"]["config"].get("num_experts") else ""
    return f"{stage.job['task']['kind']}{experts}"


def full_name(arm: str) -> str:
    """The name of an arm's runs; a learning rate of 3e-4 and no variant go without saying."""
    return arm if "-lr-" in arm else f"{arm}-lr-3e-4-plain"
