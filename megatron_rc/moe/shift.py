"""Expert shift: the distance of the routes of two engines, as pooled sums, and its effect on log-ratios.

S and S' are the experts that two engines chose for a token in a layer (a decision), k is their number. A decision
differs if S != S'; a token is shifted if one of its decisions differs. Only loss tokens count.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rc.correction.metrics import MetricSums
from megatron_rc.moe.compare import compare_routes
from megatron_rc.moe.reference import chunks, common_experts
from megatron_rc.moe.router_distance import gate_distance, router_kl
from megatron_rc.moe.shift_metrics import MARGINS, POSITIONS, expert_shift_metrics
from megatron_rc.moe.tables import RouteTable


class ExpertShift(NamedTuple):
    sums: MetricSums
    """Its metrics are those of shift_metrics."""
    route_shift: Tensor
    """[N] fp32, for every token, counted or not: share of the layers with experts whose decision differs."""


def expert_shift(
    trainer: RouteTable,
    other: RouteTable,
    loss_mask: Tensor,
    *,
    log_ratio: Tensor | None = None,
    positions: Tensor | None = None,
    log_ratio_bound: float = 20.0,
    backend: str = "auto",
) -> ExpertShift:
    """The expert shift of the tokens of this rank.

    Args:
        trainer: routes [N, L, k] that the trainer's routers chose, with margins for the metrics of the margin; with
            log-probs, and those of the experts of ``other``, for gate_l1; for kl also log-probs in ``other``.
        other: routes of the sampler, or of an earlier pass, for the same rows.
        loss_mask: [N] bool.
        log_ratio: [N] fp32, nats; a token with NaN or +inf does not count anywhere. None: metrics of it are absent.
        positions: [N] int64, position in the response.
        log_ratio_bound: clamp of log-ratios, nats.
        backend: as in `compare_routes`.

    Raises:
        ValueError: tables of different shapes.

    Source: overlap, differing layers and F(2), arXiv 2510.11370.
    """
    mask = loss_mask.bool()
    if log_ratio is not None:
        mask = mask & (log_ratio < torch.inf)
    compared = compare_routes(trainer.ids, other.ids, mask, backend=backend)
    layers, counts = len(trainer.shape.layers), mask.double()
    touched = mask & (compared.differing_layers > 0)
    first = torch.zeros(layers + 1, dtype=torch.int64, device=mask.device)
    first.index_add_(0, compared.first_differing_layer.long(), mask.long())
    sums = {
        "tokens": compared.counted_tokens.double(),
        "overlap": compared.overlap.double() / trainer.shape.top_k,
        "any_diff": compared.differing_tokens.double(),
        "touched": touched.sum().double(),
        "first": first[:layers].double(),
        "load": _load(trainer, mask),
        "load_other": _load(other, mask),
    }
    columns = {"tokens": counts, "touched": touched.double()}
    if log_ratio is not None:
        far = torch.where(mask, log_ratio, 0).abs().clamp(max=log_ratio_bound).double()
        beyond = (far > math.log(2)).double()
        columns |= {"abs": far, "abs_touched": far * touched}
        sums |= {"abs": far.sum(), "abs_touched": columns["abs_touched"].sum()}
        sums |= {"beyond_2": beyond.sum(), "beyond_2_touched": (beyond * touched).sum()}
    if positions is not None:
        # a matrix product adds in a fixed order, unlike an indexed sum on a GPU
        buckets = torch.frexp(positions.float()).exponent.clamp(0, POSITIONS - 1)
        table = _one_hot(buckets, POSITIONS).T @ torch.stack([*columns.values()], 1)
        sums |= {f"position_{name}": column for name, column in zip(columns, table.unbind(1), strict=True)}
    sums |= _details(trainer, other, counts, columns.get("abs"))
    named = {f"route:{name}": value for name, value in sums.items()}
    pooled = MetricSums.of_sums(named, expert_shift_metrics(trainer.shape.layers))
    return ExpertShift(pooled, compared.differing_layers.float() / layers)


def _details(trainer: RouteTable, other: RouteTable, counts: Tensor, far: Tensor | None) -> dict[str, Tensor]:
    """Sums over tokens of what is computed decision by decision."""
    k, sums = trainer.shape.top_k, dict[str, Tensor]()
    for span in chunks(trainer.ids):
        mine, theirs, counted = trainer[span], other[span], counts[span]
        common = common_experts(mine.ids, theirs.ids)[0].T.contiguous()
        differs = (common != k).double()
        part = {"jaccard": counted @ (common.double() / (2 * k - common))}
        if far is not None:
            part["abs_any_diff"] = far[span] @ differs
        if mine.reference_logprobs is not None:
            part["gate_l1"] = counted @ gate_distance(mine, theirs)
            if theirs.logprobs is not None:
                part["kl"] = counted @ router_kl(theirs.logprobs, mine.reference_logprobs)
        if mine.margins is not None:
            buckets = torch.bucketize(mine.margins, torch.tensor(MARGINS, device=differs.device), right=True)
            inside = _one_hot(buckets, len(MARGINS) + 1) * counted[:, None, None]
            part |= {"margin": counted @ mine.margins.double(), "margin_decisions": inside.sum((0, 1))}
            part["margin_any_diff"] = (inside * differs[..., None]).sum((0, 1))
        sums = {name: sums[name] + value if sums else value for name, value in part.items()}
    return sums


def _one_hot(buckets: Tensor, count: int) -> Tensor:
    return (buckets[..., None] == torch.arange(count, device=buckets.device)).double()


def _load(table: RouteTable, mask: Tensor) -> Tensor:
    """[L, E] number of tokens that each expert received."""
    experts, layers = table.shape.num_experts, len(table.shape.layers)
    counts = torch.zeros(layers * experts + 1, dtype=torch.int64, device=mask.device)
    for span in chunks(table.ids):
        ids = table.ids[span].long()
        place = torch.arange(layers, device=ids.device)[:, None] * experts + ids
        place = torch.where(mask[span, None, None] & (ids >= 0), place, layers * experts)
        counts.index_add_(0, place.flatten(), torch.ones_like(place).flatten())
    return counts[:-1].view(layers, experts).double()
