"""RolloutCorrection: what it refuses, its presets, and its ways in and out of YAML."""

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from correction_cases import on_gaps
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal, refuses

from megatron_rc.correction import weight
from megatron_rc.correction.settings import PRESETS, STATISTICS, Rejection, RolloutCorrection, Weight
from megatron_rc.jobs.describe import describe
from megatron_rc.loss.options import SURROGATES, check_surrogate

BOUNDS = st.one_of(st.none(), st.floats(1e-3, 1.0)), st.floats(1.5, 1e3)
GATES = st.builds(
    Rejection, statistic=st.sampled_from([name for name in STATISTICS if name != "standardized"] + ["my statistic"]),
    level=st.sampled_from(["token", "sequence", "segment"]), reduce=st.sampled_from(["sum", "mean", "max", "min"]),
    lower=BOUNDS[0], upper=BOUNDS[1], when=st.sampled_from(["always", "negative_advantage", "positive_advantage"]),
)  # fmt: skip
WEIGHTS = st.one_of(
    st.none(),
    st.builds(Weight, level=st.sampled_from(["token", "segment"]), upper=st.one_of(BOUNDS[1], st.just(math.inf))),
    st.builds(Weight, level=st.sampled_from(["token", "sequence", "geometric"]), upper=st.just("measured")),
    st.builds(Weight, level=st.sampled_from(["sequence", "geometric"]), mode=st.just("mask"), lower=BOUNDS[0]),
)


