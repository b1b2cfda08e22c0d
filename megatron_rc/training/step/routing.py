"""Routes of the trained policy, gathered over the ranks of a job: recorded, compared with the sampler's, replayed."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.batch import TokenBatch
from megatron_rc.collectives import gathered_objects
from megatron_rc.correction.metrics import MetricSums
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.engine import ENGINES, Sample
from megatron_rc.models.config import moe_layers
from megatron_rc.moe.compare import compare_routes
from megatron_rc.moe.gathering import gather_bytes, join_layers
from megatron_rc.moe.replay import RoutedSchedule
from megatron_rc.moe.routers import routers_of
from megatron_rc.moe.shift import ExpertShift, expert_shift
from megatron_rc.moe.slicing import join_rows, local_rows, take_rows
from megatron_rc.moe.tables import MoeShape, RouteTable, check_replayable, check_samples, last_rows, sampler_table
from megatron_rc.settings.model import MoeSettings
from megatron_rc.training import emulation
from megatron_rc.training.microbatches import MicroBatch, MicroExtras
from megatron_rc.training.policy import AroundForward, Policy


def moe_shape(hf: dict[str, Any]) -> MoeShape:
    """Raises ValueError for a model without experts."""
    layers = tuple(i for i, has_experts in enumerate(moe_layers(hf)) if has_experts)
    if not layers:
        raise ValueError("moe.record and moe.replay need a model with experts, this one has none")
    return MoeShape(
        hf["num_hidden_layers"], layers, hf["num_experts_per_tok"], hf["num_experts"], bool(hf["norm_topk_prob"])
    )


class Routing:
    """The routers of this process, and the places of those of the other processes; kept from step to step."""

    def __init__(self, settings: MoeSettings, correction: RolloutCorrection, policy: Policy) -> None:
        """Collect the layers of all pipeline stages; every process has to call it.

        Raises:
            ValueError: the model has no experts, or routers that cannot be recorded.
        """
        self.settings, self.groups, self.backend = settings, policy.groups, policy.train.backend
        self.needs_routes = settings.replay == "R3" or correction.judges("route_shift")
        self.shape = moe_shape(policy.hf_config)
        self.chunks = [routers_of(module) for module in policy.modules]
        mine, groups = [layer for routers in self.chunks for layer in routers], self.groups
        self.stages = gathered_objects(mine, groups.pipeline)
        """Layers with experts per pipeline stage, in the order of their records."""
        recorded = [layer for layers in self.stages for layer in layers]
        assert recorded == list(self.shape.layers), "a stage holds consecutive layers: it has one chunk"
        split = any(r.config.sequence_parallel for routers in self.chunks for r in routers.values())
        self.tensor_size = dist.get_world_size(groups.tensor) if split else 1
        self.tensor_rank = dist.get_rank(groups.tensor) if split else 0

    def check(self, samples: Sequence[Sample], batch: TokenBatch) -> None:
        """Raises ValueError when routes of ``samples``, whose batch is on the host, are missing, damaged or foreign."""
        check_samples(samples)
        if batch.routes is not None:
            sampler_table(batch.routes[:0], batch.cu_seqlens[:1], self.shape)
            if self.settings.replay == "R3":
                check_replayable(batch.routes, batch.lengths, self.shape)
        elif self.needs_routes:
            needs = "moe.replay='R3' and a rejection on 'route_shift' need the routes of every sample"
            able = (f"{name} {kind.returns_routes}" for name, kind in ENGINES.items() if kind.returns_routes)
            raise ValueError(f"{needs}, and the sampler returned none; of the engines, {', '.join(able)}")

    def start(self, local: TokenBatch) -> "StepRoutes":
        """Begin a rollout batch: the object that compares or replays the routes of ``local``, this rank's sequences."""
        routes = local.routes
        return StepRoutes(self, None if routes is None else sampler_table(routes, local.cu_seqlens, self.shape))

    def rows(self, tokens: int, rank: int) -> Tensor:
        """Rows of a micro-batch of ``tokens`` rows that the routers of a tensor-parallel rank see."""
        return local_rows((tokens,), tensor_size=self.tensor_size, tensor_rank=rank)

    def local(self, ids: Tensor | None) -> Tensor | None:
        """[n, L, k]: the routes of one micro-batch, of the rows that this process's routers see."""
        if ids is None or self.tensor_size == 1:
            return ids
        return take_rows(ids, self.rows(len(ids), self.tensor_rank), self.shape)

    def gathered(self, schedule: RoutedSchedule, sizes: Sequence[int], names: Sequence[str]) -> RouteTable:
        """The fields ``names`` of micro-batches of ``sizes`` tokens and all layers, on every process; a collective."""
        here = schedule.table() if any(self.chunks) else None
        parts = {}
        for name in names:
            mine = None if here is None else getattr(here, name)
            if mine is not None and self.tensor_size > 1:
                mine = self._all_rows(mine, sizes)
            tail = () if name == "margins" else (self.shape.top_k,)
            dtype = self.shape.dtype if name == "ids" else torch.float32
            rows = torch.empty(sum(sizes), 0, *tail, dtype=dtype, device=emulation.device())
            parts[name] = join_layers(mine, self.stages, rows, self.groups.pipeline)
        return RouteTable(self.shape, **parts)

    def _all_rows(self, mine: Tensor, sizes: Sequence[int]) -> Tensor:
        everyone = gather_bytes(mine, self.groups.tensor)
        shares = [-(-size // self.tensor_size) for size in sizes]
        micro_batches = zip(sizes, *(part.split(shares) for part in everyone), strict=True)
        rows = {size: [self.rows(size, rank) for rank in range(self.tensor_size)] for size in sizes}
        return torch.cat([join_rows(parts, rows[size], size) for size, *parts in micro_batches])


@dataclass
class StepRoutes:
    """The routes of one rollout batch on its way through the old pass and the update passes."""

    routing: Routing
    sampler: RouteTable | None
    """Routes of the local rows; None if the sampler returned none."""
    old: RouteTable | None = None
    """Routes that the trainer chose before the update, for the local rows."""
    recorded: RouteTable | None = None
    """Routes of the schedule that ran last, for the rows of its micro-batches."""

    def extras(self, rows: slice = slice(None)) -> MicroExtras:
        """The routes that a pass over these local rows replays, and those that it compares its own with."""
        settings = self.routing.settings
        replayed = {"none": None, "R2": self.old, "R3": self.sampler}[settings.replay]
        compared = (self.old or self.sampler) if settings.record else None
        return MicroExtras(
            replayed_routes=None if replayed is None else replayed.ids[rows],
            compared_routes=None if compared is None else compared.ids[rows],
        )

    @contextmanager
    def around(self, micro_batches: Sequence[MicroBatch], forward_only: bool) -> Iterator[AroundForward]:
        """Record one schedule, and replay the routes in its extras; a collective of the model's processes."""
        routing, detail = self.routing, self.routing.settings.record
        with RoutedSchedule(routing.chunks, routing.shape, forward_only=forward_only, detail=detail) as schedule:

            def forward(chunk: int, micro: MicroBatch) -> AbstractContextManager[None]:
                extras = micro.extras
                return schedule.forward(
                    chunk, target=routing.local(extras.replayed_routes), reference=routing.local(extras.compared_routes)
                )

            yield forward
        names = ["ids", *(("logprobs", "margins") if detail else ())]
        if micro_batches[0].extras.compared_routes is not None:
            names.append("reference_logprobs")
        self.recorded = routing.gathered(schedule, [micro.batch.num_tokens for micro in micro_batches], names)

    def after_old_pass(self, local: TokenBatch, old_logprobs: Tensor) -> ExpertShift | None:
        """Keep the recorded routes as the old ones, and return their shift from the sampler's if it is recorded.

        Only the last pipeline stage has ``old_logprobs`` [N], and the shift.
        """
        self.old = self.recorded
        return self._shift(self.sampler, local, old_logprobs, local.rollout_logprobs)

    def after_update(
        self, share: TokenBatch, rows: slice, logprobs: Tensor, old_logprobs: Tensor | None
    ) -> tuple[ExpertShift | None, MetricSums]:
        """The shift of the routes of an update pass from the old ones, or the sampler's where there was no old pass.

        Args:
            share: the sequences of the update, local rows ``rows``, with their current ``logprobs`` [n].

        Returns:
            (the shift, metrics of the replay: its share of all rows, and how often the routers chose other experts).
        """
        other = self.old or self.sampler
        before = share.rollout_logprobs if old_logprobs is None else old_logprobs
        shift = self._shift(None if other is None else other[rows], share, logprobs, before)
        return shift, self._replayed(share, rows)

    def _shift(
        self, other: RouteTable | None, batch: TokenBatch, logprobs: Tensor, before: Tensor
    ) -> ExpertShift | None:
        routing, recorded = self.routing, self.recorded
        if other is None or not routing.settings.record or not routing.groups.last_stage:
            return None
        assert recorded is not None
        ratio, positions, backend = logprobs - before, batch.positions, routing.backend
        return expert_shift(recorded, other, batch.loss_mask, log_ratio=ratio, positions=positions, backend=backend)

    def _replayed(self, share: TokenBatch, rows: slice) -> MetricSums:
        target, routing = self.extras(rows).replayed_routes, self.routing
        if target is None or not routing.groups.last_stage:
            return MetricSums()
        assert self.recorded is not None
        live = compare_routes(self.recorded.ids, target, share.loss_mask, backend=routing.backend)
        decisions = live.counted_tokens * len(routing.shape.layers)
        real = torch.ones_like(share.loss_mask)
        if routing.settings.replay == "R3":
            real = ~last_rows(share.cu_seqlens, share.num_tokens)
        replayed = (real.sum(), real.new_tensor(len(real), dtype=torch.int64))
        disagreement = (live.differing_tokens.sum(), decisions)
        return MetricSums.of_means({"replay/share": replayed, "replay/disagreement": disagreement})
