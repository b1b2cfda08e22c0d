"""The metrics of expert shift: their names, formulas, and how they follow from the pooled sums."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_rc.correction.formulas import Metric, Sums, quotient

MARGINS = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0)
"""Upper edges of the buckets of the top-k margin, exclusive; one more bucket is above."""
POSITIONS = 20
"""Buckets of the position in the response: 0, 1, 2-3, 4-7, ... and one that holds the rest."""


@functools.lru_cache
def expert_shift_metrics(layers: tuple[int, ...]) -> dict[str, Metric]:
    """Every metric of a model with experts in ``layers``, counted from 0."""
    return _numbers(layers) | _lists(layers)


def _numbers(layers: tuple[int, ...]) -> dict[str, Metric]:
    """Metrics that are one number; l = log pi - log mu clamped to +- log_ratio_bound, rho = e^l."""

    def mean(name: str, formula: str) -> Metric:
        return _metric(formula, lambda s: float((s[f"route:{name}"] / s["route:tokens"]).sum() / len(layers)), name)

    def first_layer(s: Sums) -> float:
        numbered = torch.tensor(layers, dtype=torch.float64)
        return float(s["route:first"] @ numbered / s["route:touched"])

    return {
        "route_overlap": mean("overlap", "mean |S & S'| / k over decisions"),
        "route_jaccard": mean("jaccard", "mean |S & S'| / |S + S'| over decisions"),
        "route_any_diff": mean("any_diff", "share of decisions with S != S'"),
        "route_layers_differing": _metric(
            "mean over tokens of the layers with S != S'",
            lambda s: float(s["route:any_diff"].sum() / s["route:tokens"]),
            "any_diff",
        ),
        "route_tokens_touched": _ratio("share of tokens with S != S' in some layer", "touched", "tokens"),
        "route_first_layer": _metric(
            "mean over shifted tokens of the first layer with S != S', counted from 0", first_layer, "first"
        ),
        "route_gate_l1": mean("gate_l1", "mean sum_e |g(e) - g'(e)| of the gate weights, 0 outside of S and S'"),
        "route_kl": mean(
            "kl", "mean KL(p'||p) of the routers' softmax, over the experts of S' and one cell for all others"
        ),
        "route_margin": mean(
            "margin", "mean s_(k) - s_(k+1) of the trainer's router scores, nats for a softmax router"
        ),
        "route_load_change": _metric(
            "mean over layers of sum_e |load(e) - load'(e)| / 2, load: share of the layer's assignments",
            lambda s: float((_load_change(s).abs().sum(-1) / 2).mean()),
            "load",
        ),
        "abs_log_ratio_shifted": _ratio("mean |l| of shifted tokens", "abs_touched", "touched"),
        "abs_log_ratio_unshifted": _ratio("mean |l| of the other tokens", "abs - abs_touched", "tokens - touched"),
        "f2_shifted": _ratio("share of shifted tokens with max(rho, 1 / rho) > 2", "beyond_2_touched", "touched"),
        "f2_unshifted": _ratio(
            "share of the other tokens with max(rho, 1 / rho) > 2", "beyond_2 - beyond_2_touched", "tokens - touched"
        ),
    }


def _lists(layers: tuple[int, ...]) -> dict[str, Metric]:
    """Metrics that are a list: one number per layer with experts, per bucket of MARGINS or of the position."""
    by_layer = {
        f"route_{name}_by_layer": _ratio(f"route_{name} of one layer", name, "tokens")
        for name in ("overlap", "jaccard", "any_diff", "gate_l1", "kl", "margin")
    }
    return by_layer | {
        "route_layers": _metric("the layers with experts, counted from 0", lambda s: list(layers), "any_diff"),
        "route_margins": _metric("the edges of the buckets of the margin", lambda s: list(MARGINS), "margin"),
        "route_load_change_by_layer": _metric(
            "route_load_change of one layer", lambda s: (_load_change(s).abs().sum(-1) / 2).tolist(), "load"
        ),
        "route_load_change_by_expert": _metric(
            "load(e) - load'(e), one list per layer", lambda s: _load_change(s).tolist(), "load"
        ),
        "route_first_layer_by_layer": _ratio(
            "share of shifted tokens whose first differing layer it is", "first", "touched"
        ),
        "route_any_diff_by_margin": _ratio(
            "share of the decisions of one bucket of the margin that differ", "margin_any_diff", "margin_decisions"
        ),
        "route_tokens_touched_by_position": _ratio(
            "share of the tokens of one bucket of the position that are shifted", "position_touched", "position_tokens"
        ),
        "abs_log_ratio_shifted_by_layer": _ratio(
            "mean |l| of tokens whose decision in that layer differs", "abs_any_diff", "any_diff"
        ),
        "abs_log_ratio_unshifted_by_layer": _ratio(
            "mean |l| of the other tokens", "abs - abs_any_diff", "tokens - any_diff"
        ),
        "abs_log_ratio_shifted_by_position": _ratio(
            "mean |l| of the shifted tokens of one bucket", "position_abs_touched", "position_touched"
        ),
        "abs_log_ratio_unshifted_by_position": _ratio(
            "mean |l| of the other tokens of one bucket",
            "position_abs - position_abs_touched",
            "position_tokens - position_touched",
        ),
    }


def _metric(formula: str, value: Callable[[Sums], Any], needs: str) -> Metric:
    return Metric(formula, value, needs=f"route:{needs}")


def _ratio(formula: str, total: str, over: str) -> Metric:
    """total / over, element by element; each is the name of a sum, or "name - name"."""

    def value(s: Sums) -> Any:
        terms = ([s[f"route:{name}"] for name in names.split(" - ")] for names in (total, over))
        above, below = (functools.reduce(operator.sub, each) for each in terms)
        return (above / below).tolist() if isinstance(above, Tensor) else quotient(above, below)

    return _metric(formula, value, total.split(" - ")[-1])


def _load_change(s: Sums) -> Tensor:
    """[L, E] change of each expert's share of the assignments of its layer."""
    load, other = (s[name] / s[name].sum(-1, keepdim=True) for name in ("route:load", "route:load_other"))
    return load - other


EXPERT_SHIFT = {name: metric.formula for name, metric in _numbers(()).items()}
EXPERT_SHIFT_LISTS = {name: metric.formula for name, metric in _lists(()).items()}
