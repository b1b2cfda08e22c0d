"""vocab_parallel_logprobs on one process: values and gradients against fp64, known bugs of its kind by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from logprobs_truth import INF, errors_of_close_logits, logprobs_of, random_logits, random_support, truth, unchecked
from torch import Tensor

from megatron_rc.batch import Support
from megatron_rc.logprobs import vocab_parallel_logprobs

EPSILON = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6}
GRADIENT_EPSILON = {**EPSILON, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def assert_equals_truth(logits: Tensor, targets: Tensor, seed: int = 0, **options: Any) -> None:
    """Forward, and backward of random upstream gradients, within rounding of the fp64 truth."""
    given_logits = logits.detach().requires_grad_()
    lp, entropy = vocab_parallel_logprobs(given_logits, targets, with_entropy=True, **options)
    leaf, true_lp, true_entropy = truth(logits, targets, **options)
    generator = torch.Generator().manual_seed(seed)
    up, up_entropy = torch.randn(2, len(targets), generator=generator, dtype=lp.dtype)
    torch.autograd.backward([lp, entropy], [up, up_entropy])
    finite = true_lp != -INF
    torch.autograd.backward(
        [torch.where(finite, true_lp, 0), true_entropy], [up.double() * finite, up_entropy.double()]
    )
    magnitudes = logits.detach().double().nan_to_num(0, 0, 0).abs().flatten()
    scale = 1 + max(magnitudes.tolist(), default=0.0)
    tolerance = dict(atol=EPSILON[logits.dtype] * scale, rtol=EPSILON[logits.dtype])
    torch.testing.assert_close(lp.double(), true_lp, **tolerance)
    torch.testing.assert_close(entropy.double(), true_entropy, **tolerance)
    assert given_logits.grad is not None and leaf.grad is not None
    assert given_logits.grad.dtype == logits.dtype
    gradient_tolerance = dict(atol=8 * EPSILON[logits.dtype] * scale, rtol=GRADIENT_EPSILON[logits.dtype])
    if logits.dtype == torch.float16:
        gradient_tolerance["atol"] += 2**-24  # the smallest fp16 number
    torch.testing.assert_close(given_logits.grad.double(), leaf.grad, **gradient_tolerance)


@settings(max_examples=120)
@given(data=st.data())
def test_any_shape_dtype_stride_and_option_equals_fp64(data: st.DataObject) -> None:
    draw = data.draw
    rows, width = draw(st.integers(0, 5)), draw(st.sampled_from([1, 2, 7, 40, 1023, 1024, 1025]))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    logits = draw(st.sampled_from([0.1, 3.0, 30.0])) * torch.randn(rows, width, generator=generator)
    logits[torch.rand(rows, width, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.97]))] = -INF
    logits = logits.to(dtype)
    stride = draw(st.sampled_from(["contiguous", "column-major", "sliced columns", "sliced rows"]))
    if stride == "column-major":
        logits = logits.t().contiguous().t()
    elif stride == "sliced columns":
        logits = torch.cat([logits, logits], 1)[:, 1 : 1 + width]
    elif stride == "sliced rows":
        logits = logits.repeat_interleave(2, 0)[::2]
    targets = torch.randint(-1, width + 1, (rows,), generator=generator)
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["temperature"] = draw(
            st.sampled_from([0.6, 1.7, 0.2 + 2 * torch.rand(rows, generator=generator, dtype=torch.float32)])
        )
    if draw(st.booleans()):
        options["mask"] = torch.randint(0, 2, (rows,), generator=generator)
    if draw(st.booleans()):
        options["vocab_size"] = draw(st.integers(1, width))
    if draw(st.booleans()):
        options["support"] = random_support(targets, width, generator)
    with unchecked():
        assert_equals_truth(logits, targets, **options)


@pytest.mark.parametrize("with_support", [False, True])
def test_gradcheck_in_fp64(with_support: bool) -> None:
    logits, targets = random_logits(4, 11)
    support = random_support(targets, 11, torch.Generator().manual_seed(1)) if with_support else None
    temperature = torch.tensor([0.5, 1.0, 2.0, 1.3])

    def both(values: Tensor) -> Any:
        return vocab_parallel_logprobs(values, targets, temperature=temperature, support=support, with_entropy=True)

    assert torch.autograd.gradcheck(both, logits.double().requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_at_most_twice_that_of_log_softmax(dtype: torch.dtype) -> None:
    logits, targets = random_logits(64, 5003, scale=8.0)
    logits = logits.to(dtype)
    up = torch.randn(64, generator=torch.Generator().manual_seed(3))
    leaf, true_lp, _ = truth(logits, targets)
    true_lp.backward(up.double())
    assert leaf.grad is not None
    errors = {}
    for name in ("ours", "torch"):
        x = logits.detach().requires_grad_()
        if name == "ours":
            lp = vocab_parallel_logprobs(x, targets)
        else:
            lp = torch.log_softmax(x.float(), 1).gather(1, targets[:, None])[:, 0]
        assert isinstance(lp, Tensor)
        lp.backward(up)
        assert x.grad is not None
        errors[name] = ((lp - true_lp).abs().max().item(), (x.grad - leaf.grad).abs().max().item())
    assert errors["ours"][0] <= 2 * errors["torch"][0] + 1e-7
    assert errors["ours"][1] <= 2 * errors["torch"][1] + 1e-7


def test_a_leading_block_of_minus_infinity_is_legal() -> None:
    logits, targets = random_logits(3, 5000)
    logits[:, :4096] = -INF
    targets = 4096 + targets % 904
    assert_equals_truth(logits, targets)


def test_minus_infinity_inside_a_row_leaves_the_entropy_finite_forward_and_backward() -> None:
    logits, targets = random_logits(6, 300)
    logits[:, 1::3] = -INF
    assert_equals_truth(logits, targets // 3 * 3)


@pytest.mark.parametrize("shift", [-120.0, -1e4, 1e4])
def test_logits_far_from_zero_keep_their_log_probs(shift: float) -> None:
    logits, targets = random_logits(5, 777)
    shifted = (logits + shift).requires_grad_()
    lp, entropy = vocab_parallel_logprobs(shifted, targets, with_entropy=True)
    _, true_lp, true_entropy = truth(shifted, targets)
    # only the rounding of the subtraction logit - maximum, which is exact here
    torch.testing.assert_close(lp.double(), true_lp, atol=2e-6, rtol=0)
    torch.testing.assert_close(entropy.double(), true_entropy, atol=2e-6, rtol=0)


@pytest.mark.parametrize("width", [1, 31, 1023, 1025, 2047])
def test_columns_that_pad_a_block_add_nothing(width: int) -> None:
    logits, targets = random_logits(3, width, scale=0.01)
    assert_equals_truth(logits - 120, targets)


def test_padded_vocabulary_counts_as_minus_infinity_whatever_it_holds() -> None:
    logits, targets = random_logits(4, 50)
    targets %= 44
    x = torch.cat([logits[:, :44], torch.tensor([INF, torch.nan, 99.0, -INF, 0.0, 5.0]).expand(4, 6)], 1)
    x.requires_grad_()
    lp, entropy = vocab_parallel_logprobs(x, targets, vocab_size=44, with_entropy=True)
    expected = vocab_parallel_logprobs(logits[:, :44].clone(), targets, with_entropy=True)
    assert torch.equal(lp, expected[0]) and torch.equal(entropy, expected[1])
    (lp.sum() + entropy.sum()).backward()
    assert x.grad is not None and (x.grad[:, 44:] == 0).all() and x.grad[:, :44].isfinite().all()


def test_targets_outside_the_vocabulary_are_minus_infinity_without_gradient() -> None:
    logits, _ = random_logits(5, 9)
    targets = torch.tensor([-1, -100, 9, 2**40, 7])
    logits.requires_grad_()
    with unchecked():
        lp = logprobs_of(logits, targets, vocab_size=7)
    assert lp.tolist() == [-INF] * 5
    lp.backward(torch.randn(5))
    assert logits.grad is not None and (logits.grad == 0).all()


def test_a_row_without_a_finite_logit_is_minus_infinity_with_zero_entropy_and_gradient() -> None:
    logits, targets = random_logits(3, 2000)
    logits[1] = -INF
    logits.requires_grad_()
    lp, entropy = vocab_parallel_logprobs(logits, targets, with_entropy=True)
    assert lp[1] == -INF and entropy[1] == 0
    (lp[::2].sum() + entropy.sum()).backward()
    assert logits.grad is not None and (logits.grad[1] == 0).all() and logits.grad.isfinite().all()


def test_upstream_gradients_scale_every_row_also_when_expanded() -> None:
    logits, targets = random_logits(6, 33)
    up = torch.arange(1.0, 7.0)
    gradients = []
    for upstream in (up, torch.tensor(2.5).expand(6)):
        x = logits.clone().requires_grad_()
        lp, entropy = vocab_parallel_logprobs(x, targets, with_entropy=True)
        torch.autograd.backward([lp, entropy], [upstream, -upstream])
        leaf, true_lp, true_entropy = truth(logits, targets)
        torch.autograd.backward([true_lp, true_entropy], [upstream.double(), -upstream.double()])
        assert leaf.grad is not None and x.grad is not None
        torch.testing.assert_close(x.grad.double(), leaf.grad, atol=1e-5, rtol=1e-5)
        gradients.append(x.grad)
    assert not torch.allclose(*gradients)


@pytest.mark.parametrize("only", ["logprobs", "entropy"])
def test_each_output_alone_has_its_gradient(only: str) -> None:
    logits, targets = random_logits(4, 20)
    x = logits.clone().requires_grad_()
    lp, entropy = vocab_parallel_logprobs(x, targets, with_entropy=True)
    leaf, true_lp, true_entropy = truth(logits, targets)
    (lp if only == "logprobs" else entropy).sum().backward()
    (true_lp if only == "logprobs" else true_entropy).sum().backward()
    assert leaf.grad is not None and x.grad is not None
    torch.testing.assert_close(x.grad.double(), leaf.grad, atol=1e-6, rtol=1e-5)


def test_the_target_gradient_of_bf16_logits_survives_cancellation() -> None:
    logits = torch.zeros(40, 6, dtype=torch.bfloat16)
    logits[:, 0] = torch.linspace(0, 9, 40)
    x = logits.requires_grad_()
    lp = logprobs_of(x, torch.zeros(40, dtype=torch.int64))
    lp.sum().backward()
    true = -torch.expm1(torch.log_softmax(logits.detach().double(), 1)[:, 0])
    assert x.grad is not None and true.min() < 1e-3
    # one rounding to bf16, which keeps 8 bits; forming onehot - p in bf16 would give 0 below 2**-9
    assert ((x.grad[:, 0].double() - true).abs() <= 2**-8 * true).all()


def test_more_rows_than_a_launch_grid_axis_holds() -> None:
    assert_equals_truth(*random_logits(70_000, 3))


def test_support_gradient_is_zero_outside_the_kept_ids_and_exact_inside() -> None:
    logits, _ = random_logits(3, 10)
    support = Support(torch.tensor([7, 2, 5, 9]), torch.tensor([0, 3, 3, 4]))
    targets = torch.tensor([2, 4, 1])
    x = logits.clone().requires_grad_()
    lp, entropy = vocab_parallel_logprobs(x, targets, support=support, with_entropy=True)
    kept = logits[0, [7, 2, 5]].double()
    assert lp[0].item() == pytest.approx(torch.log_softmax(kept, 0)[1].item(), abs=1e-6)
    # no kept id, and a target that was not kept
    assert lp[1:].tolist() == [-INF, -INF] and entropy[1:].tolist() == [0, 0]
    torch.autograd.backward([lp, entropy], [torch.ones(3), torch.zeros(3)])
    expected = torch.zeros(3, 10, dtype=torch.float64)
    expected[0, [7, 2, 5]] = torch.tensor([0.0, 1, 0]) - torch.softmax(kept, 0)
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), expected, atol=1e-6, rtol=0)
    assert (x.grad[expected == 0] == 0).all()


@pytest.mark.parametrize("kept", [False, True])
def test_a_temperature_divides_differences_of_logits_which_are_exact_for_close_ones(kept: bool) -> None:
    of_logprobs, of_gradient = errors_of_close_logits(kept=kept, backend="torch")
    assert of_logprobs <= 4e-7 and of_gradient <= 2e-7
