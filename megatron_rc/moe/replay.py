"""RoutedSchedule: the routes of one Megatron forward-backward schedule, recorded or replayed."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from torch import Tensor

from megatron_rc.moe.compare import check_routes
from megatron_rc.moe.routers import RouterTap, Seen
from megatron_rc.moe.tables import MoeShape, RouteTable


class RoutedSchedule:
    """A context around one run of a Megatron schedule, forward only or forward and backward.

    Every forward pass of a chunk runs inside `forward`. Replayed experts go to megatron-core's RouterReplay, which
    replaces only the choice: gates are the live scores of the replayed experts, so the gradient reaches these experts
    and no others. After its forward pass, a micro-batch leaves its routes in a queue for recomputation, first in, first
    out: every Megatron schedule, interleaved ones too, runs the backward passes of one chunk in that order. At the end
    the queues are checked and cleared.
    """

    def __init__(
        self, chunks: Sequence[Mapping[int, TopKRouter]], shape: MoeShape, *, forward_only: bool, detail: bool = False
    ) -> None:
        """
        Args:
            chunks: the routers of every model chunk of this process, from `routers_of`; ``shape`` is the whole model's.
            detail: also record log-probs and margins.
        """
        self.shape, self.forward_only = shape, forward_only
        self._columns = {layer: column for column, layer in enumerate(shape.layers)}
        self._taps = [
            [RouterTap(router, layer, detail=detail, dtype=shape.dtype) for layer, router in routers.items()]
            for routers in chunks
        ]
        self._passes = [0] * len(chunks)
        self._replays: bool | None = None

    def __enter__(self) -> "RoutedSchedule":
        for tap in self._all_taps():
            tap.attach()
        return self

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        try:
            if error is None:
                self._prove_consumed()
        finally:
            for tap in self._all_taps():
                tap.detach()

    @contextmanager
    def forward(self, chunk: int, *, target: Tensor | None = None, reference: Tensor | None = None) -> Iterator[None]:
        """A context around the forward pass of one micro-batch through one chunk.

        Args:
            chunk: its place in ``chunks``.
            target: [n, L, k] experts to use in the layers of ``shape.layers``, for the n rows that the routers of this
                process see; None: the routers choose.
            reference: [n, L, k] experts whose log-probs are recorded too.

        Raises:
            ValueError: a table of the wrong dtype or shape, or targets for some micro-batches only.
        """
        expected = (len(self.shape.layers), self.shape.top_k)
        for name, table in (("target", target), ("reference", reference)):
            if table is None:
                continue
            check_routes(name, table)
            held = tuple(table.shape[1:])
            if held != expected:
                raise ValueError(f"{name} must hold {expected[0]} layers of {expected[1]} experts, got {held}")
        if self._replays is None:
            self._replays = target is not None
        if self._replays != (target is not None):
            raise ValueError("target must be given for every micro-batch of a schedule or for none")
        action = RouterReplayAction.REPLAY_FORWARD if self._replays else RouterReplayAction.RECORD
        for tap in self._taps[chunk]:
            column = self._columns[tap.layer]
            tap.reference = None if reference is None else reference[:, column].long()
            tap.set_router_replay_action(action)
            if target is not None:
                tap.set_target_indices(target[:, column].long())
        try:
            yield
        finally:
            self._passes[chunk] += 1
            for tap in self._taps[chunk]:
                # any pass before the next forward pass is recomputation
                if self._replays:
                    tap.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
                else:
                    tap.clear_router_replay_action()

    def recorded(self) -> dict[int, list[Seen]]:
        """Layer -> the passes of its router, one per micro-batch, in the order of the forward passes."""
        return {tap.layer: tap.seen for taps in self._taps for tap in taps}

    def table(self) -> RouteTable:
        """The recorded rows of all micro-batches, one after the other, for the layers of this process."""
        return join_layers(dict(sorted(self.recorded().items())), self.shape)

    def _all_taps(self) -> list[RouterTap]:
        return [tap for taps in self._taps for tap in taps]

    def _prove_consumed(self) -> None:
        for passes, taps in zip(self._passes, self._taps, strict=True):
            for tap in taps:
                ran, left, where = len(tap.seen), len(tap.replay_backward_list), f"layer {tap.layer}"
                if ran != passes:
                    raise ValueError(f"{where}: its router ran {ran} times in {passes} forward passes")
                if left not in self._allowed_left(tap, passes):
                    raise ValueError(f"{where}: {left} of {passes} replayed micro-batches were not recomputed")

    def _allowed_left(self, tap: RouterTap, passes: int) -> tuple[int, ...]:
        """Numbers of entries that may be left in the queue for recomputation after the last backward pass."""
        if not self._replays or self.forward_only:
            return (passes if self._replays else 0,)
        config = tap.router.config
        if config.recompute_granularity == "full":
            # method "block" recomputes only the first layers of a stage
            return (0,) if config.recompute_method == "uniform" else (0, passes)
        recomputed = config.recompute_granularity == "selective" and "moe" in (config.recompute_modules or ())
        return (0 if recomputed else passes,)


def join_layers(seen: Mapping[int, Sequence[Seen]], shape: MoeShape) -> RouteTable:
    """The passes of several routers as one table [N, layers, k], the layers in the order of ``seen``."""

    def joined(field: str) -> Tensor | None:
        columns = [[getattr(one, field) for one in passes] for passes in seen.values()]
        if any(part is None for column in columns for part in column):
            return None
        return torch.stack([torch.cat(column) for column in columns], 1)

    assert seen, "a process without routers has no table"
    here = MoeShape(shape.num_layers, tuple(seen), shape.top_k, shape.num_experts, shape.normalized)
    ids = joined("ids")
    assert ids is not None
    return RouteTable(here, ids, joined("logprobs"), joined("margins"), joined("reference_logprobs"))