def centered(weight: Weight | None = None, **fields: Any) -> RolloutCorrection:
    return RolloutCorrection(weight, old="current", centering="top", **fields)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Weight(level="sentence"), "level must be one of 'token', 'sequence', 'geometric', 'segment', 'prefix"),
        (lambda: Weight(upper=True), "upper must be a number or None, got True"),
        (lambda: Weight(upper="2"), "upper must be a number or 'measured', got '2'"),
        (lambda: Weight(mode="mask", lower=math.inf, upper=None), "lower must be finite, got lower=inf"),
        (lambda: Rejection("k3", upper="2"), "upper must be a number or None, got '2'"),
        (lambda: Rejection("my own", upper=-math.inf), "upper must not be -inf, got upper=-inf"),
        (lambda: RolloutCorrection(log_ratio_bound=True), "log_ratio_bound must be in (0, 40], got True"),
        (lambda: RolloutCorrection(log_ratio_bound=40.5), "log_ratio_bound must be in (0, 40], got 40.5"),
        (lambda: RolloutCorrection(Weight(upper=2.0), log_ratio_bound=0.2), "must be >= |log upper| = 0.69, got 0.2: "),
        (lambda: RolloutCorrection(Weight(mode="clip", lower=0.01), log_ratio_bound=1.0), "|log lower| = 4.61, got 1"),
        (lambda: RolloutCorrection(Weight(upper_by_lag=((4, 9.0),)), log_ratio_bound=1.0), "|log upper| = 2.20, got 1"),
        (lambda: Weight(mode="cut"), "mode must be one of 'truncate', 'clip', 'mask', got 'cut'"),
        (lambda: Weight(upper=0.0), "upper must be > 0 for a ratio, got upper=0.0"),
        (lambda: Weight(upper=math.nan), "upper must be > 0"),
        (lambda: Weight(upper=None), "upper must be set when mode is 'truncate'"),
        (lambda: Weight(lower=0.5), "lower must be None when mode is 'truncate', got lower=0.5"),
        (lambda: Weight(mode="clip"), "lower must be set when mode is 'clip'"),
        (lambda: Weight(mode="clip", lower=0.5, upper=None), "upper must be set when mode is 'clip'"),
        (lambda: Weight(mode="mask", upper=None), "lower or upper must be set"),
        (lambda: Weight(mode="mask", lower=2.0, upper=0.5), "upper must be > lower, got lower=2.0 upper=0.5"),
        (lambda: Weight(mode="mask", lower=2.0, upper=2.0), "upper must be > lower"),
        (lambda: Weight(mode="mask", lower=-1.0), "lower must be > 0 for a ratio, got lower=-1.0"),
        (lambda: Weight(growth="linear"), "growth must be one of 'none', 'sqrt_position', 'sqrt_lag', 'confidence'"),
        (lambda: Weight(growth="sqrt_position"), "level must be 'prefix' when growth is 'sqrt_position', got level="),
        (lambda: Weight("prefix", growth="sqrt_lag"), "level must not be 'prefix' for bounds that depend on lags"),
        (lambda: Weight("sequence", growth="confidence"), "level must be 'token' when growth is 'confidence', got "),
        (lambda: Weight(mode="mask", growth="confidence"), "mode must be 'truncate' when growth is 'confidence', got"),
        (lambda: Weight(upper=1.0, growth="confidence", confidence_floor=1.0), "upper must be a finite number > 1 whe"),
        (lambda: Weight(upper=math.inf, growth="confidence", confidence_floor=1.0), "upper must be a finite number >"),
        (lambda: Weight(growth="confidence", confidence_floor=0.0), "confidence_floor must be in (0, 1] for 'confide"),
        (lambda: Weight(growth="confidence"), "confidence_floor must be in (0, 1] for 'confidence', got None"),
        (lambda: Weight(confidence_floor=0.1), "confidence_floor must be None when growth is 'none'"),
        (lambda: Weight(growth="confidence", upper="measured"), "growth must be 'none' and upper_by_lag empty when up"),
        (lambda: RolloutCorrection(surrogate="gspo"), "surrogate must be one of 'ppo', 'cispo', 'reinforce', got 'gs"),
        (lambda: RolloutCorrection(centering="tail"), "centering must be one of 'none', 'top', 'support', got 'tail'"),
        (lambda: RolloutCorrection(centering="top"), "old must be 'current' when centering is 'top', got 'recompute'"),
        (lambda: centered(surrogate="cispo"), "surrogate must be null, 'ppo' or 'reinforce' when centering is 'top'"),
        (lambda: centered(Weight("sequence")), "weight.level must be 'token' when centering is 'top', got 'sequence'"),
        (lambda: centered(Weight(growth="sqrt_lag")), "weight must depend on pi / mu alone when centering is 'top'"),
        (lambda: centered(Weight(upper="measured")), "weight must depend on pi / mu alone when centering is 'top'"),
        (lambda: centered(reject=(Rejection(upper=2.0),)), "reject must not hold 'ratio_sequence_sum' when centering"),
        (lambda: centered(reject=(Rejection("lag", "token", upper=2),)), "reject must not hold 'lag_token' when cent"),
        (lambda: Weight(growth="sqrt_lag", upper_by_lag=((0, 2.0),)), "upper_by_lag must be empty when growth is"),
        (lambda: Weight(mode="mask", lower=0.5, upper=None, upper_by_lag=((0, 2.0),)), "upper must be set with upper_"),
        (lambda: Weight(upper_by_lag=((4, 2.0), (4, 1.5))), "upper_by_lag must have lags >= 0 that ascend, got [4, 4]"),
        (lambda: Weight(upper_by_lag=((-1, 2.0),)), "upper_by_lag must have lags >= 0 that ascend, got [-1]"),
        (lambda: Weight(upper_by_lag=((0, 0.0),)), "upper must be > 0 for a ratio, got upper=0.0"),
        (lambda: Weight(mode="clip", lower=0.5, upper_by_lag=((0, 0.4),)), "upper must be > lower"),
        (lambda: Weight(mode="mask", upper="measured"), "mode must be 'truncate' when upper is 'measured'"),
        (lambda: Weight("segment", upper="measured"), "'token', 'sequence' or 'geometric' when upper is 'measured'"),
        (lambda: Weight(staleness_upper=0.0), "staleness_upper must be > 0 for a ratio, got 0.0"),
        (lambda: Weight("sequence", staleness_upper=2.0), "level must be 'token' when staleness_upper is set, got"),
        (lambda: Weight(growth="sqrt_lag", staleness_upper=2.0), "staleness_upper must be None for an upper that is m"),
        (lambda: Rejection(), "lower or upper must be set for the rejection on 'ratio'"),
        (lambda: Rejection(lower=0.0), "lower must be > 0 for a ratio"),
        (lambda: Rejection(lower=2.0, upper=1.0), "upper must be > lower"),
        (lambda: Rejection("k3", upper=-0.1), "upper must be >= 0 for 'k3'"),
        (lambda: Rejection("k3", upper=math.nan), "must not be NaN"),
        (lambda: Rejection("", upper=1.0), "statistic must be a name"),
        (lambda: Rejection(level="geometric", upper=1.0), "level must be one of 'token', 'sequence', 'segment'"),
        (lambda: Rejection(reduce="median", upper=1.0), "reduce must be one of 'sum', 'mean', 'max', 'min'"),
        (lambda: Rejection(when="never", upper=1.0), "when must be one of 'always', 'negative_advantage'"),
        (lambda: Rejection("standardized", "token", upper=2.0), "must be 'sequence' or 'segment' for 'standardized'"),
        (lambda: Rejection("standardized", reduce="mean", upper=2.0), "reduce must be 'sum' for 'standardized'"),
        (lambda: Rejection("standardized", lower=0.1, upper=2.0), "lower must be None for 'standardized'"),
        (lambda: Rejection("standardized", upper=0.0), "upper must be > 0 for 'standardized'"),
        (lambda: RolloutCorrection(weight=2.0), "weight must be a Weight or None, got 2.0"),
        (lambda: RolloutCorrection(reject=[Rejection(upper=1.0)]), "reject must be a tuple of Rejection"),
        (lambda: RolloutCorrection(normalize="group"), "normalize must be one of 'none', 'batch'"),
        (lambda: RolloutCorrection(old="new"), "old must be one of 'recompute', 'current', 'rollout'"),
        (lambda: RolloutCorrection(log_ratio_bound=0.0), "log_ratio_bound must be in"),
        (lambda: RolloutCorrection(normalize="batch", old="rollout"), "normalize must be 'none' when old is 'rollout'"),
        # what is not called is data for from_dict
        ({"wieght": {}}, "unknown field 'wieght'; did you mean 'weight'?"),
        ({"weight": {"uper": 2}}, "unknown field 'weight.uper'; did you mean 'upper'?"),
        ({"reject": [{"statistc": "k3", "upper": 1}]}, "unknown field 'reject.0.statistc'; did you mean 'statistic'?"),
        ({"preset": "token-tis", "wieght": {}}, "unknown field 'wieght'"),
        ({"preset": "tokn-tis"}, "unknown preset 'tokn-tis'; did you mean 'token-tis'?"),
        ({"weight": {"upper": "two"}}, "weight.upper"),
        ({"weight": {"upper": -2}}, "weight: upper must be > 0 for a ratio, got upper=-2.0"),
        ({"reject": [{"upper": 2}, {"lower": 2, "upper": 1}]}, "reject.1: upper must be > lower"),
        ({"old": "older"}, "old"),
        (3, "dictionary"),
    ],
)
def test_a_wrong_setting_or_wrong_data_is_one_sentence_that_names_the_field(wrong: Any, message: str) -> None:
    said = refusal(wrong if callable(wrong) else partial(RolloutCorrection.from_dict, wrong))
    assert message in said and "\n" not in said


