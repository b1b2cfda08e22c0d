"""Routers of a host's model that replay the sampler's experts, over the samples of `cases.whole`."""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hosts.slime.cases import whole
from hosts.slime.host import positions
from torch import Tensor

LAYERS, TOP_K, EXPERTS = (1, 2, 5), 2, 6
MICRO_BATCHES = [[2, 0], [3, 1]]
TopK = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def module_of(name: str, path: Path) -> Any:
    spec = spec_from_file_location(name, path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def chosen(seed: int) -> list[Tensor]:
    """[total, L, k] experts per sample; the engines of two seeds agree on about half of the decisions."""
    random, common = np.random.RandomState(seed), np.random.RandomState(0)
    samples = []
    for total in whole().totals:
        shape = (total, len(LAYERS), EXPERTS)
        own, shared = (torch.from_numpy(stream.rand(*shape)) for stream in (random, common))
        agrees = torch.from_numpy(random.rand(*shape[:2], 1)) < 0.7
        samples.append(torch.where(agrees, shared, own).topk(TOP_K).indices)
    return samples


OWN, REPLAYED = 1, 2
"""Seeds of the experts that the trainer would choose, and of those that the sampler chose."""


class Router(torch.nn.Module):
    """What our hook needs of megatron-core's TopKRouter, whose top-k the host replaces."""

    def __init__(self, top_k: TopK, sequence_parallel: bool) -> None:
        super().__init__()
        self.top_k, self.routing_type = top_k, "aux_loss"
        sizes = {"num_layers": 7, "moe_router_topk": TOP_K, "num_moe_experts": EXPERTS}
        self.config = Namespace(moe_router_fusion=False, sequence_parallel=sequence_parallel, **sizes)

    def routing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        probs, ids = self.top_k(logits, TOP_K)
        return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids.long(), True)


class Model(torch.nn.Module):
    """One pipeline stage with routers in some layers."""

    def __init__(self, layers: tuple[int, ...], replays: dict[int, TopK], sequence_parallel: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList()
        for number in (0, *layers):
            layer = torch.nn.Module()
            layer.mlp, layer.layer_number = torch.nn.Module(), number + 1
            if number:
                layer.mlp.router = Router(replays[number], sequence_parallel)
            self.decoder.layers.append(layer)

    def routers(self) -> Iterator[tuple[int, Router]]:
        for layer in self.decoder.layers[1:]:
            yield layer.layer_number - 1, layer.mlp.router


class Rows:
    """The rows of every micro-batch that the routers of one process see."""

    def __init__(self, cp: tuple[int, int] = (0, 1), tp: tuple[int, int] = (0, 1)) -> None:
        self.cp, self.tp = cp, tp

    def of(self, samples: list[Tensor], micro_batch: list[int]) -> Tensor:
        parts = []
        for sample in micro_batch:
            routes = samples[sample]
            # what the padding chooses matters to nobody
            filled = torch.cat([routes, torch.arange(TOP_K).expand(4 * len(routes), len(LAYERS), TOP_K)])
            parts.append(filled[torch.tensor(positions(len(routes), *self.cp))])
        rows = torch.cat([*parts, *[torch.arange(TOP_K).expand(1, len(LAYERS), TOP_K)] * 3])
        rows = rows[: len(rows) // self.tp[1] * self.tp[1]]
        return rows.chunk(self.tp[1])[self.tp[0]]

    def forward(self, model: Model) -> None:
        """The pass of the host over every micro-batch."""
        own = chosen(OWN)
        for micro_batch in MICRO_BATCHES:
            rows = self.of(own, micro_batch)
            for layer, router in model.routers():
                ids = rows[:, LAYERS.index(layer)]
                _, routing_map = router.routing(torch.zeros(len(ids), EXPERTS).scatter(1, ids, 1.0))
                used = self.of(chosen(REPLAYED), micro_batch)[:, LAYERS.index(layer)]
                expected = torch.zeros_like(routing_map).scatter(1, used, True)
                assert torch.equal(routing_map, expected), "the pass must use the sampler's experts"

    def replays(self) -> dict[int, list[Tensor]]:
        """Layer -> the sampler's experts of every micro-batch."""
        samples = chosen(REPLAYED)
        used = [self.of(samples, batch) for batch in MICRO_BATCHES]
        return {layer: [rows[:, column] for rows in used] for column, layer in enumerate(LAYERS)}


def _plain(scores: Tensor, topk: int, num_groups: Any = None, group_topk: Any = None) -> tuple[Tensor, Tensor]:
    found = scores.topk(topk, dim=1)
    return found.values, found.indices


def by_environment(replayed: list[Tensor]) -> TopK:
    """A top-k that replays as slime's does, by a variable of the environment."""
    queue = iter(replayed)

    def top_k(scores: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        if os.environ["ROUTING_REPLAY_STAGE"] == "fallthrough":
            return _plain(scores, topk)
        ids = next(queue)
        return scores.gather(1, ids), ids

    return top_k


@contextmanager
def of_the_host(host: str, folder: Path) -> Iterator[Callable[[list[Tensor]], TopK]]:
    """The same with the replay of the host's own source, as its patch of Megatron calls it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        if host == "slime":
            utils: Any = ModuleType("slime.utils")
            utils.accelerator = torch.cuda
            patch.setitem(sys.modules, "slime", ModuleType("slime"))
            patch.setitem(sys.modules, "slime.utils", utils)
            slime = module_of("slime_routing_replay", folder / "slime/utils/routing_replay.py")
            make, choose = slime.RoutingReplay, slime.set_routing_replay
            own = slime.get_routing_replay_compute_topk(_plain)
        else:
            miles = module_of("miles.utils.replay_base", folder / "miles/utils/replay_base.py")
            patch.setitem(sys.modules, "miles.utils.replay_base", miles)
            manager = miles.routing_replay_manager
            manager.enabled, manager.stage = True, "replay_forward"
            make, choose = manager.create_replay, manager.set_current
            own = manager.get_topk_fn(_plain, return_probs=True)

        def replaying(replayed: list[Tensor]) -> TopK:
            replay = make()
            replay.top_indices_list = [ids.int() for ids in replayed]

            def top_k(scores: Tensor, topk: int) -> tuple[Tensor, Tensor]:
                choose(replay)
                return own(scores, topk)

            return top_k

        yield replaying
