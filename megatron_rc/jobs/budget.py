"""Time for which cells of grids may be started."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, field


@dataclass
class Budget:
    """Minutes from now on; a cell is started if one of mean length would end in time. The first one always is."""

    minutes: float = math.inf
    started: float = field(default_factory=time.monotonic)
    seconds_of_cells: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise ValueError(f"--budget-minutes must be > 0, got {self.minutes!r}")

    def allows_another(self) -> bool:
        mean = statistics.fmean(self.seconds_of_cells) if self.seconds_of_cells else 0.0
        return time.monotonic() - self.started + mean <= 60 * self.minutes
