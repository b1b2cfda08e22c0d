"""The kernels of log-probs on one process: against fp64 in any layout, and the known bugs of their kind by name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_rows_data import (
    BLOCK,
    Problem,
    assert_kernels_are_as_exact_as_pytorch,
    problem_of,
    random,
    small_blocks,
    solve,
    solve_exactly,
)
from logprobs_truth import INF, random_logits, unchecked
from on_device import assert_same, far_apart
from torch import Tensor

from megatron_rc.kernels.row_gradient import row_gradient_bwd
from megatron_rc.kernels.row_statistics import row_statistics_fwd
from megatron_rc.kernels.softmax import Rows, Softmax

pytestmark = pytest.mark.kernel

FAR, WRAPPED = 2**31 - 256, 512
WIDTHS = [1, 3, 31, 32, 33, 64, 70, 129]


def draw_logits(data: st.DataObject, rows: tuple[int, ...], width: int, generator: torch.Generator) -> Tensor:
    """Any dtype, size, share of -inf, and memory layout."""
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    logits = data.draw(st.sampled_from([0.1, 3.0, 30.0])) * random((*rows, width), generator)
    logits[torch.rand(logits.shape, generator=generator) < data.draw(st.sampled_from([0.0, 0.3, 0.97]))] = -INF
    logits = logits.to(dtype)
    layouts = ("contiguous", "columns apart", "sliced", "rows apart", "one row", "turned", "every second", "odd")
    layout = data.draw(st.sampled_from(layouts))
    if layout == "columns apart":
        return logits.mT.contiguous().mT
    if layout == "sliced":
        return torch.cat([logits, logits], -1)[..., 1 : 1 + width]
    if layout == "rows apart":
        return logits.repeat_interleave(2, -2)[..., ::2, :]
    if layout == "every second":
        return logits.repeat_interleave(2, -1)[..., ::2]
    if layout == "odd":
        return torch.cat([logits, logits, logits[..., :1]], -1)[..., 1 : 1 + width]
    if layout == "one row":
        return logits[..., :1, :].expand(logits.shape)
    return logits.transpose(0, -2).contiguous().transpose(0, -2) if layout == "turned" else logits


def draw_per_row(data: st.DataObject, values: Tensor) -> Tensor:
    """The same values in any memory layout, or one of them for every row in the memory of one."""
    layout = data.draw(st.sampled_from(["contiguous", "apart", "turned", "expanded"]))
    if layout == "apart":
        return values.repeat_interleave(3, -1)[..., ::3]
    if layout == "turned":
        return values.mT.contiguous().mT if values.dim() == 2 else values.flip(0).flip(0)
    return values.flatten()[0].expand(values.shape) if layout == "expanded" and values.numel() else values


@settings(max_examples=60)
@given(data=st.data())
def test_kernels_are_as_exact_as_pytorch_in_any_layout(data: st.DataObject) -> None:
    draw, generator = data.draw, torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
    rows = draw(st.sampled_from([(0,), (1,), (3,), (5,), (2, 3), (3, 1), (2, 0)]))
    width = draw(st.sampled_from(WIDTHS))
    targets = torch.randint(
        -1, width + 1, rows, generator=generator, dtype=draw(st.sampled_from([torch.int64, torch.int32]))
    )
    problem = Problem(draw_logits(data, rows, width, generator), draw_per_row(data, targets))
    if draw(st.booleans()):
        per_row = draw_per_row(data, 0.3 + 2 * torch.rand(rows, generator=generator))
        problem.options["temperature"] = draw(st.sampled_from([0.6, 1.7, 2, per_row]))
    if draw(st.booleans()):
        mask = torch.randint(0, 2, rows, generator=generator)
        problem.options["mask"] = draw_per_row(
            data, mask.to(draw(st.sampled_from([torch.bool, torch.float32, torch.int64])))
        )
    if draw(st.booleans()):
        problem.options["vocab_size"] = draw(st.integers(1, width))
    used = draw(st.sampled_from(["both", "log-probs", "entropy"]))
    if used != "entropy":
        problem.up = draw_per_row(data, random(rows, generator) * torch.randint(0, 4, rows, generator=generator))
    if used != "log-probs":
        problem.up_entropy = draw_per_row(data, random(rows, generator))
    dense = all(stride or size == 1 for size, stride in zip(problem.logits.shape, problem.logits.stride(), strict=True))
    problem.inplace = dense and draw(st.booleans())
    with unchecked():
        assert_kernels_are_as_exact_as_pytorch(problem)


@pytest.mark.parametrize("temperature", [0.25, 3, torch.tensor([0.25, 1.0, 3.0])])
def test_temperature_divides_the_logits_and_the_gradient(temperature: float | Tensor) -> None:
    logits, targets = random_logits(3, 2 * BLOCK + 3)
    for dtype in (torch.float32, torch.bfloat16):
        assert_kernels_are_as_exact_as_pytorch(problem_of(logits.to(dtype), targets, temperature=temperature))


def test_a_leading_block_of_minus_infinity_is_legal() -> None:
    logits, targets = random_logits(3, 5 * BLOCK)
    logits[0, :BLOCK], logits[1, : 3 * BLOCK], logits[2, : 5 * BLOCK - 1] = -INF, -INF, -INF
    targets = torch.tensor([BLOCK, 4 * BLOCK, 5 * BLOCK - 1])
    assert_kernels_are_as_exact_as_pytorch(problem_of(logits, targets))
    with small_blocks():
        assert solve(problem_of(logits, targets), "triton").logprobs.isfinite().all()


@pytest.mark.parametrize("step", [2, 3, BLOCK])
def test_minus_infinity_inside_a_row_leaves_the_entropy_finite_forward_and_backward(step: int) -> None:
    logits, targets = random_logits(4, 3 * BLOCK + 5)
    logits[:, 1::step] = -INF
    problem = problem_of(logits, torch.zeros_like(targets))
    assert_kernels_are_as_exact_as_pytorch(problem)
    with small_blocks():
        ours = solve(problem, "triton")
    assert ours.entropy.isfinite().all() and ours.gradient.isfinite().all() and (ours.entropy > 0).all()


@pytest.mark.parametrize("shift", [-120.0, -1e4, 1e4])
def test_logits_far_from_zero_keep_their_log_probs(shift: float) -> None:
    logits, targets = random_logits(4, 2 * BLOCK + 7)
    problem = problem_of(logits + shift, targets)
    with small_blocks():
        ours = solve(problem, "triton")
    exact = solve_exactly(problem)
    # only the rounding of the subtraction logit - maximum, which is exact here
    torch.testing.assert_close(ours.logprobs, exact.logprobs, atol=2e-6, rtol=0)
    torch.testing.assert_close(ours.entropy, exact.entropy, atol=2e-6, rtol=0)
    torch.testing.assert_close(ours.gradient, exact.gradient, atol=2e-6, rtol=0)


@pytest.mark.parametrize("width", [1, BLOCK - 1, BLOCK + 1, 2 * BLOCK - 1, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_that_pad_a_block_add_nothing(width: int, dtype: torch.dtype) -> None:
    logits, targets = random_logits(3, width, scale=0.01)
    assert_kernels_are_as_exact_as_pytorch(problem_of((logits - 120).to(dtype), targets))


@pytest.mark.parametrize(
    ("shape", "strides", "block"),
    [((3, 40), (FAR, 1), BLOCK), ((3, 2, 40), (FAR, 40, 1), BLOCK), ((3, 3), (7, FAR), 4), ((3, 3), (7, FAR), 1)],
    ids=["rows", "pages", "columns of one block", "columns of several"],
)
def test_addresses_are_computed_in_64_bits(shape: tuple[int, ...], strides: tuple[int, ...], block: int) -> None:
    # in 32 bits the third row (page, column) would lie before the first, in memory that holds zeros
    assert torch.tensor([FAR], dtype=torch.int32).mul(2).item() == -WRAPPED
    logits = far_apart(shape, strides, WRAPPED, torch.bfloat16)
    values = random(shape, torch.Generator().manual_seed(1)).bfloat16()
    logits.copy_(values)
    targets = torch.arange(values[..., 0].numel()).reshape(shape[:-1]) % shape[-1]
    problem = problem_of(values, targets)
    with small_blocks(block):
        rows = Rows(targets, 1.0, None, None, None, start=0, num_valid=shape[-1])
        softmax = row_statistics_fwd(logits, rows, with_entropy=True, merged=True)
        assert isinstance(softmax, Softmax)
        exact = solve_exactly(problem)
        torch.testing.assert_close(softmax.logprobs.double(), exact.logprobs, atol=1e-6, rtol=1e-6)
        row_gradient_bwd(logits, logits, rows, softmax, problem.up, problem.up_entropy)
    torch.testing.assert_close(logits.double(), exact.gradient, atol=1e-6, rtol=2**-7)


def test_targets_outside_the_vocabulary_are_minus_infinity_without_gradient() -> None:
    logits, _ = random_logits(6, 2 * BLOCK)
    problem = Problem(
        logits, torch.tensor([-1, -100, 2 * BLOCK, 2**40, 2**32 + 3, 50]), {"vocab_size": 50}, torch.randn(6)
    )
    with unchecked(), small_blocks():
        ours = solve(problem, "triton")
    assert ours.logprobs.tolist() == [-INF] * 6
    assert (ours.gradient == 0).all()


def test_a_target_at_minus_infinity_still_has_the_gradient_of_the_entropy() -> None:
    logits, targets = random_logits(3, 2 * BLOCK)
    logits[torch.arange(3), targets] = -INF
    problem = problem_of(logits, targets)
    assert_kernels_are_as_exact_as_pytorch(problem)
    with small_blocks():
        ours, entropy_alone = (
            solve(problem, "triton"),
            solve(Problem(logits, targets, {}, None, problem.up_entropy), "triton"),
        )
    assert (ours.logprobs == -INF).all()
    assert_same(ours.gradient, entropy_alone.gradient)
    assert (ours.gradient != 0).any(1).all()


@pytest.mark.parametrize("bad", [torch.nan, -INF, INF])
def test_rows_with_mask_zero_are_zero_and_have_no_gradient_whatever_they_hold(bad: float) -> None:
    logits, targets = random_logits(4, BLOCK + 5)
    targets[1], logits[1], logits[2, 5] = -100, bad, bad
    mask = torch.tensor([1, 0, 0, 1])
    temperature = torch.tensor([1.0, 0.0, torch.nan, 2.0])
    up = torch.full((4,), torch.nan).where(mask == 0, 1)
    with small_blocks():
        ours = solve(Problem(logits, targets, {"mask": mask, "temperature": temperature}, up, up, True), "triton")
    assert (ours.logprobs[1:3] == 0).all() and (ours.entropy[1:3] == 0).all()
    assert (ours.gradient[1:3] == 0).all() and (ours.gradient[::3] != 0).any(1).all()


def test_a_zero_upstream_gradient_gives_exactly_zero_even_for_a_nan_row() -> None:
    logits, targets = random_logits(3, BLOCK + 5)
    logits[1, 3] = torch.nan
    with small_blocks():
        ours = solve(Problem(logits, targets, {}, torch.tensor([1.0, 0.0, 1.0]), torch.zeros(3)), "triton")
    assert ours.logprobs[1].isnan() and ours.logprobs[::2].isfinite().all()
    assert (ours.gradient[1] == 0).all() and (ours.gradient[::2] != 0).any(1).all()


# numpy's, about the NaN that the interpreter computes with
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("column", [0, BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 5])
@pytest.mark.parametrize("bad", [torch.nan, INF])
def test_nan_and_infinity_show_in_every_result_as_in_pytorch(bad: float, column: int) -> None:
    logits, targets = random_logits(5, 2 * BLOCK + 6)
    logits[:4, column] = bad
    logits[1], logits[2, :BLOCK], logits[2, BLOCK + 1 :] = bad, -INF, bad
    targets[3] = column
    problem = problem_of(logits, targets)
    with small_blocks():
        ours = solve(problem, "triton")
    pytorch = solve(problem, "torch")
    for name in ("logprobs", "entropy"):
        mine, theirs = getattr(ours, name), getattr(pytorch, name)
        assert torch.equal(mine.isnan(), theirs.isnan()) and mine.isnan().tolist() == [True] * 4 + [False]
    assert ours.gradient[:4].isnan().all() and ours.gradient[4].isfinite().all()


@pytest.mark.parametrize("temperature", [0.6, 0.7, 0.9])
def test_no_log_prob_of_a_likely_id_is_above_zero(temperature: float) -> None:
    logits, _ = random_logits(40, 40, scale=30.0)
    problem = problem_of(logits.bfloat16(), logits.argmax(1), temperature=temperature)
    assert_kernels_are_as_exact_as_pytorch(problem)
    equal = problem_of(torch.full((3, 2 * BLOCK + 1), 2.5), torch.arange(3), temperature=temperature)
    assert_kernels_are_as_exact_as_pytorch(equal)


def test_a_row_without_a_finite_logit_is_minus_infinity_with_zero_entropy_and_gradient() -> None:
    logits, targets = random_logits(3, 2 * BLOCK + 1)
    logits[1] = -INF
    problem = problem_of(logits, targets)
    assert_kernels_are_as_exact_as_pytorch(problem)
    with small_blocks():
        ours = solve(problem, "triton")
    assert ours.logprobs[1] == -INF and ours.entropy[1] == 0 and (ours.gradient[1] == 0).all()


def test_padded_vocabulary_counts_as_minus_infinity_whatever_it_holds() -> None:
    logits, targets = random_logits(4, 44)
    # rows of a multiple of 16 bytes with and without it: others are summed in another order
    padding = torch.tensor([INF, torch.nan, 99.0, -INF, 0.0, 5.0, INF, 1.0]).expand(4, 8)
    padded, plain = problem_of(torch.cat([logits, padding], 1), targets, vocab_size=44), problem_of(logits, targets)
    with small_blocks():
        ours, expected = solve(padded, "triton"), solve(plain, "triton")
    assert torch.equal(ours.logprobs, expected.logprobs) and torch.equal(ours.entropy, expected.entropy)
    assert torch.equal(ours.gradient[:, :44], expected.gradient) and (ours.gradient[:, 44:] == 0).all()


def test_the_target_gradient_of_bf16_logits_survives_cancellation() -> None:
    logits = torch.zeros(20, 6, dtype=torch.bfloat16)
    logits[:, 0] = torch.linspace(0, 9, 20)
    targets = torch.zeros(20, dtype=torch.int64)
    problem = Problem(logits, targets, {}, torch.ones(20))
    ours, exact = solve(problem, "triton"), solve_exactly(problem)
    true = exact.gradient[:, 0]
    assert true.min() < 1e-3
    # one rounding to bf16; forming onehot - p in bf16 would give 0 below 2**-9
    assert ((ours.gradient[:, 0] - true).abs() <= 2**-7 * true).all()


def test_upstream_gradients_scale_every_row_also_when_expanded() -> None:
    logits, targets = random_logits(6, BLOCK + 1)
    up = torch.arange(1.0, 7.0)
    gradients = []
    for upstream in (up, torch.tensor(2.5).expand(6), torch.arange(1.0, 13.0)[::2]):
        problem = Problem(logits, targets, {}, upstream, -upstream)
        assert_kernels_are_as_exact_as_pytorch(problem)
        gradients.append(solve(problem, "triton").gradient)
    assert not torch.allclose(gradients[0], gradients[1]) and not torch.allclose(gradients[0], gradients[2])
