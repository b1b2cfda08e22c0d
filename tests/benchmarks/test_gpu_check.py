"""The check of the kernels finds what is wrong with them, whatever way they go wrong."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import checkout  # noqa: E402
from checking.layouts import LAYOUTS, arranged, same_layout  # noqa: E402
from checking.row_problem import Problem, truth  # noqa: E402
from checking.run import all_checks, part_of, run_check  # noqa: E402
from checking.setting import Check, Comparison, Setting, Skip  # noqa: E402
from checking.toy import toy_blocks  # noqa: E402
from checking.workers import Worker, run_in_processes  # noqa: E402
from logprobs_truth import unchecked  # noqa: E402

pytestmark = pytest.mark.interpreter

CPU = torch.device("cpu")
TOY = Setting(CPU, small=True, interpreted=True)
FULL = Setting(CPU, small=False, interpreted=True)


def checked(title: str) -> dict[str, Any]:
    (check,) = [check for check in all_checks(TOY, []) if check.title == title]
    with toy_blocks():
        return run_check(check, TOY)


def times(relative: float, which: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], None]:
    """Makes one tensor among the arguments or the answer of a launcher a little larger."""

    def change(args: Any, answer: Any) -> None:
        which(args, answer).mul_(1 + relative)

    return change


MUTANTS: dict[str, tuple[str, str, Callable[[Any, Any], None]]] = {
    "rows: fp32, contiguous": ("rows.row_gradient_bwd", "gradient", times(1e-4, lambda args, _: args[0])),
    "widths: bf16, 33 columns": ("rows.row_statistics_fwd", "logprobs", times(1e-5, lambda _, answer: answer[0])),
    "kept ids: in place": ("rows.support_gradient_bwd", "gradient", times(0.05, lambda args, _: args[0])),
    "shards: two equal, kept ids, bf16": (
        "rows.merge_statistics_fwd", "entropy", times(1e-2, lambda _, answer: answer[1])
    ),
    "loss: 17 tokens": ("policy_loss.policy_loss_bwd", "gradient", times(1e-5, lambda _, answer: answer[0])),
    "correction: sequence clip": ("correction.correction_fwd", "weights", times(1e-6, lambda _, answer: answer[0])),
    "correction: preset none": ("correction.metric_sums_fwd", "metric ", lambda _, answer: answer[0].add_(1e-2)),
    "head: linear_policy_loss, fp32": ("rows.row_gradient_bwd", "by_", times(1e-4, lambda args, _: args[0])),
    "head: linear_logprobs, fp32, kept ids": (
        "rows.support_statistics_fwd", "logprobs", times(1e-5, lambda _, answer: answer[0])
    ),
    "head: linear_policy_loss, bf16, rows without loss left out": (
        "policy_loss.policy_loss_fwd", "by_", times(0.2, lambda _, answer: answer[2])
    ),
    "groups: one rank: statistics that are gathered over it and merged": (
        "rows.merge_statistics_fwd", "logprobs", times(1e-5, lambda _, answer: answer[0])
    ),
    "groups: one rank: linear_logprobs, sequence-parallel": (
        "rows.row_gradient_bwd", "by_", times(0.2, lambda args, _: args[0])
    ),
    "routes: 6 experts per token": ("routes.compare_routes_fwd", "overlap", lambda _, answer: answer[0].add_(1)),
    "batches: NaN and infinities": (
        "correction.correction_fwd", "bad_sequences", lambda _, answer: answer.bad_sequences.zero_()
    ),
}  # fmt: skip
"""Check -> a launcher that megatron_rc.fused imports, the quantity that it makes wrong, and how."""


@pytest.mark.parametrize("title", MUTANTS)
def test_a_kernel_that_is_a_little_wrong_fails_its_check(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, quantity, change = MUTANTS[title]
    file, name = place.split(".")
    module = import_module(f"megatron_rc.fused.{file}")
    launcher = getattr(module, name)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        answer = launcher(*args, **kwargs)
        change(args, answer)
        return answer

    assert checked(title)["state"] == "passed"
    monkeypatch.setattr(module, name, wrong)
    result = {"wrong": [], **checked(title)}
    wrong_quantities = [distance["quantity"] for distance in result["wrong"]]
    assert result["state"] == "failed" and any(name.startswith(quantity) for name in wrong_quantities), result


def test_memory_that_a_kernel_forgets_to_write_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("megatron_rc.fused.rows"), "row_gradient_bwd", lambda *args, **kwargs: None)
    result = checked("rows: bf16, contiguous")
    assert result["state"] == "failed" and "gradient: NaN and infinities" in {w["quantity"] for w in result["wrong"]}


def test_the_truth_is_that_of_autograd_in_fp64() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 30, generator=generator, dtype=torch.float64)
    logits[torch.rand(5, 30, generator=generator) < 0.2] = -100
    targets = torch.randint(30, (5,), generator=generator)
    up, up_entropy, temperature = torch.rand(3, 5, generator=generator, dtype=torch.float64)
    temperature += 0.5
    mask = torch.tensor([1, 0, 1, 1, 1])
    found = truth(Problem(logits, targets, {"temperature": temperature, "mask": mask}, up, up_entropy))
    leaf = logits.clone().requires_grad_()
    log_p = (leaf / temperature[:, None]).log_softmax(1)
    logprobs, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)
    ((up * logprobs + up_entropy * entropy) * mask).sum().backward()
    torch.testing.assert_close(found.logprobs, (logprobs * mask).detach(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found.entropy, (entropy * mask).detach(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found.gradient, leaf.grad, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_keeps_the_values_and_changes_the_memory(layout: str) -> None:
    values = torch.arange(4 * 6.0).view(4, 6)
    laid = arranged(values, layout)
    expected = values[:1].expand(4, 6) if layout == "one row expanded" else values
    assert torch.equal(laid.reshape(4, 6), expected)
    copy = same_layout(laid)
    assert torch.equal(copy, laid) and copy.stride() == laid.stride() and copy.data_ptr() != laid.data_ptr()
    odd = (laid.data_ptr() // laid.element_size()) % 2 == 1
    assert odd == (layout in ("odd address", "rows of an odd stride"))
    strides: dict[str, tuple[int, ...]] = {
        "rows of an odd stride": (7, 1),
        "rows of a wider tensor": (70, 1),
        "every second column": (12, 2),
    }
    strides |= {"columns first": (1, 4), "one row expanded": (0, 1), "pages": (12, 6, 1), "pages turned": (6, 12, 1)}
    assert laid.stride() == strides.get(layout, (6, 1))


def close(ours: list[float], pytorch: list[float], true: list[float], *, cast: float = 0.0) -> bool:
    comparison, answers = Comparison(), [torch.tensor(values, dtype=torch.float64) for values in (ours, pytorch, true)]
    comparison.close("numbers", *answers, epsilon=0.01, cast=cast)
    return all(distance.correct for distance in comparison.distances)


def test_an_error_of_twice_pytorchs_and_epsilon_passes_and_a_larger_one_does_not() -> None:
    assert close([10.109], [10.05], [10.0])
    assert not close([10.111], [10.05], [10.0])
    assert not close([math.nan], [10.0], [10.0]) and not close([10.0], [math.inf], [10.0])
    assert close([math.nan, -math.inf], [math.nan, -math.inf], [math.nan, -math.inf])
    assert not close([math.inf], [-math.inf], [-math.inf])
    # an answer of PyTorch that is itself far off proves nothing
    assert not close([12.0], [12.0], [10.0])
    assert close([10.2], [10.0], [10.0], cast=0.02) and not close([10.3], [10.0], [10.0], cast=0.02)
    comparison = Comparison()
    comparison.equal("bits", torch.tensor([1.0, math.nan, 3.0]), torch.tensor([1.0, math.nan, 2.0]))
    assert comparison.distances[0].error == 1 and not comparison.distances[0].correct


def test_a_check_that_raises_or_cannot_run_is_a_result_and_one_that_compares_nothing_is_an_error() -> None:
    def raises(setting: Setting, comparison: Comparison) -> None:
        raise RuntimeError("no such kernel\nand more")

    def skips(setting: Setting, comparison: Comparison) -> None:
        raise Skip("needs two CUDA devices")

    results = [run_check(Check("a", "b", made), TOY) for made in (raises, skips, lambda setting, comparison: None)]
    assert [result["state"] for result in results] == ["raised", "skipped", "raised"]
    reasons = [
        "RuntimeError: no such kernel",
        "needs two CUDA devices",
        "AssertionError: a check that compares nothing",
    ]
    assert [result["reason"] for result in results] == reasons


def test_full_size_has_every_check_of_toy_size_and_each_process_gets_its_part() -> None:
    full, toy = all_checks(FULL, []), all_checks(TOY, [])
    assert len(full) > 250 and {check.group for check in full} == {check.group for check in toy}
    parts = [part_of(full, number, 8) for number in range(8)]
    assert sorted(check.title for part in parts for check in part) == sorted(check.title for check in full)
    # those that need most of the memory are never at work at the same time
    assert sum(check.large for check in full) == sum(check.large for check in parts[0]) == 5
    with pytest.raises(SystemExit, match="no group colums; there are rows, widths"):
        all_checks(TOY, ["colums"])


SCRIPT = """
import json, os, sys, time
first = int(sys.argv[sys.argv.index("--skip") + 1])
for name in ("good", "dies", "fine", "hangs", "last")[first:]:
    print("@check " + json.dumps({"begins": name}), flush=True)
    if name == "dies":
        os.abort()
    if name == "hangs":
        time.sleep(60)
    print("@check " + json.dumps({"group": "a", "name": name, "state": "passed"}), flush=True)
    if name == "fine":
        sys.exit(75)
