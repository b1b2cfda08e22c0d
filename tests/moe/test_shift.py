"""Expert shift over tokens, layers and ranks, and what a report shows of it."""

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
import torch.distributed as dist
from distributed import run_ranks
from refusals import refuses
from report_pages import Page, rl, write_all
from route_sets import peak_memory, random_routes
from torch import Tensor

from megatron_rc.correction.correct import pair_metrics
from megatron_rc.correction.metrics import MetricSums
from megatron_rc.drawing import heat_map
from megatron_rc.drawing.heat_map import HeatMap, colour, merged, png
from megatron_rc.moe import compare
from megatron_rc.moe import reference as routes
from megatron_rc.moe.router_distance import router_kl
from megatron_rc.moe.shift import ExpertShift, expert_shift
from megatron_rc.moe.shift_metrics import EXPERT_SHIFT, MARGINS, POSITIONS
from megatron_rc.moe.tables import MoeShape, RouteTable
from megatron_rc.report.log import read_metrics
from megatron_rc.report.panels import EXPERTS, HEAT_PANELS, PANELS, ROUTE_PANELS
from megatron_rc.report.route_maps import heat_maps
from megatron_rc.report.run_page import write_report

TWO = MoeShape(num_layers=2, layers=(0, 1), top_k=2, num_experts=4)
MASK = torch.tensor([True, True, True, False])
CHOSEN = torch.tensor([[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[1, 2], [0, 3]], [[0, 1], [0, 1]]])
SAMPLED = torch.tensor([[[1, 0], [3, 2]], [[0, 2], [2, 3]], [[2, 1], [1, 2]], [[2, 3], [2, 3]]])
ROUTER = torch.tensor([0.4, 0.3, 0.2, 0.1])
"""Router probabilities of the trainer, at every token and layer."""
OTHER_ROUTER = torch.tensor([0.5, 0.1, 0.3, 0.1])
MARGIN = torch.tensor([[0.5, 2.0], [0.0005, 0.02], [0.5, 5.0], [9.0, 9.0]])
LOG_RATIO = torch.tensor([0.1, -0.8, 0.3, 5.0])
NAN = math.nan
SHAPE = MoeShape(num_layers=7, layers=(1, 4, 6), top_k=3, num_experts=12)


def by_hand(other: RouteTable | None = None) -> dict[str, Any]:
    trainer = RouteTable(TWO, CHOSEN, ROUTER.log()[CHOSEN], MARGIN, ROUTER.log()[SAMPLED])
    other = other or RouteTable(TWO, SAMPLED)
    return expert_shift(trainer, other, MASK, log_ratio=LOG_RATIO, positions=torch.arange(4)).sums.values()


def padded(values: list[float], length: int) -> list[float]:
    return values + [NAN] * (length - len(values))


def test_every_metric_of_a_tiny_case() -> None:
    expected = {
        # overlaps 2 1 2 | 2 2 0 of 2
        "route_layers": [0, 1],
        "route_margins": list(MARGINS),
        "route_overlap": 0.75,
        "route_overlap_by_layer": [2.5 / 3, 2 / 3],
        "route_jaccard": 13 / 18,
        "route_jaccard_by_layer": [7 / 9, 2 / 3],
        "route_any_diff": 1 / 3,
        "route_any_diff_by_layer": [1 / 3, 1 / 3],
        "route_layers_differing": 2 / 3,
        "route_tokens_touched": 2 / 3,
        "route_first_layer": 0.5,
        "route_first_layer_by_layer": [0.5, 0.5],
        # token 1: |4/7 - 2/3| + 3/7 + 1/3; token 2: disjoint
        "route_gate_l1": (6 / 7 + 2) / 6,
        "route_gate_l1_by_layer": [2 / 7, 2 / 3],
        "route_margin": 8.0205 / 6,
        "route_margin_by_layer": [1.0005 / 3, 7.02 / 3],
        "route_any_diff_by_margin": [NAN, 1, NAN, NAN, 0, NAN, NAN, 0, 0, 1],
        # experts 0 0 1 | 1 1 2 against 0 0 1 | 1 2 2, and so on
        "route_load_change_by_expert": [[0, 1 / 6, -1 / 6, 0], [1 / 6, -1 / 6, -1 / 6, 1 / 6]],
        "route_load_change_by_layer": [1 / 6, 1 / 3],
        "route_load_change": 0.25,
        "abs_log_ratio_shifted": 0.55,
        "abs_log_ratio_unshifted": 0.1,
        "abs_log_ratio_shifted_by_layer": [0.8, 0.3],
        "abs_log_ratio_unshifted_by_layer": [0.2, 0.45],
        "f2_shifted": 0.5,
        "f2_unshifted": 0.0,
        "route_tokens_touched_by_position": padded([0, 1, 1], POSITIONS),
        "abs_log_ratio_shifted_by_position": padded([NAN, 0.8, 0.3], POSITIONS),
        "abs_log_ratio_unshifted_by_position": padded([0.1], POSITIONS),
    }
    found = by_hand()
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert flat(found[name]) == pytest.approx(flat(value), rel=1e-6, abs=1e-9, nan_ok=True), name


