"""Expert shift: how far the routes of two engines are apart, as pooled sums, and what it does to the log-ratio.

S, S' are the experts that two engines chose for a token in a layer (a decision), k their number. A decision differs
when S != S'; a token is shifted when one of its decisions differs. Only loss tokens count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.collectives import all_reduced
from megatron_rc.moe.compare import chunks, compare_routes, overlap
from megatron_rc.moe.router_distance import gate_distance, router_kl
from megatron_rc.moe.tables import RouteTable

MARGINS = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0)
"""Upper edges of the buckets of the top-k margin, exclusive; one more bucket lies above."""
POSITIONS = 20
"""Buckets of the position in the response: 0, 1, 2-3, 4-7, ... and one that holds the rest."""

EXPERT_SHIFT: dict[str, str] = {
    "route_overlap": "mean |S & S'| / k over decisions",
    "route_jaccard": "mean |S & S'| / |S + S'| over decisions",
    "route_any_diff": "share of decisions with S != S'",
    "route_layers_differing": "mean over tokens of the layers with S != S'",
    "route_tokens_touched": "share of tokens with S != S' in some layer",
    "route_first_layer": "mean over shifted tokens of the first layer with S != S', counted from 0",
    "route_gate_l1": "mean sum_e |g(e) - g'(e)| of the gate weights, 0 outside of S and S'",
    "route_kl": "mean KL(p'||p) of the routers' softmax, over the experts of S' and one cell for all others",
    "route_margin": "mean s_(k) - s_(k+1) of the trainer's router scores, nats for a softmax router",
    "route_load_change": "mean over layers of sum_e |load(e) - load'(e)| / 2, load: share of the layer's assignments",
    "abs_log_ratio_shifted": "mean |l| of shifted tokens",
    "abs_log_ratio_unshifted": "mean |l| of the other tokens",
    "f2_shifted": "share of shifted tokens with max(rho, 1 / rho) > 2",
    "f2_unshifted": "share of the other tokens with max(rho, 1 / rho) > 2",
}
"""Metrics that are one number; l = log pi - log mu clamped to +- log_ratio_bound, rho = e^l."""

EXPERT_SHIFT_LISTS: dict[str, str] = {
    "route_layers": "the layers with experts, counted from 0",
    "route_margins": "the edges of the buckets of the margin",
    "route_<overlap, jaccard, any_diff, gate_l1, kl, margin, load_change>_by_layer": "the same, of one layer",
    "route_first_layer_by_layer": "share of shifted tokens whose first differing layer it is",
    "abs_log_ratio_<shifted, unshifted>_by_layer": "mean |l| of tokens whose decision in that layer differs, or not",
    "route_load_change_by_expert": "load(e) - load'(e), a list a layer",
    "route_any_diff_by_margin": "share of the decisions of one bucket of the margin that differ",
    "route_tokens_touched_by_position": "share of the tokens of one bucket of the position that are shifted",
    "abs_log_ratio_<shifted, unshifted>_by_position": "mean |l| of shifted tokens of one bucket, and of the others",
}
"""Metrics that are a list: one number a layer with experts, a bucket of MARGINS, or a bucket of the position."""


class ExpertShift(NamedTuple):
    sums: ShiftSums
    route_shift: Tensor
    """[N] fp32, share of the layers with experts whose decision differs; of every token, counted or not."""


class ShiftSums:
    """Sufficient statistics of expert shift: fp64 sums on the device. `values` is the only call that waits for it."""

    def __init__(self, layers: Sequence[int], top_k: int, sums: dict[str, Tensor]) -> None:
        self.layers, self.top_k, self.sums = tuple(layers), top_k, sums

    def merge(self, other: ShiftSums) -> ShiftSums:
        """Take in other tokens of the same pair of engines. Returns self."""
        assert self.layers == other.layers and list(self.sums) == list(other.sums), "another pair of engines"
        self.sums = {name: value + other.sums[name] for name, value in self.sums.items()}
        return self

    def all_reduce(self, group: dist.ProcessGroup | None) -> ShiftSums:
        """Pool over a process group (DP x CP) in one collective; call it once. Returns self."""
        flat = all_reduced(torch.cat([value.reshape(-1) for value in self.sums.values()]), group)
        parts = flat.split([value.numel() for value in self.sums.values()])
        named = zip(self.sums.items(), parts, strict=True)
        self.sums = {name: part.view_as(value) for (name, value), part in named}
        return self

    def values(self) -> dict[str, Any]:
        """Name -> number or list by the formulas of `EXPERT_SHIFT`; NaN where there is nothing to divide by."""
        s = {name: value.cpu() for name, value in self.sums.items()}
        tokens = s["tokens"]
        by_layer = {f"route_{n}": s[n] / tokens for n in _MEANS if n in s}
        out: dict[str, Any] = {name: float(value.sum() / len(self.layers)) for name, value in by_layer.items()}
        out["route_layers"] = list(self.layers)
        out["route_layers_differing"] = float(s["any_diff"].sum() / tokens)
        out["route_tokens_touched"] = float(s["touched"] / tokens)
        first, layers = s["first"], torch.tensor(self.layers, dtype=torch.float64)
        out["route_first_layer"] = float(first @ layers / s["touched"])
        load, other = (s[n] / s[n].sum(-1, keepdim=True) for n in ("load", "load_other"))
        change = load - other
        by_layer |= {"route_first_layer": first / s["touched"], "route_load_change": change.abs().sum(-1) / 2}
        out["route_load_change"] = float(by_layer["route_load_change"].mean())
        out["route_load_change_by_expert"] = change.tolist()
        if "margin" in s:
            out["route_margins"] = list(MARGINS)
            out["route_any_diff_by_margin"] = (s["margin_any_diff"] / s["margin_decisions"]).tolist()
        if "position_tokens" in s:
            out["route_tokens_touched_by_position"] = (s["position_touched"] / s["position_tokens"]).tolist()
        if "abs" in s:
            out |= self._log_ratios(s, by_layer)
        return out | {f"{name}_by_layer": value.tolist() for name, value in by_layer.items()}

    def _log_ratios(self, s: dict[str, Tensor], by_layer: dict[str, Tensor]) -> dict[str, Any]:
        untouched = s["tokens"] - s["touched"]
        by_layer["abs_log_ratio_shifted"] = s["abs_any_diff"] / s["any_diff"]
        by_layer["abs_log_ratio_unshifted"] = (s["abs"] - s["abs_any_diff"]) / (s["tokens"] - s["any_diff"])
        out: dict[str, Any] = {
            "abs_log_ratio_shifted": float(s["abs_touched"] / s["touched"]),
            "abs_log_ratio_unshifted": float((s["abs"] - s["abs_touched"]) / untouched),
            "f2_shifted": float(s["beyond_2_touched"] / s["touched"]),
            "f2_unshifted": float((s["beyond_2"] - s["beyond_2_touched"]) / untouched),
        }
        if "position_tokens" in s:
            shifted, every = s["position_abs_touched"], s["position_abs"]
            rest = s["position_tokens"] - s["position_touched"]
            out["abs_log_ratio_shifted_by_position"] = (shifted / s["position_touched"]).tolist()
            out["abs_log_ratio_unshifted_by_position"] = ((every - shifted) / rest).tolist()
        return out


_MEANS = ("overlap", "jaccard", "any_diff", "gate_l1", "kl", "margin")
"""Sums over tokens, one a layer, of what is averaged over decisions."""


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
        log_ratio: [N] fp32, nats; a token with a NaN or +inf does not count anywhere. None: its metrics are absent.
        positions: [N] int64, position in the response.
        log_ratio_bound: clamp of log-ratios, nats.
        backend: of `compare_routes`.

    Raises:
        ValueError: tables of different shapes.

    Source: overlap, differing layers and F(2), arXiv 2510.11370.
    """
    mask = loss_mask.bool()
    if log_ratio is not None:
        mask = mask & (log_ratio < torch.inf)
    found = compare_routes(trainer.ids, other.ids, mask, backend=backend)
    layers = len(trainer.shape.layers)
    touched = mask & (found.differing_layers > 0)
    counts = mask.double()
    first = torch.zeros(layers + 1, dtype=torch.int64, device=mask.device)
    first.index_add_(0, found.first_differing_layer.long(), mask.long())
    sums = {
        "tokens": found.counted_tokens.double(),
        "overlap": found.overlap.double() / trainer.shape.top_k,
        "any_diff": found.differing_tokens.double(),
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
        # a matrix product adds in a fixed order, an indexed sum on a GPU does not
        buckets = torch.frexp(positions.float()).exponent.clamp(0, POSITIONS - 1)
        table = _one_hot(buckets, POSITIONS).T @ torch.stack([*columns.values()], 1)
        sums |= {f"position_{name}": column for name, column in zip(columns, table.unbind(1), strict=True)}
    sums |= _details(trainer, other, counts, columns.get("abs"))
    return ExpertShift(
        ShiftSums(trainer.shape.layers, trainer.shape.top_k, sums), found.differing_layers.float() / layers
    )


def _details(trainer: RouteTable, other: RouteTable, counts: Tensor, far: Tensor | None) -> dict[str, Tensor]:
    """What has to be looked at decision by decision; summed over tokens."""
    k, sums = trainer.shape.top_k, dict[str, Tensor]()
    for span in chunks(trainer.ids):
        mine, theirs, counted = trainer[span], other[span], counts[span]
        common = overlap(mine.ids, theirs.ids)
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
    """[L, E] tokens that each expert was given."""
    experts, layers = table.shape.num_experts, len(table.shape.layers)
    counts = torch.zeros(layers * experts + 1, dtype=torch.int64, device=mask.device)
    for span in chunks(table.ids):
        ids = table.ids[span].long()
        place = torch.arange(layers, device=ids.device)[:, None] * experts + ids
        place = torch.where(mask[span, None, None] & (ids >= 0), place, layers * experts)
        counts.index_add_(0, place.flatten(), torch.ones_like(place).flatten())
    return counts[:-1].view(layers, experts).double()
