"""The metrics of expert shift: their names, formulas, and how they follow from the pooled sums."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_rc.metrics import Metric, Sums, quotient

MARGINS = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0)
"""Upper edges of the buckets of the top-k margin, exclusive; one more bucket lies above."""
POSITIONS = 20
"""Buckets of the position in the response: 0, 1, 2-3, 4-7, ... and one that holds the rest."""


@lru_cache
def expert_shift_metrics(layers: tuple[int, ...]) -> dict[str, Metric]:
    """Every metric of a model with experts in ``layers``, counted from 0."""
    return _numbers(layers) | _lists(layers)


def _numbers(layers: tuple[int, ...]) -> dict[str, Metric]:
    """Metrics that are one number; l = log pi - log mu clamped to +- log_ratio_bound, rho = e^l."""

    def mean(name: str, formula: str) -> Metric:
        return Metric(formula, lambda s: float((s[name] / s["route:tokens"]).sum() / len(layers)), needs=name)

    def first_layer(s: Sums) -> float:
        numbered = torch.tensor(layers, dtype=torch.float64)
        return float(s["route:first"] @ numbered / s["route:touched"])

    return {
        "route_overlap": mean("route:overlap", "mean |S & S'| / k over decisions"),
        "route_jaccard": mean("route:jaccard", "mean |S & S'| / |S + S'| over decisions"),
        "route_any_diff": mean("route:any_diff", "share of decisions with S != S'"),
        "route_layers_differing": Metric(
            "mean over tokens of the layers with S != S'",
            lambda s: float(s["route:any_diff"].sum() / s["route:tokens"]),
            needs="route:any_diff",
        ),
        "route_tokens_touched": _ratio(
            "share of tokens with S != S' in some layer", "route:touched", over="route:tokens"
        ),
        "route_first_layer": Metric(
            "mean over shifted tokens of the first layer with S != S', counted from 0", first_layer, needs="route:first"
        ),
        "route_gate_l1": mean("route:gate_l1", "mean sum_e |g(e) - g'(e)| of the gate weights, 0 outside of S and S'"),
        "route_kl": mean(
            "route:kl", "mean KL(p'||p) of the routers' softmax, over the experts of S' and one cell for all others"
        ),
        "route_margin": mean(
            "route:margin", "mean s_(k) - s_(k+1) of the trainer's router scores, nats for a softmax router"
        ),
        "route_load_change": Metric(
            "mean over layers of sum_e |load(e) - load'(e)| / 2, load: share of the layer's assignments",
            lambda s: float((_load_change(s).abs().sum(-1) / 2).mean()),
            needs="route:load",
        ),
        "abs_log_ratio_shifted": _ratio("mean |l| of shifted tokens", "route:abs_touched", over="route:touched"),
        "abs_log_ratio_unshifted": _ratio(
            "mean |l| of the other tokens", "route:abs", "route:abs_touched", over="route:tokens", but="route:touched"
        ),
        "f2_shifted": _ratio(
            "share of shifted tokens with max(rho, 1 / rho) > 2", "route:beyond_2_touched", over="route:touched"
        ),
        "f2_unshifted": _ratio(
            "share of the other tokens with max(rho, 1 / rho) > 2",
            "route:beyond_2",
            "route:beyond_2_touched",
            over="route:tokens",
            but="route:touched",
        ),
    }


def _lists(layers: tuple[int, ...]) -> dict[str, Metric]:
    """Metrics that are a list: one number per layer with experts, per bucket of MARGINS or of the position."""
    by_layer = {
        f"route_{name}_by_layer": _ratio(f"route_{name} of one layer", f"route:{name}", over="route:tokens")
        for name in ("overlap", "jaccard", "any_diff", "gate_l1", "kl", "margin")
    }
    return by_layer | {
        "route_layers": Metric("the layers with experts, counted from 0", lambda s: list(layers), "route:any_diff"),
        "route_margins": Metric("the edges of the buckets of the margin", lambda s: list(MARGINS), "route:margin"),
        "route_load_change_by_layer": Metric(
            "route_load_change of one layer",
            lambda s: (_load_change(s).abs().sum(-1) / 2).tolist(),
            needs="route:load",
        ),
        "route_load_change_by_expert": Metric(
            "load(e) - load'(e), one list per layer", lambda s: _load_change(s).tolist(), needs="route:load"
        ),
        "route_first_layer_by_layer": _ratio(
            "share of shifted tokens whose first differing layer it is", "route:first", over="route:touched"
        ),
        "route_any_diff_by_margin": _ratio(
            "share of the decisions of one bucket of the margin that differ",
            "route:margin_any_diff",
            over="route:margin_decisions",
        ),
        "route_tokens_touched_by_position": _ratio(
            "share of the tokens of one bucket of the position that are shifted",
            "route:position_touched",
            over="route:position_tokens",
        ),
        "abs_log_ratio_shifted_by_layer": _ratio(
            "mean |l| of tokens whose decision in that layer differs", "route:abs_any_diff", over="route:any_diff"
        ),
        "abs_log_ratio_unshifted_by_layer": _ratio(
            "mean |l| of the other tokens", "route:abs", "route:abs_any_diff", over="route:tokens", but="route:any_diff"
        ),
        "abs_log_ratio_shifted_by_position": _ratio(
            "mean |l| of the shifted tokens of one bucket", "route:position_abs_touched", over="route:position_touched"
        ),
        "abs_log_ratio_unshifted_by_position": _ratio(
            "mean |l| of the other tokens of one bucket",
            "route:position_abs",
            "route:position_abs_touched",
            over="route:position_tokens",
            but="route:position_touched",
        ),
    }


def _ratio(formula: str, total: str, part: str | None = None, *, over: str, but: str | None = None) -> Metric:
    """total / over, element by element; (total - part) / (over - but) where a part is left out."""

    def value(s: Sums) -> Any:
        above, below = s[total], s[over]
        if part is not None and but is not None:
            above, below = above - s[part], below - s[but]
        return (above / below).tolist() if isinstance(above, Tensor) else quotient(above, below)

    return Metric(formula, value, needs=part or total)


def _load_change(s: Sums) -> Tensor:
    """[L, E] change of each expert's share of the assignments of its layer."""
    load, other = (s[name] / s[name].sum(-1, keepdim=True) for name in ("route:load", "route:load_other"))
    return load - other


EXPERT_SHIFT = {name: metric.formula for name, metric in _numbers(()).items()}
EXPERT_SHIFT_LISTS = {name: metric.formula for name, metric in _lists(()).items()}
