"""The curves, the HTML report, the picture, and colours that are readable and tell methods apart for everybody."""

import itertools
import math
import struct
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from report_pages import Page, rl, warmup, write_all

from megatron_rc.drawing import axes, svg
from megatron_rc.drawing.colours import DARK, LIGHT, METHODS, OTHER, SERIES, hues
from megatron_rc.drawing.series import Series, moving_average
from megatron_rc.report.context import save_fingerprint, save_settings
from megatron_rc.report.curves import headlines, series
from megatron_rc.report.panels import PANELS
from megatron_rc.report.picture import write_curves_png
from megatron_rc.report.run_page import write_report


def full_run(steps: int = 40) -> list[dict[str, Any]]:
    """Records with every key that a panel can draw."""
    keys = {key: panel for panel in PANELS for curve in panel.curves for key in curve.keys}
    records = [{"phase": "warmup", "step": s, "cross_entropy": 2 / s, "eval/accuracy": 0.3} for s in range(1, 9)]
    for step in range(steps):
        values = {key: 0.001 + (i % 7) * 0.1 + step / 100 for i, key in enumerate(keys) if keys[key].phase == "rl"}
        records.append({"phase": "rl", "step": step, **values, "eval/accuracy": 0.3 + step / 100})
    return records


def test_the_report_is_one_file_that_asks_for_nothing_else_and_explains_every_panel(tmp_path: Path) -> None:
    write_all(tmp_path, full_run())
    save_settings(tmp_path, {"name": "my job", "train": {"lr": 1e-4}})
    save_fingerprint(tmp_path, {"device": "cpu"})
    assert write_report(tmp_path) == tmp_path / "report.html"
    text = (tmp_path / "report.html").read_text()
    page, lowered = Page(text), text.lower()
    for outside in ("http:", "https:", "//", "@import", "url(", "<link", "<img", "<iframe", "import("):
        assert outside not in lowered.replace("<!doctype", ""), outside
    for tag, attributes in page.tags:
        assert not attributes.keys() & {"src", "href", "xlink:href", "srcset", "data", "action"}, tag
    assert [a for a in page.named("meta") if a.get("charset") == "utf-8"]
    assert len(page.named("svg")) == len(PANELS)
    assert {a["aria-label"] for a in page.named("svg")} == {panel.title for panel in PANELS}
    assert {"my job", "train.lr", "0.0001", "device", "cpu"} <= set(page.texts)
    shown = "".join(page.texts)
    assert all(panel.meaning in shown and f"Healthy: {panel.healthy}" in shown for panel in PANELS)


def test_text_of_the_user_is_escaped(tmp_path: Path) -> None:
    nasty = "\"><script>alert(1)</script><b a='1'>&amp;"
    write_all(tmp_path, rl(range(3)))
    save_settings(tmp_path, {"name": nasty, nasty: {nasty: nasty}})
    save_fingerprint(tmp_path, {nasty: nasty})
    page = Page(write_report(tmp_path).read_text())
    assert len(page.named("script")) == 1
    assert nasty in page.texts and f"{nasty}.{nasty}" in page.texts


def test_a_metric_that_was_not_measured_leaves_its_plot_out_and_is_named(tmp_path: Path) -> None:
    write_all(tmp_path, rl(range(5)))
    page = Page(write_report(tmp_path).read_text())
    assert [a["aria-label"] for a in page.named("svg")] == ["Reward", "k3: KL(sampler || trainer)"]
    (note,) = (text for text in page.texts if text.startswith("Not measured in this run"))
    assert "Held-out accuracy" in note and "Gradient norm" in note and "Reward" not in note


def test_a_report_of_nothing_is_refused(tmp_path: Path) -> None:
    write_all(tmp_path, [])
    refuses("holds no finished step", write_report, tmp_path)


def test_a_long_run_stays_small_and_keeps_its_peaks(tmp_path: Path) -> None:
    records = full_run(20_000)
    records[7777]["grad_norm"] = 12345.0
    write_all(tmp_path, records)
    path = write_report(tmp_path)
    assert path.stat().st_size < 2e6
    assert "12345.0" in path.read_text()