def flat(value: Any) -> list[float]:
    return torch.tensor(value, dtype=torch.float64).flatten().tolist()


def test_router_kl_and_gates_use_the_other_routers_log_probs_where_they_are_known() -> None:
    found = by_hand(RouteTable(TWO, SAMPLED, logprobs=OTHER_ROUTER.log()[SAMPLED]))
    kl = {ids: two_and_rest(ids) for ids in ((0, 1), (0, 2), (1, 2), (2, 3))}
    of_layers = [(kl[0, 1] + kl[0, 2] + kl[1, 2]) / 3, (kl[2, 3] + kl[2, 3] + kl[1, 2]) / 3]
    assert found["route_kl_by_layer"] == pytest.approx(of_layers, rel=1e-6)
    assert found["route_kl"] == pytest.approx(sum(found["route_kl_by_layer"]) / 2)
    # layer 0: 4/7 3/7 against 5/6 1/6; 4/7 3/7 of experts 0, 1 against 5/8 3/8 of 0, 2; 3/5 2/5 against 1/4 3/4
    first = 2 * (5 / 6 - 4 / 7) + (5 / 8 - 4 / 7) + 3 / 7 + 3 / 8 + 2 * (3 / 5 - 1 / 4)
    assert found["route_gate_l1_by_layer"][0] == pytest.approx(first / 3, rel=1e-6)


def two_and_rest(ids: tuple[int, int]) -> float:
    p, q = ([r[i].item() for i in ids] for r in (OTHER_ROUTER, ROUTER))
    return sum(a * math.log(a / b) for a, b in zip([*p, 1 - sum(p)], [*q, 1 - sum(q)], strict=True))


