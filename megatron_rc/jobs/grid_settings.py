"""The YAML of a grid and its cells: which there are, and where their runs and warm-ups are."""

import functools
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rc import schema
from megatron_rc.report.comparison import Comparison
from megatron_rc.report.endpoints import Endpoints
from megatron_rc.report.log import read_metrics

FAILURE = "failure.txt"
"""File in the folder of a cell: why its latest failed attempt failed."""
SEEDS = "seeds"
"""Key of a group of cells, next to the names of axes."""


class Cell(NamedTuple):
    choices: dict[str, str]
    seed: int
    folder: Path
    steps: int

    @property
    def name(self) -> str:
        return f"{'-'.join(self.choices.values())} seed {self.seed}"

    def finished(self) -> bool:
        metrics = self.folder / "metrics.jsonl"
        records = read_metrics(metrics) if metrics.is_file() else []
        return bool(records) and records[-1]["step"] >= self.steps

    def broken(self) -> bool:
        """Whether its last attempt ended because log-probs were not finite."""
        failure = self.folder / FAILURE
        return failure.is_file() and "nonfinite_share" in failure.read_text() and not self.finished()


@dataclass(frozen=True, kw_only=True)
class GridSettings:
    """The YAML of `megatron-rc grid`."""

    job: dict[str, Any]
    """Fields of a training job that all cells have in common."""
    axes: dict[str, dict[str, dict[str, Any]]]
    """Maps axis -> choice -> dotted field of the job -> value."""
    seeds: tuple[int, ...] = (1,)
    """Every cell is run with each of these as train.seed."""
    cells: tuple[dict[str, Any], ...] = ()
    """Groups of cells to run instead of every choice on every axis. A group maps axes to a choice or a list of choices
    and takes all choices of the axes that it leaves out; its key seeds replaces the seeds of the grid."""
    output: str = "runs/grid"
    runs_folder: str = "."
    """Folder of the cells, relative to output; grids with the same job and axes may share one; a cell that two of them
    name is then run once."""
    warm_folder: str = "warm"
    """Checkpoints after the warm-up, relative to output; grids with the same model, task and warm-up may share one."""
    launcher: str = ""
    """Command that starts a job of several processes, such as `torchrun --nproc_per_node 8`; empty runs jobs in this
    process."""
    keep_weights: bool = False
    """Keep the checkpoints of finished cells."""
    endpoints: Endpoints | None = None
    """Rules by which a run has collapsed, relapsed or failed; null judges none."""
    comparison: Comparison | None = None
    """Three choices of the only axis that report.html compares in one figure; null writes no report."""
    arguments: tuple[str, ...] = ()
    """Values of `--set` on the command line, for every job."""
    home: str = "."
    """Folder of the YAML, where a reward function may lie; the command fills it in."""

    def __post_init__(self) -> None:
        if not self.seeds:
            raise ValueError("seeds must name at least one seed")
        for axis, choices in self.axes.items():
            if not choices:
                raise ValueError(f"axes.{axis} must have at least one choice")
        for number, group in enumerate(self.cells):
            self.check(f"cells.{number}", _picked(group))
        for axis, choice in (self.endpoints.exact if self.endpoints else {}).items():
            if choice not in self.axes.get(axis, {}):
                raise ValueError(f"endpoints.exact: the grid has no choice {choice!r} on an axis {axis!r}")
        if self.comparison:
            if len(self.axes) != 1:
                raise ValueError(f"comparison needs a grid with one axis, got {', '.join(self.axes) or 'none'}")
            (choices,) = self.axes.values()
            for choice in self.comparison.choices:
                if choice not in choices:
                    raise ValueError(f"comparison names {choice!r}, which is none of the choices {', '.join(choices)}")

    def check(self, where: str, choices: Mapping[str, Sequence[str]]) -> None:
        """Raise ValueError, which begins with ``where``, for an axis or a choice that the grid lacks."""
        for axis, names in choices.items():
            if axis not in self.axes:
                raise ValueError(f"{where}: the grid has no axis {axis!r}{schema.nearest(axis, self.axes)}")
            for name in names:
                if name not in self.axes[axis]:
                    known = ", ".join(self.axes[axis])
                    raise ValueError(f"{where}: axis {axis!r} has no choice {name!r}; it has {known}")

    def with_seeds(self, seeds: Sequence[int]) -> "GridSettings":
        """The same cells, every one with these seeds."""
        return replace(self, seeds=tuple(seeds), cells=tuple(_picked(group) for group in self.cells))

    def groups(self, only: Mapping[str, Sequence[str]]) -> Iterator[tuple[dict[str, str], int]]:
        """Choices and seed of every cell, group by group, the last axis fastest; ``only`` keeps what it names."""
        self.check("--only", only)
        for group in self.cells or ({},):
            picked = _picked(group)
            columns = [
                [name for name in choices if name in picked.get(axis, choices) and name in only.get(axis, choices)]
                for axis, choices in self.axes.items()
            ]
            for names in itertools.product(*columns):
                for seed in _listed(group.get(SEEDS, self.seeds)):
                    yield dict(zip(self.axes, names, strict=True)), seed

    @functools.cached_property
    def names(self) -> dict[str, dict[str, str]]:
        """Maps the name of each cell, its choices joined by "-", to its choices."""
        return {"-".join(choices.values()): choices for choices, _ in self.groups({})}

    @functools.cached_property
    def branches(self) -> dict[str, str]:
        """Maps the name of each cell that branches off another run to its field `branch`."""
        fields = {
            name: [self.axes[axis][choice].get("branch") for axis, choice in choices.items()]
            for name, choices in self.names.items()
        }
        return {name: str(point) for name, found in fields.items() for point in found if point}

    def folder(self, name: str) -> Path:
        """A folder whose name is relative to output."""
        return Path(os.path.normpath(Path(self.output) / name))


def _picked(group: Mapping[str, Any]) -> dict[str, list[str]]:
    return {axis: _listed(names) for axis, names in group.items() if axis != SEEDS}


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
