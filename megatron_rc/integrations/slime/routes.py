"""The routes of the pass over the old log-probs: the experts that the trainer would choose, next to the sampler's.

With --use-rollout-routing-replay that pass uses the experts that the sampler chose, and the hook `before_log_prob` lets
every router also say which experts it would have chosen itself. `rollout_data` compares the two for the whole rollout;
where the host has no such hook, `before_train_step` collects them, and `tis` or `loss` read those of their micro-batch.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_rc.integrations.parallel import Parallel
from megatron_rc.integrations.slime.layout import Layout
from megatron_rc.moe.compare import compare_routes
from megatron_rc.moe.tables import MoeShape, RouteTable
from megatron_rc.moe.watching import ModelWatch


class RouteWatch:
    """The routers of this process during the pass over the old log-probs, and what they chose."""

    def __init__(self) -> None:
        self._model: ModelWatch | None = None
        self._shifts: list[Tensor] = []

    def begin(self, model: Sequence[torch.nn.Module]) -> None:
        """Watch every router of these chunks until `end`; what was seen before is forgotten."""
        self._model, self._shifts = ModelWatch(model, _without_replay), []

    def end(self) -> None:
        """Leave the routers as they were."""
        if self._model is not None:
            self._model.end()

    def whole(
        self, ranks: Parallel, micro_batches: Sequence[Sequence[int]], layouts: Sequence[Layout]
    ) -> tuple[RouteTable, RouteTable]:
        """The trainer's and the sampler's routes of all response tokens, in the rollout's order; as `collect`."""
        shape, tables = self._joined(ranks)
        of_sample: dict[int, Tensor] = {}
        for samples, layout, table in zip(micro_batches, layouts, tables, strict=True):
            of_sample |= zip(samples, table[:, layout.logits_rows(table.device)].split(layout.counts, 1), strict=True)
        trainer, sampler = torch.cat([of_sample[number] for number in sorted(of_sample)], 1)
        return RouteTable(shape, trainer), RouteTable(shape, sampler)

    def collect(self, ranks: Parallel) -> None:
        """Compare the routes row by row, for `next_shift`, and forget them; a collective of the model's processes."""
        shape, tables = self._joined(ranks)
        self._shifts = [compare_routes(*table).differing_layers.float() / len(shape.layers) for table in tables]

    def next_shift(self, layout: Layout) -> Tensor:
        """[N] fp32, of the next micro-batch in order: the share of the layers with experts whose decision differs."""
        if not self._shifts or len(self._shifts[0]) < layout.rows:
            raise ValueError(
                "megatron_rc.routes needs the update to see the micro-batches of the pass over the old log-probs in "
                "their order: drop --skip-actor-forward-only, --use-rollout-logprobs and --recompute-loss-function"
            )
        shift = self._shifts.pop(0)
        return shift[layout.logits_rows(shift.device)]

    def _joined(self, ranks: Parallel) -> tuple[MoeShape, Iterator[Tensor]]:
        self.end()
        joined = None if self._model is None else self._model.joined(ranks.tp_group, ranks.pp_group)
        if joined is None:
            raise ValueError("megatron_rc.routes needs a pass over the old log-probs of a model with experts")
        self._model = None
        return joined


WATCH = RouteWatch()
"""The routers of this process; before_log_prob begins, and the hooks that compare end it."""


@contextmanager
def _without_replay() -> Iterator[None]:
    """Within this block the host's routers choose for themselves; slime keeps the stage of replay in a variable."""
    miles, stages, key = sys.modules.get("miles.utils.replay_base"), os.environ, "ROUTING_REPLAY_STAGE"
    if miles is not None:
        stages, key = vars(miles.routing_replay_manager), "stage"
    before, stages[key] = stages[key], "fallthrough"
    try:
        yield
    finally:
        stages[key] = before