def test_router_kl_is_exact_over_all_experts_and_below_it_over_some() -> None:
    p, q = torch.randn(2, 50, 6, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    exact = (p.exp() * (p - q)).sum(-1).double()
    torch.testing.assert_close(router_kl(p, q), exact, rtol=1e-5, atol=1e-6)
    assert ((some := router_kl(p[:, :3], q[:, :3])) <= exact + 1e-6).all() and (some > 0).all()


def test_unnormalised_gates_are_the_routers_probabilities() -> None:
    shape = TWO.__class__(2, (0, 1), 2, 4, normalized=False)
    logs = ROUTER.log()
    mine = RouteTable(shape, CHOSEN, logs[CHOSEN], None, logs[SAMPLED])
    found = expert_shift(mine, RouteTable(shape, SAMPLED), MASK).sums.values()
    # token 1 layer 0: expert 1 (0.3) becomes expert 2 (0.2); token 2 layer 1: 0.4, 0.1 become 0.3, 0.2
    assert found["route_gate_l1_by_layer"] == pytest.approx([0.5 / 3, 1.0 / 3], rel=1e-6)


def test_route_shift_is_the_share_of_layers_that_differ_of_every_token() -> None:
    found = expert_shift(RouteTable(TWO, CHOSEN), RouteTable(TWO, SAMPLED), MASK)
    assert found.route_shift.tolist() == [0.0, 0.5, 0.5, 1.0] and found.route_shift.dtype == torch.float32


def test_layers_are_named_by_their_place_in_the_model() -> None:
    shape = MoeShape(num_layers=9, layers=(3, 8), top_k=2, num_experts=4)
    found = expert_shift(RouteTable(shape, CHOSEN), RouteTable(shape, SAMPLED), MASK).sums.values()
    assert found["route_first_layer"] == (3 + 8) / 2


def test_corrupt_tokens_count_nowhere_and_impossible_ones_at_the_bound() -> None:
    ratio = torch.tensor([math.nan, -math.inf, math.inf, 1.0])
    tables = RouteTable(TWO, CHOSEN), RouteTable(TWO, SAMPLED)
    found = expert_shift(*tables, torch.ones(4), log_ratio=ratio, log_ratio_bound=7.0).sums.values()
    assert found["route_tokens_touched"] == 1.0 and found["route_layers_differing"] == 1.5
    assert found["abs_log_ratio_shifted"] == 4.0 and math.isnan(found["abs_log_ratio_unshifted"])


def random_shift(rows: slice) -> ExpertShift:
    shape = MoeShape(num_layers=5, layers=(0, 2, 3), top_k=3, num_experts=12)
    generator = torch.Generator().manual_seed(3)
    a, b = random_routes((200, 3, 3), seed=1)
    own, reference, theirs = torch.randn(3, 200, 3, 12, generator=generator).log_softmax(-1)
    mine = RouteTable(shape, a, own.gather(-1, a), torch.rand(200, 3, generator=generator), reference.gather(-1, b))
    other = RouteTable(shape, b, theirs.gather(-1, b))
    ratio = torch.randn(200, generator=generator)
    mask, positions = torch.arange(200) % 3 != 1, torch.arange(200) * 7
    return expert_shift(mine[rows], other[rows], mask[rows], log_ratio=ratio[rows], positions=positions[rows])


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert flat(found[name]) == pytest.approx(flat(value), rel=1e-12, nan_ok=True), name


def test_no_cut_of_the_batch_changes_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = random_shift(slice(None)).sums.values()
    parts = [random_shift(slice(*edges)) for edges in ((0, 0), (0, 1), (1, 70), (70, 200))]
    merged = parts[0].sums
    for part in parts[1:]:
        merged.merge(part.sums)
    same(merged.values(), whole)
    monkeypatch.setattr(routes, "_CHUNK_IDS", 50)
    same(random_shift(slice(None)).sums.values(), whole)


def _pooled(rank: int) -> dict[str, Any]:
    return random_shift(slice(0, 60) if rank == 0 else slice(60, 200)).sums.all_reduce(dist.group.WORLD).values()


def test_ranks_pool_sums_and_not_averages() -> None:
    for found in run_ranks(2, _pooled):
        same(found, random_shift(slice(None)).sums.values())


def test_buckets_of_margin_and_position_have_the_edges_that_are_documented() -> None:
    shape = MoeShape(num_layers=1, layers=(0,), top_k=1, num_experts=2)
    edges = torch.tensor([0.0, *MARGINS])
    ids = torch.zeros(len(edges), 1, 1, dtype=torch.int64)

    def differing(which: int) -> Tensor:
        return ids.index_fill(0, torch.tensor([which]), 1)

    for bucket in range(len(edges)):
        mine = RouteTable(shape, ids, margins=edges[:, None])
        found = expert_shift(mine, RouteTable(shape, differing(bucket)), torch.ones(len(edges)))
        assert found.sums.values()["route_any_diff_by_margin"].index(1.0) == bucket
    starts = torch.tensor([0, 1, 2, 3, 4, 7, 8, 2**18, 2**19, 2**30])
    ids = torch.zeros(len(starts), 1, 1, dtype=torch.int64)
    where = [0, 1, 2, 2, 3, 3, 4, 19, 19, 19]
    for row, bucket in enumerate(where):
        other = RouteTable(shape, differing(row))
        shift = expert_shift(RouteTable(shape, ids), other, torch.ones(len(starts)), positions=starts)
        shares = shift.sums.values()["route_tokens_touched_by_position"]
        assert [share for share in shares if share > 0] == [shares[bucket]] == [1 / where.count(bucket)]


def test_tables_that_do_not_fit_are_refused() -> None:
    refuses(r"a must be int16, int32 or int64, got torch.float32", compare.compare_routes, CHOSEN.float(), SAMPLED)
    refuses(r"b must be \[tokens, layers, k\], got shape \(4, 2\)", compare.compare_routes, CHOSEN, SAMPLED[:, 0])
    refuses("must have the same shape", compare.compare_routes, CHOSEN, SAMPLED[:3])


def test_a_comparison_of_a_large_batch_stays_within_its_budget() -> None:
    """65,536 tokens, 48 layers, 8 of 128 experts: four times the input in memory; for the time see test_routes."""
    a = torch.randint(0, 128, (65_536, 48, 8), dtype=torch.int16)
    b = torch.where(torch.rand(65_536, 48, 1) < 0.1, a.flip(0), a)
    shape = MoeShape(48, tuple(range(48)), 8, 128)
    before = peak_memory(reset=True)
    expert_shift(RouteTable(shape, a), RouteTable(shape, b), torch.ones(65_536), log_ratio=torch.rand(65_536))
    assert peak_memory() - before <= 4 * (a.nbytes + b.nbytes)


def test_shift_and_mismatch_are_pooled_together_under_one_prefix() -> None:
    shift, one = random_shift(slice(None)).sums, torch.full((4,), 0.5)
    pair = pair_metrics(one, one * 1.1, one.bool(), sequences=False)
    expected = {f"old/{name}": value for part in (shift, pair) for name, value in part.values().items()}
    for first, second in ((shift, pair), (pair, shift)):
        same(MetricSums().merge(first.prefixed("old/")).merge(second.prefixed("old/")).values(), expected)


def measured(step: int) -> dict[str, Any]:
    """Every metric of expert shift, of both pairs."""
    generator = torch.Generator().manual_seed(step)
    a, b = random_routes((40, 3, 3), seed=step)
    own, at_other, theirs = torch.randn(3, 40, 3, 12, generator=generator).log_softmax(-1)
    mine = RouteTable(SHAPE, a, own.gather(-1, a), torch.rand(40, 3, generator=generator), at_other.gather(-1, b))
    ratio, positions = torch.randn(40, generator=generator), torch.arange(40)
    other = RouteTable(SHAPE, b, theirs.gather(-1, b))
    values = expert_shift(mine, other, torch.ones(40), log_ratio=ratio, positions=positions).sums.values()
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