def test_series_leave_out_what_is_missing_and_what_a_logarithm_cannot_show() -> None:
    (reward, *_), k3 = PANELS[0:1], next(p for p in PANELS if p.logarithmic)
    records: list[dict[str, Any]] = [
        {"step": 1, "reward/mean": 0.5, "old/k3": 0.0},
        {"step": 2, "reward/mean": None, "old/k3": 1e-4},
        {"step": 3, "reward/mean": math.nan, "old/k3": -1e-9},
        {"step": 4, "phase": "warmup", "reward/mean": 0.1},
        {"step": 5, "phase": "rl", "reward/mean": 0.7},
    ]
    assert series(records, reward) == [Series("reward", [1, 5], [0.5, 0.7])]
    assert series(records, k3) == [Series("old / sampler", [2], [1e-4])]
    assert series([], reward) == []


def test_a_curve_never_mixes_two_keys() -> None:
    ess = next(p for p in PANELS if p.title == "Effective sample size")
    records = [{"step": 1, "current/ess_token": 0.1}, {"step": 2, "old/ess_token": 0.9, "current/ess_token": 0.2}]
    assert series(records, ess)[0] == Series("tokens", [2], [0.9])
    assert series(records[:1], ess)[0] == Series("tokens", [1], [0.1])


@pytest.mark.parametrize(
    ("records", "value", "note"),
    [
        ([{"phase": "warmup", "step": 9, "eval/accuracy": 0.2}, {"step": 0, "eval/accuracy": 0.25},
          {"step": 1}, {"step": 10, "eval/accuracy": 0.75}], "25.0 % → 75.0 %", "+50.0 points"),
        ([{"phase": "warmup", "step": 9, "eval/accuracy": 0.2}, {"step": 1}, {"step": 10, "eval/accuracy": 0.1}],
         "20.0 % → 10.0 %", "-10.0 points"),
        ([{"step": 10, "eval/accuracy": 0.5}, {"step": 20, "eval/accuracy": 0.75}], "50.0 % → 75.0 %", "+25.0 points"),
    ],
)  # fmt: skip
def test_the_headline_compares_accuracy_before_and_after(records: list[Any], value: str, note: str) -> None:
    headline = headlines(records)[0]
    assert (headline.label, headline.value) == ("Held-out accuracy", value)
    assert headline.note.startswith(note)


def test_headlines_sum_up_steps_time_and_speed() -> None:
    times = [{"step": s, "time/step_s": 1.5, "tokens_per_second": float(s), "old/k3": s * 1e-5} for s in (1, 2, 3, 100)]
    found = {h.label: h.value for h in headlines([*warmup([1, 2]), *times])}
    assert found == {"k3 at the end": "1.00e-03", "Steps": "100", "Tokens per second": "2", "Time in steps": "0:06"}
    assert headlines(warmup([1])) == []


def test_points_of_a_line_are_where_the_axes_say() -> None:
    left, right, top, bottom = svg.LEFT, svg.WIDTH - svg.RIGHT, svg.TOP, svg.HEIGHT - svg.BOTTOM
    for values, logarithmic in (([0.0, 1.0, 0.5], False), ([1e-4, 1e-2, 1e-3], True)):
        chart = svg.line_chart([Series("a", [0, 5, 10], values)], title="t", logarithmic=logarithmic)
        (line,) = [attributes for attributes in Page(chart).named("polyline")]
        points = [tuple(map(float, point.split(","))) for point in str(line["points"]).split()]
        assert points == [(left, bottom), ((left + right) / 2, top), (right, (top + bottom) / 2)]


@given(st.floats(-1e9, 1e9, allow_nan=False), st.floats(0, 1e6))
def test_an_axis_holds_its_values_between_round_ticks(low: float, width: float) -> None:
    axis = axes.linear_axis(low, low + width)
    slack = 1e-6 * (axis.high - axis.low)
    assert axis.low <= low + slack and low + width <= axis.high + slack
    assert 2 <= len(axis.ticks) <= 9 and all(a < b for a, b in pairwise(axis.ticks))


@given(st.floats(1e-12, 1e6), st.floats(1, 1e9))
def test_a_logarithmic_axis_holds_its_values(low: float, factor: float) -> None:
    axis = axes.log_axis(low, low * factor)
    assert axis.low <= low * (1 + 1e-9) and low * factor <= axis.high * (1 + 1e-9)
    assert 2 <= len(axis.ticks) <= 10


def test_a_moving_average_is_centred_and_takes_what_there_is_at_the_ends() -> None:
    assert moving_average([1.0, 2.0, 6.0, 2.0, 9.0], 3) == pytest.approx([1.5, 3, 10 / 3, 17 / 3, 5.5])
    assert moving_average([4.0] * 9, 5) == [4.0] * 9


