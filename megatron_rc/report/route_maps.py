"""Heat maps of expert shift: per layer, margin or position over the steps of a run, and per expert at its last step."""

import math
from collections.abc import Sequence

from megatron_rc.drawing.heat_map import HeatMap
from megatron_rc.report.curves import Record, phase_of
from megatron_rc.report.panels import EXPERTS, HEAT_PANELS, HeatPanel

_PREFIXES = ("old/", "current/", "current_old/")


def measured_routes(records: Sequence[Record]) -> bool:
    """Whether the run recorded or replayed routes."""
    return any(key.startswith("replay/") or "/route_" in key for record in records for key in record)


def heat_maps(records: Sequence[Record]) -> list[HeatMap]:
    """The maps that the run has numbers for: those over steps first, then the one of experts."""
    rl = [record for record in records if phase_of(record) == "rl"]
    return [shown for panel in HEAT_PANELS if (shown := _over_steps(rl, panel))] + _experts(rl)


def _over_steps(records: Sequence[Record], panel: HeatPanel) -> HeatMap | None:
    key = _first_key(records, panel.name)
    columns = [record for record in records if isinstance(record.get(key), list)]
    lists = [[math.nan if v is None else float(v) for v in record[key]] for record in columns]
    cells = [list(row) for row in zip(*lists, strict=True)]
    names = _row_names(panel.rows, columns[-1] if columns else {}, key, len(cells))
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
    names = _row_names("layer", last, key, len(cells))
    experts = [str(i) for i in range(len(cells[0]))]
    return [HeatMap(EXPERTS.title, f"step {last['step']}", EXPERTS.meaning, cells, names, experts, "layer", "expert")]


def _first_key(records: Sequence[Record], name: str) -> str:
    present = {key for record in records for key in record}
    return next((prefix + name for prefix in _PREFIXES if prefix + name in present), name)


def _row_names(rows: str, record: Record, key: str, count: int) -> list[str]:
    pair = key.partition("/")[0]
    if rows == "layer":
        return [str(int(layer)) for layer in record.get(f"{pair}/route_layers", range(count))]
    if rows == "margin":
        return [*(f"< {edge:g}" for edge in record.get(f"{pair}/route_margins", range(count - 1))), "above"]
    return ["0", *(f"{2**i}" for i in range(count - 1))]