"""


def test_a_process_that_dies_or_hangs_costs_the_check_it_was_at_and_no_other() -> None:
    results: list[dict[str, Any]] = []
    checks = [Check("a", name, lambda setting, comparison: None) for name in ("good", "dies", "fine", "hangs", "last")]
    Worker([sys.executable, "-c", SCRIPT], checks, results.append, hangs=3).run()
    assert [(result["name"], result["state"]) for result in results] == [
        ("good", "passed"), ("dies", "crashed"), ("fine", "passed"), ("hangs", "hung"), ("last", "passed"),
    ]  # fmt: skip
    assert [result.get("reason") for result in results[1::2]] == [
        "its process ended with status -6",
        "said nothing for 3 s",
    ]


ENDLESS = """
import time
while True:
    print("@check {}", flush=True)
    time.sleep(0.1)
"""


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_fails_in_the_parent_of_the_processes_ends_the_run_and_them() -> None:
    def add(result: dict[str, Any]) -> None:
        raise OSError("no space left")

    before = set(threading.enumerate())
    with pytest.raises(OSError, match="no space left"):
        run_in_processes([sys.executable, "-c", ENDLESS], [Check("a", "good", lambda s, c: None)], 1, add)
    assert set(threading.enumerate()) == before


def test_a_fixed_third_of_the_checks_passes_interpreted() -> None:
    # targets outside the vocabulary are among what is checked
    with unchecked(), toy_blocks(), checkout.faster_interpreter():
        results = [run_check(check, TOY) for check in all_checks(TOY, [])[::3]]
    assert {result["state"] for result in results} == {"passed", "skipped"}, [r for r in results if "wrong" in r]
    assert sum(result["state"] == "passed" for result in results) > 60
    # what is skipped is what only a device has
    assert {result["reason"] for result in results if result["state"] == "skipped"} == {"needs a CUDA device"}
    assert {"rows", "kept ids", "shards", "loss", "correction", "head", "groups"} <= {r["group"] for r in results}
