"""Routers of a model during a forward pass that replays routes: what they would choose, next to what they use."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.collectives import Group, gathered_objects
from megatron_rc.moe.gathering import gather_bytes, join_layers
from megatron_rc.moe.tables import MoeShape

WithoutReplay = Callable[[], AbstractContextManager[None]]
"""A block within which routers choose for themselves."""


class RouterWatch:
    """One router, which is called twice in every forward pass: within ``without_replay``, and then as ever."""

    def __init__(self, router: Any, without_replay: WithoutReplay) -> None:
        self.router, self._routing, self._without_replay = router, router.routing, without_replay
        self.pairs: list[Tensor] = []
        """[2, n, k] expert ids of every pass: its own choice, what it used."""
        router.routing = self.routing

    @property
    def shape(self) -> MoeShape:
        """That of the model, without its layers."""
        config = self.router.config
        return MoeShape(config.num_layers, (), config.moe_router_topk, config.num_moe_experts)

    def routing(self, *args: Any, **kwargs: Any) -> Any:
        # its own choice first: a replay keeps the order of the experts of the last call
        with torch.no_grad(), self._without_replay():
            own = self._routing(*args, **kwargs)[1]
        result = self._routing(*args, **kwargs)
        maps = torch.stack([own, result[1]]).byte()
        self.pairs.append(maps.topk(self.shape.top_k, dim=-1).indices.to(self.shape.dtype))
        return result


class ModelWatch:
    """All routers of the model chunks of this process, from the moment that it is made until `end`."""

    def __init__(self, model: Sequence[torch.nn.Module], without_replay: WithoutReplay) -> None:
        from megatron_rc.moe.routers import routers_of  # imports megatron-core

        routers = {layer: router for chunk in model for layer, router in routers_of(chunk).items()}
        self._watches = {layer: RouterWatch(routers[layer], without_replay) for layer in sorted(routers)}
        self._device = next(model[0].parameters()).device

    def end(self) -> None:
        """Leave the routers as they were."""
        for watch in self._watches.values():
            vars(watch.router).pop("routing", None)

    def joined(self, tensor: Group, pipeline: Group) -> tuple[MoeShape, Iterator[Tensor]] | None:
        """The model's shape, and [2, rows, L, k] of every pass, with the layers of all pipeline stages; a collective.

        None where no stage has routers. With sequence parallelism a pass has the rows of all ranks of the group
        ``tensor``. Iterating runs collectives, too: every process takes all tables.
        """
        watches = [*self._watches.values()]
        group = tensor if any(watch.router.config.sequence_parallel for watch in watches) else None
        here: Any = (None, [])
        if watches:
            parts = 1 if group is None else dist.get_world_size(group)
            shape = replace(watches[0].shape, layers=tuple(self._watches))
            here = (shape, [pair.shape[1] * parts for pair in watches[0].pairs])
        stages = gathered_objects(here, pipeline)
        held = [shape.layers if shape else () for shape, _ in stages]
        shape, sizes = next((stage for stage in stages if stage[0]), here)
        if shape is None:
            return None
        layers = [layer for layers in held for layer in layers]
        ascending = torch.tensor(layers, device=self._device).argsort()

        def table(number: int, rows: int) -> Tensor:
            pairs = [watch.pairs[number] for watch in watches]
            if group is not None:
                pairs = [torch.cat([*gather_bytes(pair, group)], 1) for pair in pairs]
            mine = torch.stack(pairs, 2).flatten(0, 1) if pairs else None
            empty = torch.empty(2 * rows, 0, shape.top_k, dtype=shape.dtype, device=self._device)
            return join_layers(mine, held, empty, pipeline).index_select(1, ascending).unflatten(0, (2, rows))

        return replace(shape, layers=tuple(sorted(layers))), (table(*each) for each in enumerate(sizes))
