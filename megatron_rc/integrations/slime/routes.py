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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.collectives import all_reduced, is_alone
from megatron_rc.integrations.slime.layout import Layout, Parallel
from megatron_rc.moe.compare import compare_routes
from megatron_rc.moe.gathering import join_layers
from megatron_rc.moe.tables import MoeShape, RouteTable


class Routes(NamedTuple):
    """Routes of the tokens [N] of this rank in all layers, in the order of a Layout."""

    trainer: RouteTable
    sampler: RouteTable


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

    def end(self) -> None:
        vars(self.router).pop("routing", None)


class RouteWatch:
    """The routers of this process during the pass over the old log-probs, and what they chose."""

    def __init__(self) -> None:
        self._routers: dict[int, _RouterWatch] = {}
        self._device = torch.device("cpu")
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
            watch.end()

    def whole(self, ranks: Parallel, micro_batches: Sequence[Sequence[int]], layouts: Sequence[Layout]) -> Routes:
        """All response tokens' routes, in the rollout's order, which are then forgotten; a collective of the model."""
        self.end()
        counts = [count for layout in layouts for count in layout.counts]
        order = sorted(range(len(counts)), key=[sample for batch in micro_batches for sample in batch].__getitem__)

        def in_order(pair: Tensor) -> Tensor:
            parts = pair.split(counts, dim=1)
            return torch.cat([parts[place] for place in order], dim=1)

        rows = [layout.logits_rows(self._device) for layout in layouts]
        mine = [
            torch.cat([seen[:, chosen] for seen, chosen in zip(pairs, rows, strict=True)], 1)
            for pairs in self._rows(ranks)
        ]
        stages, shape, _ = self._everywhere(ranks)
        layers = [layer for here in stages for layer in here]
        ascending = torch.tensor([layers.index(layer) for layer in shape.layers], device=self._device)
        tables = []
        for side in range(2):
            columns = torch.stack([in_order(pair)[side] for pair in mine], 1) if mine else None
            empty = torch.empty(sum(counts), 0, shape.top_k, dtype=shape.dtype, device=self._device)
            joined = join_layers(columns, stages, empty, ranks.pp_group)
            tables.append(RouteTable(shape, joined.index_select(1, ascending)))
        self._routers = {}
        return Routes(*tables)

    def collect(self, ranks: Parallel) -> None:
        """Compare the routes row by row, for `next_shift`, and forget them; a collective of the model's processes."""
        self.end()
        mine = self._rows(ranks)
        _, shape, sizes = self._everywhere(ranks)
        self._shifts = []
        for number, rows in enumerate(sizes):
            differing = torch.zeros(rows, device=self._device)
            if mine:
                trainer, sampler = torch.stack([pairs[number] for pairs in mine], 2)
                differing = compare_routes(trainer, sampler).differing_layers.float()
            self._shifts.append(all_reduced(differing, ranks.pp_group) / len(shape.layers))
        self._routers = {}

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

    def _rows(self, ranks: Parallel) -> list[list[Tensor]]:
        """[layer][micro-batch] [2, rows, k]: with sequence parallelism the rows of all tensor-parallel ranks."""
        group = ranks.tp_group if self._splits_rows else None
        return [[_gathered(pair, group) for pair in watch.pairs] for _, watch in sorted(self._routers.items())]

    @property
    def _splits_rows(self) -> bool:
        return any(watch.router.config.sequence_parallel for watch in self._routers.values())

    def _everywhere(self, ranks: Parallel) -> tuple[list[list[int]], MoeShape, list[int]]:
        """(layers with experts of every stage, the model's shape, rows of every micro-batch)."""
        here = _Stage(sorted(self._routers), None, [])
        if self._routers:
            watch = next(iter(self._routers.values()))
            whole = dist.get_world_size(ranks.tp_group) if self._splits_rows and ranks.tp_group is not None else 1
            here = _Stage(here.layers, _shape(watch.router), [pair.shape[1] * whole for pair in watch.pairs])
        stages = [here]
        if not is_alone(ranks.pp_group):
            everyone: list[Any] = [None] * dist.get_world_size(ranks.pp_group)
            dist.all_gather_object(everyone, here, group=ranks.pp_group)
            stages = everyone
        layers = [stage.layers for stage in stages]
        for stage in stages:
            if stage.shape is not None:
                shape = replace(stage.shape, layers=tuple(sorted(layer for held in layers for layer in held)))
                return layers, shape, stage.rows
        raise ValueError("megatron_rc.routes needs a pass over the old log-probs of a model with experts")


class _Stage(NamedTuple):
    layers: list[int]
    shape: MoeShape | None
    rows: list[int]


WATCH = RouteWatch()
"""The routers of this process; before_log_prob begins, and the hooks that compare end it."""


def _shape(router: Any) -> MoeShape:
    config = router.config
    return MoeShape(config.num_layers, (), config.moe_router_topk, config.num_moe_experts)


def _gathered(pair: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if is_alone(group):
        return pair
    parts = [torch.empty_like(pair) for _ in range(dist.get_world_size(group))]
    # as bytes: NCCL knows no int16
    dist.all_gather([part.view(torch.uint8) for part in parts], pair.contiguous().view(torch.uint8), group=group)
    return torch.cat(parts, 1)


@contextmanager
def _without_replay() -> Iterator[None]:
    """Within this block the host's routers choose for themselves."""
    stage = _exchange_stage("fallthrough")
    try:
        yield
    finally:
        _exchange_stage(stage)


def _exchange_stage(stage: str) -> str:
    """Set the stage of replay, which slime keeps in an environment variable; returns the one before."""
    miles, variable = sys.modules.get("miles.utils.replay_base"), "ROUTING_REPLAY_STAGE"
    if miles is None:
        before, os.environ[variable] = os.environ[variable], stage
    else:
        before, miles.routing_replay_manager.stage = miles.routing_replay_manager.stage, stage
    return before
