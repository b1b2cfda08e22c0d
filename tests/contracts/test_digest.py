"""The comparison of two checkouts says which results differ, and by how much."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from digest import compare
from digest_tree import Results, call, choices
from torch import Tensor


def results(**changes: Any) -> Results:
    out = Results()
    values = {
        "weights": torch.tensor([1.0, math.nan, -2.0]),
        "mask": torch.tensor([True, False]),
        "metrics": {"k3": 0.5},
    }
    for name, value in (values | changes).items():
        out.add(f"torch/presets/one/{name}", value)
    return out


def test_equal_results_pass_with_nan_in_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(results(), results()) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["all", "3", "3", "0", "0", "0"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_last_bit_of_a_number_is_a_difference(dtype: torch.dtype, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.tensor([1.0, math.nan, -2.0], dtype=dtype)
    after = before.clone()
    after[2] = torch.nextafter(before[2], torch.tensor(0.0, dtype=dtype))
    gap = (after[2] - before[2]).item()
    a, b = results(weights=before), results(weights=after)
    assert compare(a, b) == 1
    name = "torch/presets/one/weights"
    what = f"{name}: 1 of 3 differ, max abs {gap:.3g}, max rel {gap / 2:.3g}, max ulp 1"
    assert capsys.readouterr().out.splitlines()[0] == f"DIFFERS {what}"
    assert compare(a, b, ["torch/presets/*/weights"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"excepted {what}"


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), "1 of 1 differ, max abs 0, max rel nan, max ulp 0"),
        (torch.zeros(2), torch.zeros(2).double(), "float32 [2] against float64 [2]"),
        (torch.zeros(2), torch.zeros(1, 2), "float32 [2] against float32 [1, 2]"),
        (torch.tensor([True, True]), torch.tensor([True, False]), "1 of 2 differ, max abs 1, max rel 1"),
        (torch.zeros(2), None, "only in the first tree"),
        (None, torch.zeros(2), "only in the second tree"),
    ],
)
def test_zeros_types_shapes_and_missing_results_differ(
    before: Tensor | None, after: Tensor | None, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(results(weights=before), results(weights=after)) == 1
    assert capsys.readouterr().out.splitlines()[0] == f"DIFFERS torch/presets/one/weights: {what}"


def test_a_case_that_fails_in_both_trees_proves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    out = results()
    out.case("torch/presets/two", lambda: torch.zeros(2) @ torch.zeros(3))
    out.case("torch/presets/three", results, unknown=object())
    assert compare(out, out) == 1
    failures = capsys.readouterr().out.splitlines()[:2]
    assert ["two/error: both raise RuntimeError" in failures[0], "TypeError" in failures[1]] == [True, True]


def test_a_combination_that_only_one_tree_refuses_is_a_difference(capsys: pytest.CaptureFixture[str]) -> None:
    allowed, refused = results(), results()
    allowed.case("torch/presets/two", float, "1.5")
    refused.case("torch/presets/two", float, "none")
    assert compare(allowed, refused) == 1
    differing = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()[:2]]
    assert differing == ["DIFFERS torch/presets/two", "DIFFERS torch/presets/two/refused"]


@dataclass
class Options:
    clip: float = 0.2
    mode: Literal["soft", "hard"] = "soft"


def loss(values: float, *, options: Options | None = None) -> tuple[float, float, str]:
    options = options or Options()
    return values, options.clip, options.mode


def test_arguments_that_became_fields_of_an_option_are_handed_over() -> None:
    assert call(loss, values=1.0) == (1.0, 0.2, "soft")
    assert call(loss, values=1.0, clip=0.3, mode="hard") == (1.0, 0.3, "hard")
    with pytest.raises(TypeError, match="loss takes no dual_clip"):
        call(loss, values=1.0, dual_clip=2.0)


class Table:
    def __init__(self, mode: str) -> None:
        raise ValueError(f"mode must be one of 'soft', 'seq-mean', got {mode!r}")


def test_choices_are_read_from_the_type_or_from_the_refusal() -> None:
    assert choices(Options, "mode") == ["soft", "hard"]
    assert choices(Table, "mode") == ["soft", "seq-mean"]
