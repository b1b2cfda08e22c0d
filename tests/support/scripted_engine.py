"""An engine without a model, whose answers say what reached it, and whose prompts can make it fail."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from megatron_rc.engine import RolloutEngine, Sample

if TYPE_CHECKING:
    from torch import Tensor

REFUSED, BROKEN, KILLED, ENDLESS = range(900, 904)
"""First ids of prompts that do not get an answer; the last is counted as finished when its engine begins with it."""


class ScriptedEngine(RolloutEngine):
    """Answers with the seed; the log-probs are the values of the weights that it has."""

    def __init__(self, refuse: str = "") -> None:
        if refuse:
            raise ValueError(refuse)
        self.weight_version = -1
        self.values: list[float] = [0.0]

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Any, *, n: int, seeds: Sequence[int], on_finished: Any = None
    ) -> list[Sample]:
        match prompts[0][0]:
            case 900:
                raise ValueError("prompt 0 is refused")
            case 901:
                raise KeyError("no such key\nin the table")
            case 902:
                os.kill(os.getpid(), signal.SIGKILL)
            case 903:
                if on_finished is not None:
                    on_finished(1)
                time.sleep(600)
        if on_finished is not None:
            for _ in seeds:
                on_finished(1)
        spans = [(self.weight_version, 0, len(self.values))]
        rows = [prompt for prompt in prompts for _ in range(n)]
        return [
            Sample(list(row), [seed] * len(self.values), list(self.values), "stop", list(spans))
            for row, seed in zip(rows, seeds, strict=True)
        ]

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        values = []
        for name, tensor in weights:
            if name == "unknown":
                raise ValueError("weight 'unknown' is not a parameter of the model")
            values += tensor.double().flatten().tolist()
        self.values, self.weight_version = values, version

    def close(self) -> None: ...