def test_one_sided_and_infinite_bounds_are_legal() -> None:
    assert Weight(mode="mask", lower=0.5, upper=None).upper is None
    assert Weight(upper=math.inf).upper == math.inf
    assert RolloutCorrection(Weight(upper="measured"), log_ratio_bound=0.1).weight == Weight(upper="measured")
    assert Rejection("prob_diff", "token", lower=-0.2, upper=0.2).lower == -0.2
    assert Rejection("my own", lower=-5.0).name == "my own_sequence_sum"


@pytest.mark.parametrize(
    ("name", "weight", "gates"),
    [
        ("none", None, []),
        ("token-tis", ("token", "truncate", None, 2.0), []),
        ("token-mis", ("token", "mask", None, 2.0), []),
        ("icepop", ("token", "mask", 0.5, 5.0), []),
        ("seq-tis", ("sequence", "truncate", None, 2.0), []),
        ("seq-mis", ("sequence", "mask", None, 2.0), []),
        ("geo-mask", None, [("ratio", "sequence", "mean", 0.999, 1.001, "always")]),
        ("geo-mask-token-tis", ("token", "truncate", None, 2.0),
         [("ratio", "sequence", "mean", 0.999, 1.001, "always")]),
        ("seq-mask-tis", ("token", "truncate", None, 2.0), [("ratio", "sequence", "mean", 0.999, 1.002, "always")]),
        ("veto", None, [("ratio", "sequence", "min", 1e-4, None, "always")]),
        ("k3-reject", None, [("k3", "sequence", "mean", None, 0.01, "always")]),
        ("trust-region-mask", None, [("k2", "sequence", "max", None, 2.0, "always")]),
        ("standardized", ("token", "truncate", None, 2.0), [("standardized", "sequence", "sum", None, 2.0, "always")]),
        ("prefix-tis", ("prefix", "truncate", None, 2.0), []),
        ("off-policy-sequence-mask", None,
         [("ratio", "sequence", "mean", math.exp(-0.5), None, "negative_advantage")]),
    ],
)  # fmt: skip
def test_presets_are_the_published_forms(name: str, weight: Any, gates: list[Any]) -> None:
    preset = RolloutCorrection.preset(name)
    assert (dataclasses.astuple(preset.weight)[:4] if preset.weight else None) == weight
    assert preset.weight is None or not preset.weight.reads_lags
    assert [dataclasses.astuple(gate) for gate in preset.reject] == gates
    assert preset.old == ("rollout" if name == "off-policy-sequence-mask" else "recompute")
    assert (preset == RolloutCorrection()) == (name == "none")
    assert PRESETS[name].source
    assert (preset.centred("top") is not None) == (name in ("none", "token-tis", "token-mis", "icepop"))
    assert RolloutCorrection.from_yaml(preset.to_yaml()) == RolloutCorrection.from_dict(preset.to_dict()) == preset
    for surrogate in SURROGATES:
        check_surrogate(surrogate, preset)


