"""What is drawn of expert shift: curves over steps, and heat maps of what is measured a layer, bucket or expert."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_rc.report.curves import Curve, Panel, phase_of

Record = Mapping[str, Any]
_PREFIXES = ("old/", "current/", "current_old/")
_SHIFT_HELP = "S are the experts of the trainer's router for a token in a layer, S' those of the sampler."


def _sampler(label: str, name: str) -> Curve:
    """Trainer against sampler: before the update where it was measured, else during it."""
    return Curve(label, (f"old/{name}", f"current/{name}"))


def _staleness(label: str, name: str) -> Curve:
    return Curve(label, (f"current_old/{name}",))


def _rejected(label: str, unit: str) -> Curve:
    shared = itertools.product(("sequence", "segment"), ("mean", "sum", "max", "min"))
    levels = ("token", *map("_".join, shared))
    return Curve(label, tuple(f"old/rejected_route_shift_{level}_{unit}" for level in levels))


ROUTE_PANELS = (
    Panel(
        "Expert overlap", "fraction",
        (_sampler("overlap, sampler", "route_overlap"), _sampler("Jaccard, sampler", "route_jaccard"),
         _staleness("overlap, old", "route_overlap"), _staleness("Jaccard, old", "route_jaccard")),
        f"|S ∩ S'| / k and |S ∩ S'| / |S ∪ S'|. {_SHIFT_HELP} old: S' before the update.",
        "above 0.95; what one gradient step moves is the difference between both pairs.", noisy=True,
    ),
    Panel(
        "Decisions and tokens that differ", "fraction",
        (_sampler("decisions, sampler", "route_any_diff"), _sampler("tokens, sampler", "route_tokens_touched"),
         _staleness("decisions, old", "route_any_diff"), _staleness("tokens, old", "route_tokens_touched")),
        "Share of (token, layer) with S ≠ S', and of tokens with at least one such layer.",
        "decisions a few percent; tokens can be near 1 in a deep model all the same.", noisy=True,
    ),
    Panel(
        "Layers that differ", "layers",
        (_sampler("differing layers of a token", "route_layers_differing"),
         _sampler("first differing layer", "route_first_layer")),
        "How many layers of a token chose other experts, and which was the first, counted from 0.",
        "few and late: an early difference disturbs every layer above it.", noisy=True,
    ),
    Panel(
        "Gate distance", "L1",
        (_sampler("sampler's experts", "route_gate_l1"), _staleness("old", "route_gate_l1")),
        "Σ |g(e) − g'(e)| of the gate weights; 2 means that nothing is shared. Against the sampler, which tells only "
        "its experts, both gates are the trainer's.",
        "small beside the share of decisions that differ: what moves has little weight.", noisy=True,
    ),
    Panel(
        "Router KL", "nats per decision", (_staleness("KL(old || current)", "route_kl"),),
        "Divergence of the router's softmax over the old experts and one cell for all others.",
        "follows the learning rate.", logarithmic=True, noisy=True,
    ),
    Panel(
        "Top-k margin", "nats", (_sampler("mean margin", "route_margin"),),
        "Score of the last expert chosen minus that of the first one left out: how near a decision is to its flip.",
        "steady; a shrinking margin lets smaller errors change experts.", noisy=True,
    ),
    Panel(
        "|l| with and without expert shift", "nats per token",
        (_sampler("shifted tokens", "abs_log_ratio_shifted"), _sampler("other tokens", "abs_log_ratio_unshifted")),
        "Mean |log π − log μ| of tokens with some S ≠ S', and of the others.",
        "near one another; a gap says that the routes make the mismatch.", logarithmic=True, noisy=True,
    ),
    Panel(
        "F(2) with and without expert shift", "fraction of tokens",
        (_sampler("all", "f2"), _sampler("shifted tokens", "f2_shifted"), _sampler("other tokens", "f2_unshifted")),
        "Share of tokens with max(ρ, 1/ρ) > 2.", "near 0.", noisy=True,
    ),
    Panel(
        "Load change", "fraction of a layer's assignments",
        (_sampler("sampler", "route_load_change"), _staleness("old", "route_load_change")),
        "Half of Σ |load(e) − load'(e)|, mean over layers: work that moved to other experts.",
        "well below the share of decisions that differ: flips cancel unless they have a direction.", noisy=True,
    ),
    Panel(
        "Replay", "fraction",
        (Curve("rows replayed", ("replay/share",)), Curve("router disagrees", ("replay/disagreement",))),
        "Rows whose experts were given, and decisions in which the router would have taken others.",
        "rows near 1: all but the last token of a sequence; disagreement grows with the distance of both policies.",
        noisy=True,
    ),
    Panel(
        "Rejected for their routes", "fraction",
        (_rejected("tokens", "token"), _rejected("sequences", "seq")),
        "What a rejection on route_shift dropped.", "a few percent at most.", noisy=True,
    ),
)  # fmt: skip


class HeatPanel(NamedTuple):
    title: str
    name: str
    """Of a metric that is a list, without the prefix of its pair."""
    rows: str
    """What one number of the list stands for: layer, margin or position."""
    meaning: str


HEAT_PANELS = (
    HeatPanel("Decisions that differ", "route_any_diff_by_layer", "layer", "Share with S ≠ S'."),
    HeatPanel("Overlap", "route_overlap_by_layer", "layer", "Mean |S ∩ S'| / k."),
    HeatPanel("Jaccard", "route_jaccard_by_layer", "layer", "Mean |S ∩ S'| / |S ∪ S'|."),
    HeatPanel("First differing layer", "route_first_layer_by_layer", "layer", "Share of shifted tokens."),
    HeatPanel("Gate distance", "route_gate_l1_by_layer", "layer", "Mean Σ |g(e) − g'(e)|."),
    HeatPanel("Router KL", "route_kl_by_layer", "layer", "KL(old || current), nats."),
    HeatPanel("Top-k margin", "route_margin_by_layer", "layer", "Mean margin, nats."),
    HeatPanel("Load change", "route_load_change_by_layer", "layer", "Half of Σ |load(e) − load'(e)|."),
    HeatPanel("|l| where the layer differs", "abs_log_ratio_shifted_by_layer", "layer", "Nats per token."),
    HeatPanel("|l| where it does not", "abs_log_ratio_unshifted_by_layer", "layer", "Nats per token."),
    HeatPanel("Differing decisions by margin", "route_any_diff_by_margin", "margin", "Share of its decisions."),
    HeatPanel("Shifted tokens by position", "route_tokens_touched_by_position", "position", "Share of its tokens."),
    HeatPanel("|l| of shifted tokens", "abs_log_ratio_shifted_by_position", "position", "Nats per token."),
    HeatPanel("|l| of other tokens", "abs_log_ratio_unshifted_by_position", "position", "Nats per token."),
)
EXPERTS = HeatPanel(
    "Load change of every expert", "route_load_change_by_expert", "layer",
    "load(e) − load'(e) at the last step, as a share of the layer's assignments.",
)  # fmt: skip


class HeatMap(NamedTuple):
    title: str
    unit: str
    meaning: str
    cells: list[list[float]]
    """cells[row][column]; NaN is left blank."""
    rows: list[str]
    columns: list[str]
    row_name: str
    column_name: str


def measured_routes(records: Sequence[Record]) -> bool:
    """Whether the run has anything to show of its routes."""
    return any(key.startswith("replay/") or "/route_" in key for record in records for key in record)


def heat_maps(records: Sequence[Record]) -> list[HeatMap]:
    """The maps that the run has numbers for, list metrics over steps first."""
    rl = [record for record in records if phase_of(record) == "rl"]
    return [found for panel in HEAT_PANELS if (found := _over_steps(rl, panel))] + _experts(rl)


def _over_steps(records: Sequence[Record], panel: HeatPanel) -> HeatMap | None:
    key = _first_key(records, panel.name)
    columns = [record for record in records if isinstance(record.get(key), list)]
    lists = [[math.nan if v is None else float(v) for v in record[key]] for record in columns]
    cells = [list(row) for row in zip(*lists, strict=True)]
    names = _ROW_NAMES[panel.rows](columns[-1] if columns else {}, key, len(cells))
    while cells and all(math.isnan(value) for value in cells[-1]):
        cells.pop()
    if not cells:
        return None
    steps = [str(record["step"]) for record in columns]
    pair = "current against old" if key.startswith("current_old/") else "trainer against sampler"
    return HeatMap(panel.title, pair, panel.meaning, cells, names[: len(cells)], steps, panel.rows, "step")


def _experts(records: Sequence[Record]) -> list[HeatMap]:
    key = _first_key(records, EXPERTS.name)
    last = next((record for record in reversed(records) if isinstance(record.get(key), list)), None)
    if last is None:
        return []
    cells = [[math.nan if v is None else float(v) for v in row] for row in last[key]]
    names = _layer_names(last, key, len(cells))
    experts = [str(i) for i in range(len(cells[0]))]
    return [HeatMap(EXPERTS.title, f"step {last['step']}", EXPERTS.meaning, cells, names, experts, "layer", "expert")]


def _first_key(records: Sequence[Record], name: str) -> str:
    present = {key for record in records for key in record}
    return next((prefix + name for prefix in _PREFIXES if prefix + name in present), name)


def _layer_names(record: Record, key: str, count: int) -> list[str]:
    layers = record.get(f"{key.partition('/')[0]}/route_layers", range(count))
    return [str(int(layer)) for layer in layers]


def _margin_names(record: Record, key: str, count: int) -> list[str]:
    edges = record.get(f"{key.partition('/')[0]}/route_margins", range(count - 1))
    return [*(f"< {edge:g}" for edge in edges), "above"]


def _position_names(record: Record, key: str, count: int) -> list[str]:
    return ["0", *(f"{2**i}" for i in range(count - 1))]


_ROW_NAMES: dict[str, Callable[[Record, str, int], list[str]]] = {
    "layer": _layer_names,
    "margin": _margin_names,
    "position": _position_names,
}
