"""The routes of the pass over the old log-probs: the experts that the trainer would choose, next to the sampler's.

With --use-rollout-routing-replay the host's pass over the old log-probs uses the experts that the sampler chose. The
hook `before_log_prob` lets every router of that pass also say which experts it would have chosen itself. `rollout_data`
compares the two for the whole rollout; where the host has no such hook, `before_train_step` collects them from the
pipeline stages, and `tis` or `loss` read those of their micro-batch.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.collectives import gathered_objects
from megatron_rc.integrations.parallel import Parallel
from megatron_rc.integrations.slime.layout import Layout
from megatron_rc.moe.compare import compare_routes
from megatron_rc.moe.gathering import gather_bytes, join_layers
from megatron_rc.moe.tables import MoeShape, RouteTable


class _RouterWatch:
    """One router: what it replays, and what it would choose, for every micro-batch of the pass."""

    def __init__(self, router: Any) -> None:
        self.router, self._routing = router, router.routing
        self.pairs: list[Tensor] = []
        """[2, n, k] expert ids: the trainer's, the sampler's."""
        router.routing = self.routing

    def routing(self, *args: Any, **kwargs: Any) -> Any:
        # its own choice first: the host keeps the order of the experts of the last call
        with torch.no_grad(), _without_replay():
            own = self._routing(*args, **kwargs)[1]
        result = self._routing(*args, **kwargs)
        maps = torch.stack([own, result[1]]).byte()
        self.pairs.append(maps.topk(self.router.config.moe_router_topk, dim=-1).indices.to(_shape(self.router).dtype))
        return result


class RouteWatch:
    """The routers of this process during the pass over the old log-probs, and what they chose."""

    def __init__(self) -> None:
        self._routers: dict[int, _RouterWatch] = {}
        self._shifts: list[Tensor] = []

    def begin(self, model: Sequence[torch.nn.Module]) -> None:
        """Watch every router of these chunks until `end`; what was seen before is forgotten."""
        from megatron_rc.moe.routers import routers_of  # imports megatron-core

        self._routers = {layer: _RouterWatch(r) for chunk in model for layer, r in routers_of(chunk).items()}
        self._shifts = []
        self._device = next(model[0].parameters()).device

    def end(self) -> None:
        """Leave the routers as they were."""
        for watch in self._routers.values():
            vars(watch.router).pop("routing", None)

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
        """[N] fp32: share of the layers with experts whose decision differs, of the next micro-batch in order.

        Raises:
            ValueError: the pass over the old log-probs had fewer micro-batches, or other ones.
        """
        if not self._shifts or len(self._shifts[0]) < layout.rows:
            raise ValueError(
                "megatron_rc.routes needs the update to see the micro-batches of the pass over the old log-probs in "
                "their order: drop --skip-actor-forward-only, --use-rollout-logprobs and --recompute-loss-function"
            )
        shift = self._shifts.pop(0)
        return shift[layout.logits_rows(shift.device)]

    def _joined(self, ranks: Parallel) -> tuple[MoeShape, Iterator[Tensor]]:
        """The model's shape, and [2, rows, L, k] of every micro-batch, with the layers of all pipeline stages.

        With sequence parallelism a micro-batch has the rows of all tensor-parallel ranks.
        """
        self.end()
        watches = [self._routers[layer] for layer in sorted(self._routers)]
        group = ranks.tp_group if any(watch.router.config.sequence_parallel for watch in watches) else None
        here: Any = (None, [])
        if watches:
            parts = 1 if group is None else dist.get_world_size(group)
            shape = replace(_shape(watches[0].router), layers=tuple(sorted(self._routers)))
            here = (shape, [pair.shape[1] * parts for pair in watches[0].pairs])
        self._routers, stages = {}, gathered_objects(here, ranks.pp_group)
        held = [stage.layers if stage else () for stage, _ in stages]
        shape, sizes = next((each for each in stages if each[0]), here)
        if shape is None:
            raise ValueError("megatron_rc.routes needs a pass over the old log-probs of a model with experts")
        layers = [layer for layers in held for layer in layers]
        ascending = torch.tensor(layers, device=self._device).argsort()

        def joined(number: int, rows: int) -> Tensor:
            pairs = [watch.pairs[number] for watch in watches]
            if group is not None:
                pairs = [torch.cat([*gather_bytes(pair, group)], 1) for pair in pairs]
            mine = torch.stack(pairs, 2).flatten(0, 1) if pairs else None
            empty = torch.empty(2 * rows, 0, shape.top_k, dtype=shape.dtype, device=self._device)
            table = join_layers(mine, held, empty, ranks.pp_group)
            return table.index_select(1, ascending).unflatten(0, (2, rows))

        return replace(shape, layers=tuple(sorted(layers))), (joined(*each) for each in enumerate(sizes))


WATCH = RouteWatch()
"""The routers of this process; before_log_prob begins, and the hooks that compare end it."""


def _shape(router: Any) -> MoeShape:
    config = router.config
    return MoeShape(config.num_layers, (), config.moe_router_topk, config.num_moe_experts)


@contextmanager
def _without_replay() -> Iterator[None]:
    """Within this block the host's routers choose for themselves; slime keeps the stage of replay in a variable."""
    miles: Any = sys.modules.get("miles.utils.replay_base")
    stages: Any = os.environ
    key = "ROUTING_REPLAY_STAGE"
    if miles is not None:
        stages, key = vars(miles.routing_replay_manager), "stage"
    before, stages[key] = stages[key], "fallthrough"
    try:
        yield
    finally:
        stages[key] = before
