"""RouteTable: the experts that one engine chose for N tokens, with what its routers thought of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.engine import Sample
from megatron_rc.moe.compare import check_routes


@dataclass(frozen=True)
class MoeShape:
    """Of a model with experts."""

    num_layers: int
    """Layers of the model, dense ones among them."""
    layers: tuple[int, ...]
    """The layers with experts, counted from 0."""
    top_k: int
    num_experts: int
    normalized: bool = True
    """Gates are renormalised over the chosen experts."""

    @property
    def dtype(self) -> torch.dtype:
        """The smallest integer type that holds every expert id and that `compare_routes` takes."""
        return torch.int16 if self.num_experts <= torch.iinfo(torch.int16).max else torch.int32


@dataclass(frozen=True)
class RouteTable:
    """Routes of N tokens in the L layers of ``shape.layers``, in their order."""

    shape: MoeShape
    ids: Tensor
    """[N, L, k] expert ids."""
    logprobs: Tensor | None = None
    """[N, L, k] fp32, nats: log-probabilities of the router, over all experts, of ``ids``."""
    margins: Tensor | None = None
    """[N, L] fp32: least score of the chosen experts minus the greatest of the others; nats for a softmax router."""
    reference_logprobs: Tensor | None = None
    """[N, L, k] fp32, nats: log-probabilities by this table's router of the experts that another table chose."""

    def __getitem__(self, rows: slice) -> RouteTable:
        """These rows."""
        optional = (self.logprobs, self.margins, self.reference_logprobs)
        return RouteTable(self.shape, self.ids[rows], *(None if part is None else part[rows] for part in optional))


def distinct_experts(rows: Tensor, shape: MoeShape) -> Tensor:
    """[n, L, k] ids for rows that nobody routed: distinct in a row, and spread evenly over the experts.

    Megatron's routing map holds an expert once: a row that names one twice would lose a part of its gates.

    Args:
        rows: [n] int64, any numbers; neighbours get neighbouring experts.
    """
    first = rows * shape.top_k
    ids = (first[:, None] + torch.arange(shape.top_k, device=rows.device)) % shape.num_experts
    return ids.to(shape.dtype)[:, None].expand(-1, len(shape.layers), -1)


def sampler_table(routes: Tensor, cu_seqlens: Tensor, shape: MoeShape) -> RouteTable:
    """The sampler's routes, in the layers with experts.

    The last token of a sequence has none: the sampler never computed it, and nothing depends on it. It gets distinct
    experts.

    Args:
        routes: [N, layers of the model, k], as in TokenBatch.routes.
        cu_seqlens: [S + 1] int32, whole sequences.

    Raises:
        ValueError: not integers, or another number of layers or experts a token than the model has.
    """
    check_routes("routes", routes)
    if routes.shape[1] != shape.num_layers:
        raise ValueError(f"routes must hold the model's {shape.num_layers} layers, got {routes.shape[1]}")
    if routes.shape[2] != shape.top_k:
        raise ValueError(f"routes must hold {shape.top_k} experts a layer, got {routes.shape[2]}")
    layers = torch.tensor(shape.layers, device=routes.device)
    ids = routes[:, layers].to(shape.dtype)
    padding = distinct_experts(torch.arange(len(ids), device=ids.device), shape)
    return RouteTable(shape, torch.where(last_rows(cu_seqlens, len(ids))[:, None, None], padding, ids))


def last_rows(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """[N] bool: the last row of a sequence."""
    edges = torch.zeros(tokens + 1, dtype=torch.bool, device=cu_seqlens.device)
    return edges.index_fill(0, cu_seqlens.long(), True)[1:]


def check_replayable(routes: Tensor, lengths: Sequence[int], shape: MoeShape) -> None:
    """Refuse routes that a router could not follow; reads every id, so call it where they are on the host.

    Args:
        routes: [N, layers of the model, k], packed.
        lengths: tokens of each sequence; the last row of each is not looked at.

    Raises:
        ValueError: an expert that does not exist, or one that is named twice for one token and layer.
    """
    known = ~last_rows(torch.tensor([0, *lengths]).cumsum(0), len(routes))
    for layer in shape.layers:
        ids = routes[known, layer]
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= shape.num_experts):
            raise ValueError(f"routes of layer {layer} name an expert outside of {shape.num_experts}")
        ordered = ids.sort(-1).values
        if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
            raise ValueError(f"routes of layer {layer} name an expert twice for one token")


def check_samples(samples: Sequence[Sample]) -> None:
    """Refuse samples whose routes may not be those of their tokens.

    Raises:
        ValueError: a sample with routes that the server put back in its queue: it computed the routes anew, later.
    """
    for index, sample in enumerate(samples):
        if sample.routes is not None and sample.retractions:
            raise ValueError(
                f"sample {index} was retracted {sample.retractions} times: its routes were overwritten when it was "
                "computed anew and are not those of its tokens"
            )