def test_thinning_keeps_order_and_extremes() -> None:
    values = [math.sin(i / 50) for i in range(10_000)]
    values[1234], values[4321] = 5.0, -5.0
    thin = svg.thinned(Series("a", list(range(10_000)), values))
    assert len(thin.values) <= svg.MAX_POINTS and max(thin.values) == 5.0 and min(thin.values) == -5.0
    assert all(a < b for a, b in pairwise(thin.steps))
    assert all(values[step] == value for step, value in zip(thin.steps, thin.values, strict=True))


def test_the_picture_draws_the_main_curves(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    images = pytest.importorskip("matplotlib.image")
    write_all(tmp_path, full_run())
    path = write_curves_png(tmp_path, tmp_path / "curves.png")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    assert width > 1500 and height > 700
    # the first curve's colour, in the upper left panel and in the lower right one
    blue = (abs(images.imread(path)[..., :3] - matplotlib.colors.to_rgb(LIGHT["blue"])) < 0.02).all(-1)
    assert blue[: height // 2, : width // 3].any() and blue[height // 2 :, 2 * width // 3 :].any()


def test_a_picture_of_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    write_all(tmp_path, warmup([1, 2]))
    refuses("holds no metric that is part of the picture", write_curves_png, tmp_path, tmp_path / "curves.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    refuses(r"matplotlib is not installed: .* -e '.\[report\]'", write_curves_png, tmp_path, tmp_path / "curves.png")


def test_a_logarithmic_axis_takes_negative_values_and_ends_where_the_data_end() -> None:
    axis = axes.tight_log_axis(-20.0, -1e-3)
    assert (axis.share(-20.0), axis.share(-1e-3)) == (0.0, 1.0)
    assert axis.ticks == pytest.approx([-1e-3, -1e-2, -0.1, -1.0, -10.0])
    assert axis.share(-1) == pytest.approx(math.log(20) / math.log(20 / 1e-3))
    narrow = axes.tight_log_axis(1, 160)
    assert [narrow.low, narrow.high] == [1, 160] and narrow.ticks == pytest.approx([1, 10, 100])
    assert len(axes.tight_log_axis(3.0, 3.0).ticks) > 0


def test_a_clipped_chart_cuts_off_what_lies_outside_the_axes() -> None:
    across = axes.linear_axis(0, 10)
    shapes = [svg.Line([0, 10], [0, 99], "c0"), svg.Band([0, 10], [-1, -1], [1, 1], "c1"), svg.Picture("AAAA")]
    page = Page(svg.chart(shapes, across, axes.linear_axis(-1, 1), title="t", across="a<b", clipped=True))
    inner = page.named("svg")[1]
    assert inner["viewbox"] == f"{svg.LEFT} {svg.TOP} {inner['width']} {inner['height']}"
    assert page.named("polyline") and page.named("polygon") and page.named("image")
    assert "a<b" in page.texts


APART = 10.0
"""Least distance of two colours in CIELAB; 2 is just visible side by side."""
SIGHT = {
    "usual": np.eye(3),
    "deuteranopia": np.array([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]]),
    "protanopia": np.array([[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]]),
}
"""Viénot, Brettel and Mollon (1999), on linear RGB."""
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    x, y, z = np.cbrt(TO_XYZ @ rgb / (TO_XYZ @ np.ones(3)))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_text_is_readable_and_methods_stay_apart_for_everybody(colours: dict[str, str]) -> None:
    for name in ("text", "soft", "alarm", "caution", *SERIES):
        for ground in ("page", "card"):
            dark, light = sorted(TO_XYZ[1] @ linear(colours[each]) for each in (name, ground))
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (name, ground)
    shown = {name: linear(colours[hue]) for name, hue in (METHODS | {"others": OTHER}).items()}
    for sight, matrix in SIGHT.items():
        for one, other in itertools.combinations(shown, 2):
            distance = np.linalg.norm(lab(matrix @ shown[one]) - lab(matrix @ shown[other]))
            assert distance >= APART, (sight, one, other, distance)


def test_a_method_has_one_colour_in_any_company() -> None:
    for names in (["none", "seq-tis"], ["exact", "none", "icepop"], ["bf16", "none", "fp8"]):
        given = hues(names)
        assert all(given[name] == METHODS[name] for name in names if name in METHODS)
        assert len({*given.values()}) == len(names)
    assert list(hues(["bf16", "fp8"]).values()) == [*SERIES[:2]]