@given(
    correction=st.builds(
        RolloutCorrection, weight=WEIGHTS, reject=st.lists(GATES, max_size=3).map(tuple),
        old=st.sampled_from(["recompute", "current", "rollout"]), log_ratio_bound=st.floats(7.0, 40),
    ),
    normalize=st.sampled_from(["none", "batch"]),
)  # fmt: skip
def test_every_correction_survives_dictionaries_and_yaml(correction: RolloutCorrection, normalize: Any) -> None:
    if correction.old == "recompute":
        correction = dataclasses.replace(correction, normalize=normalize)
    assert RolloutCorrection.from_dict(correction.to_dict()) == correction
    assert RolloutCorrection.from_yaml(correction.to_yaml()) == correction


def test_yaml_comes_from_a_file_from_text_or_is_a_preset_name(tmp_path: Path) -> None:
    text = "weight: {level: sequence, mode: mask, upper: 3}\nreject:\n- {statistic: k2, level: token, upper: 1.5}\n"
    (tmp_path / "c.yaml").write_text(text)
    expected = RolloutCorrection(Weight("sequence", "mask", None, 3.0), (Rejection("k2", "token", upper=1.5),))
    assert RolloutCorrection.from_yaml(text) == expected
    assert RolloutCorrection.from_yaml(tmp_path / "c.yaml") == expected
    assert RolloutCorrection.from_yaml("icepop") == RolloutCorrection.preset("icepop")
    assert RolloutCorrection.from_yaml("preset: icepop") == RolloutCorrection.preset("icepop")
    refuses("no such file: 'missing.yaml'", RolloutCorrection.from_yaml, "missing.yaml")


def test_a_preset_takes_overrides() -> None:
    data = {"preset": "geo-mask-token-tis", "weight": {"upper": 3.0}, "normalize": "batch", "reject": []}
    assert RolloutCorrection.from_dict(data) == RolloutCorrection(Weight(upper=3.0), normalize="batch")
    assert RolloutCorrection.from_dict({"preset": "veto", "weight": {"upper": 4}}).weight == Weight(upper=4.0)
    assert RolloutCorrection.from_dict({"preset": "token-tis", "weight": None}) == RolloutCorrection()
    assert RolloutCorrection.from_dict("seq-tis") == RolloutCorrection.preset("seq-tis")


def test_every_field_has_a_docstring() -> None:
    assert [field.name for cls in (RolloutCorrection, Rejection) for field in describe(cls) if not field.doc] == []


def test_a_weight_mode_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = weight.WeightMode("max(rho, lower).", "raised", "lowered", required=("lower",), drops=False)
    monkeypatch.setitem(weight.MODES, "floor", row)
    refuses("lower must be set when mode is 'floor'", Weight, mode="floor", upper=3.0)
    corrected = on_gaps(RolloutCorrection(Weight(mode="floor", lower=1.0, upper=None)), -1.0, 0.5)
    assert corrected.weights.tolist() == pytest.approx([1.0, math.exp(0.5)])
    assert corrected.mask.all()
    assert corrected.metrics.values()["raised_token"] == 0.5
