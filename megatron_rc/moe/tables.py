"""RouteTable: the experts that one engine chose for N tokens, with the log-probs of its routers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.engine import Sample
from megatron_rc.moe.compare import check_routes


@dataclass(frozen=True)
class MoeShape:
    """Layers and experts of a model with experts."""

    num_layers: int
    """All layers, including dense ones."""
    layers: tuple[int, ...]
    """The layers with experts, counted from 0."""
    top_k: int
    num_experts: int
    normalized: bool = True
    """Whether gates are renormalised over the selected experts."""

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
    """[N, L] fp32: smallest score of a selected expert minus the largest of the others; nats for a softmax router."""
    reference_logprobs: Tensor | None = None
    """[N, L, k] fp32, nats: log-probabilities by this table's router of the experts that another table chose."""

    def __getitem__(self, rows: slice) -> "RouteTable":
        """These rows."""
        optional = (self.logprobs, self.margins, self.reference_logprobs)
        return RouteTable(self.shape, self.ids[rows], *(None if part is None else part[rows] for part in optional))


def distinct_experts(rows: Tensor, shape: MoeShape) -> Tensor:
    """Ids [n, L, k] for rows without routes: distinct within a row, and spread evenly over the experts.

    Megatron's routing map holds each expert once, so a row that named one twice would lose a part of its gates.
    ``rows`` [n] int64 are any numbers; neighbours get neighbouring experts.
    """
    first = rows * shape.top_k
    ids = (first[:, None] + torch.arange(shape.top_k, device=rows.device)) % shape.num_experts
    return ids.to(shape.dtype)[:, None].expand(-1, len(shape.layers), -1)


def sampler_table(routes: Tensor, cu_seqlens: Tensor, shape: MoeShape) -> RouteTable:
    """The sampler's routes, in the layers with experts.

    The last token of a sequence, which the sampler never computes and nothing depends on, gets distinct experts.

    Args:
        routes: [N, layers of the model, k], as in TokenBatch.routes.
        cu_seqlens: [S + 1] int32, whole sequences.

    Raises:
        ValueError: not integers, or another number of layers or of experts per token than the model has.
    """
    check_routes("routes", routes)
    if routes.shape[1] != shape.num_layers:
        raise ValueError(f"routes must hold the model's {shape.num_layers} layers, got {routes.shape[1]}")
    if routes.shape[2] != shape.top_k:
        raise ValueError(f"routes must hold {shape.top_k} experts per layer, got {routes.shape[2]}")
    layers = torch.tensor(shape.layers, device=routes.device)
    ids = routes[:, layers].to(shape.dtype)
    padding = distinct_experts(torch.arange(len(ids), device=ids.device), shape)
    return RouteTable(shape, torch.where(last_rows(cu_seqlens, len(ids))[:, None, None], padding, ids))


def last_rows(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """[N] bool: True on the last row of a sequence."""
    edges = torch.zeros(tokens + 1, dtype=torch.bool, device=cu_seqlens.device)
    return edges.index_fill(0, cu_seqlens.long(), True)[1:]


def check_replayable(routes: Tensor, lengths: Sequence[int], shape: MoeShape) -> None:
    """Raises ValueError for an expert that does not exist, or that is named twice for one token and layer.

    It reads every id, so call it while they are on the host.

    Args:
        routes: [N, layers of the model, k], packed.
        lengths: tokens of each sequence; its last row is not checked.
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
    """Raises ValueError for a sample with routes that the server put back into its queue and computed again."""
    for index, sample in enumerate(samples):
        if sample.routes is not None and sample.retractions:
            why = "its routes were overwritten when it was computed again and are not those of its tokens"
            raise ValueError(f"sample {index} was retracted {sample.retractions} times: {why}")
