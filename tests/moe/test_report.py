"""What a report shows of expert shift: every metric has a plot, and a plot says what was measured."""

import base64
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from html_page import Page
from report_records import rl, write_all
from route_sets import random_routes

from megatron_rc.drawing import heat_map
from megatron_rc.drawing.heat_map import HeatMap, colour, merged, png
from megatron_rc.moe.shift import expert_shift
from megatron_rc.moe.shift_metrics import EXPERT_SHIFT
from megatron_rc.moe.tables import MoeShape, RouteTable
from megatron_rc.report.log import read_metrics
from megatron_rc.report.panels import EXPERTS, HEAT_PANELS, PANELS, ROUTE_PANELS
from megatron_rc.report.route_maps import heat_maps
from megatron_rc.report.run_page import write_report

SHAPE = MoeShape(num_layers=7, layers=(1, 4, 6), top_k=3, num_experts=12)


def measured(step: int) -> dict[str, Any]:
    """Every metric of expert shift, of both pairs."""
    generator = torch.Generator().manual_seed(step)
    a, b = random_routes((40, 3, 3), seed=step)
    own, at_other, theirs = torch.randn(3, 40, 3, 12, generator=generator).log_softmax(-1)
    mine = RouteTable(SHAPE, a, own.gather(-1, a), torch.rand(40, 3, generator=generator), at_other.gather(-1, b))
    ratio, positions = torch.randn(40, generator=generator), torch.arange(40)
    values = expert_shift(
        mine, RouteTable(SHAPE, b, theirs.gather(-1, b)), torch.ones(40), log_ratio=ratio, positions=positions
    ).sums.values()
    return {prefix + name: value for prefix in ("old/", "current_old/") for name, value in values.items()}


def run(steps: int = 30) -> list[dict[str, Any]]:
    shares = {"replay/share": 0.9, "replay/disagreement": 0.1, "old/f2": 0.2}
    shares |= {f"old/rejected_route_shift_token_{unit}": 0.1 for unit in ("token", "seq")}
    return [{**record, **measured(record["step"]), **shares} for record in rl(range(1, steps + 1))]


def test_every_metric_is_drawn(tmp_path: Path) -> None:
    drawn = {key for panel in ROUTE_PANELS for curve in panel.curves for key in curve.keys}
    drawn |= {f"old/{panel.name}" for panel in (*HEAT_PANELS, EXPERTS)}
    names = {name for name in measured(1) if name.startswith("old/")} - {"old/route_layers", "old/route_margins"}
    assert names - drawn == {"old/route_kl"}, "which the sampler does not return"
    assert set(EXPERT_SHIFT) <= {name.removeprefix("old/") for name in names}
    write_all(tmp_path, run())
    page = Page(write_report(tmp_path).read_text())
    titles = [title for panel in (*ROUTE_PANELS, *HEAT_PANELS, EXPERTS) for title in (panel.title,)]
    shown = [text.strip() for text in page.texts]
    assert [title for title in titles if title not in shown] == []
    assert len([s for s in page.named("svg") if s["class"] == "map"]) == len(HEAT_PANELS) + 1


def test_a_run_without_routes_has_no_word_of_them(tmp_path: Path) -> None:
    write_all(tmp_path, rl(range(5)))
    text = write_report(tmp_path).read_text()
    assert not any(panel.title in text for panel in ROUTE_PANELS) and 'class="map"' not in text
    assert PANELS[1].title in text


def test_lists_are_stored_with_five_digits_and_null_for_nothing(tmp_path: Path) -> None:
    write_all(tmp_path, [{"step": 1, "a": [1 / 3, math.nan, [2, 1e-7 / 3]], "b": 1 / 3}])
    (record,) = read_metrics(tmp_path)
    assert record == {"step": 1, "a": [0.33333, None, [2, 3.3333e-8]], "b": 1 / 3}


def test_a_map_has_a_row_a_layer_by_its_number_and_a_column_a_step() -> None:
    records = json.loads(json.dumps(run(4)))
    maps = {found.title: found for found in heat_maps(records)}
    layers = maps["Decisions that differ"]
    assert (layers.rows, layers.columns) == (["1", "4", "6"], ["1", "2", "3", "4"])
    for column, record in enumerate(records):
        assert [row[column] for row in layers.cells] == record["old/route_any_diff_by_layer"]
    margins = maps["Differing decisions by margin"]
    assert margins.rows[0] == "< 0.0001" and len(margins.rows) == len(margins.cells)
    positions = maps["Shifted tokens by position"]
    assert positions.rows == ["0", "1", "2", "4", "8", "16", "32"], "40 positions, and no empty bucket above them"
    experts = maps[EXPERTS.title]
    assert experts.cells == records[-1]["old/route_load_change_by_expert"]
    assert (experts.rows, experts.unit) == (["1", "4", "6"], "step 4")


def pixels(image: bytes) -> list[list[tuple[int, ...] | None]]:
    """The colours of a PNG by row; None where it is transparent."""
    decoder = pytest.importorskip("PIL.Image")
    decoder.open(io.BytesIO(image)).verify()  # the checksum of every chunk
    rows = np.asarray(decoder.open(io.BytesIO(image), formats=["PNG"]).convert("RGBA")).tolist()
    return [[(*rgb,) if opaque else None for *rgb, opaque in row] for row in rows]


def test_the_picture_holds_every_cell_in_its_colour() -> None:
    found = pixels(png([[0.0, 2.0, math.nan], [1.0, 0.5, 1.5]], 0.0, 2.0))
    assert found[0] == [colour(0), colour(1), None] and found[1][0] == colour(0.5)
    assert colour(0) != colour(0.5) != colour(1)
    assert pixels(png([[3.0]], 3.0, 3.0)) == [[colour(0)]]


def test_a_map_of_both_signs_has_nothing_in_its_middle() -> None:
    svg = heat_map.heat_map(HeatMap("t", "u", "m", [[-1.0, 0.0, 4.0]], ["0"], list("abc"), "layer", "expert"))
    (image,) = re.findall(r"data:image/png;base64,([^\"]+)", svg)
    (row,) = pixels(base64.b64decode(image))
    assert row[1] is not None and len(set(row[1])) == 1, "grey"
    assert row[2] == colour(1) and row[0] not in (None, colour(0)) and ">-4<" in svg and ">4<" in svg


def test_many_steps_are_merged_into_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heat_map, "MAX_COLUMNS", 3)
    cells, columns = merged([[1.0, 3.0, math.nan, 5.0, 6.0, math.nan, math.nan]], list("abcdefg"))
    assert columns == ["a", "c", "e"] and cells[0] == [2.0, 5.0, 6.0]
