"""vocab_parallel_logprobs on one process against fp64, known bugs of its kind by name; tests/kernels has them, too."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from logprobs_truth import INF, random_logits, random_support, truth
from row_problems import BLOCK, Problem, assert_exact, kept_problem, problem_of, small_blocks, solve, solve_exactly
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_rc.backend import use_triton
from megatron_rc.batch import Support
from megatron_rc.logprobs.logits import vocab_parallel_logprobs

KEPT = pytest.mark.parametrize("kept", [False, True], ids=["all ids", "kept ids"])


@pytest.fixture(autouse=True, scope="module")
def _many_small_blocks() -> Iterator[None]:
    with small_blocks():
        yield


def problem(kept: bool, rows: int = 4, width: int = 2 * BLOCK + 5) -> Problem:
    return kept_problem(rows, width, 2 * width // 3) if kept else problem_of(*random_logits(rows, width))


def draw_logits(data: st.DataObject, rows: tuple[int, ...], width: int, generator: torch.Generator) -> Tensor:
    """Any dtype, size, share of -inf, and memory layout."""
    logits = data.draw(st.sampled_from([0.1, 3.0, 30.0])) * torch.randn(*rows, width, generator=generator)
    logits[torch.rand(logits.shape, generator=generator) < data.draw(st.sampled_from([0.0, 0.3, 0.97]))] = -INF
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    # fp64 is for PyTorch alone
    dtype = data.draw(st.sampled_from(dtypes if use_triton("auto", logits=logits) else [*dtypes, torch.float64]))
    logits = logits.to(dtype)
    layouts = ("contiguous", "columns apart", "sliced", "rows apart", "one row", "turned", "every second", "odd")
    layout = data.draw(st.sampled_from(layouts))
    if layout == "columns apart":
        return logits.mT.contiguous().mT
    if layout in ("sliced", "odd"):
        one_more = logits[..., :1] if layout == "odd" else logits[..., :0]
        return torch.cat([logits, logits, one_more], -1)[..., 1 : 1 + width]
    if layout == "rows apart":
        return logits.repeat_interleave(2, -2)[..., ::2, :]
    if layout == "every second":
        return logits.repeat_interleave(2, -1)[..., ::2]
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


@settings(max_examples=90)
@given(data=st.data())
def test_any_shape_dtype_stride_and_option_equals_fp64(data: st.DataObject) -> None:
    draw, generator = data.draw, torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
    rows = draw(st.sampled_from([(0,), (1,), (3,), (5,), (2, 3), (3, 1), (2, 0)]))
    width = draw(st.sampled_from([1, 3, 31, 32, 33, 64, 70, 129]))
    ids = draw(st.sampled_from([torch.int64, torch.int32]))
    targets = torch.randint(-1, width + 1, rows, generator=generator, dtype=ids)
    one = Problem(draw_logits(data, rows, width, generator), draw_per_row(data, targets))
    if draw(st.booleans()):
        per_row = draw_per_row(data, 0.3 + 2 * torch.rand(rows, generator=generator))
        one.options["temperature"] = draw(st.sampled_from([0.6, 1.7, 2, per_row]))
    if draw(st.booleans()):
        dtype = draw(st.sampled_from([torch.bool, torch.float32, torch.int64]))
        one.options["mask"] = draw_per_row(data, torch.randint(0, 2, rows, generator=generator).to(dtype))
    if draw(st.booleans()):
        one.options["vocab_size"] = draw(st.integers(1, width))
    if draw(st.integers(0, 2)) == 0:
        one.options["support"] = random_support(targets.reshape(-1), width, generator)
        if draw(st.booleans()) and targets.numel():
            # so that most targets are not kept
            one.options["support"] = one.options["support"].select(torch.arange(targets.numel()).roll(1))
    used = draw(st.sampled_from(["both", "log-probs", "entropy"]))
    if used != "entropy":
        zeros = torch.randint(0, 4, rows, generator=generator)
        one.up = draw_per_row(data, torch.randn(rows, generator=generator) * zeros)
    if used != "log-probs":
        one.up_entropy = draw_per_row(data, torch.randn(rows, generator=generator))
    dense = all(stride or size == 1 for size, stride in zip(one.logits.shape, one.logits.stride(), strict=True))
    one.inplace = dense and draw(st.booleans())
    assert_exact(one)


@pytest.mark.parametrize("temperature", [0.25, 3, torch.tensor([0.25, 1.0, 3.0])])
def test_temperature_divides_the_logits_and_the_gradient(temperature: float | Tensor) -> None:
    logits, targets = random_logits(3, 2 * BLOCK + 3)
    for dtype in (torch.float32, torch.bfloat16):
        assert_exact(problem_of(logits.to(dtype), targets, temperature=temperature))


@KEPT
def test_a_leading_block_of_minus_infinity_is_legal(kept: bool) -> None:
    one = problem(kept, 3, 5 * BLOCK)
    # in the order in which a program reads them
    order = one.options["support"].ids.view(3, -1) if kept else torch.arange(5 * BLOCK).expand(3, -1)
    for row, count in enumerate((BLOCK, 3 * BLOCK, order.shape[1] - 1)):
        one.logits[row, order[row, :count]] = -INF
    one.targets = order[:, -1]
    assert assert_exact(one).logprobs.isfinite().all()
    assert assert_exact(replace(one, inplace=True)).gradient.isfinite().all()


@KEPT
@pytest.mark.parametrize("step", [2, 3, BLOCK])
def test_minus_infinity_inside_a_row_leaves_the_entropy_finite_forward_and_backward(step: int, kept: bool) -> None:
    one = problem(kept)
    one.logits[:, 1::step] = -INF
    ours = assert_exact(one)
    assert ours.entropy.isfinite().all() and ours.gradient.isfinite().all() and (ours.entropy > 0).all()


@KEPT
@pytest.mark.parametrize("shift", [-120.0, -1e4, 1e4])
def test_logits_far_from_zero_keep_their_log_probs(shift: float, kept: bool) -> None:
    one = problem(kept)
    one.logits += shift
    for ours, exact in zip(solve(one), solve_exactly(one), strict=True):
        # only the rounding of the subtraction logit - maximum, which is exact here
        torch.testing.assert_close(ours, exact, atol=2e-6, rtol=0)


@pytest.mark.parametrize("width", [1, BLOCK - 1, BLOCK + 1, 2 * BLOCK - 1, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_that_pad_a_block_add_nothing(width: int, dtype: torch.dtype) -> None:
    logits, targets = random_logits(3, width, scale=0.01)
    assert_exact(problem_of((logits - 120).to(dtype), targets))


def test_padded_vocabulary_counts_as_minus_infinity_whatever_it_holds() -> None:
    logits, targets = random_logits(4, 44)
    padding = torch.tensor([INF, torch.nan, 99.0, -INF, 0.0, 5.0]).expand(4, 6)
    ours = solve(problem_of(torch.cat([logits, padding], 1), targets, vocab_size=44))
    assert (ours.gradient[:, 44:] == 0).all()
    for found, expected in zip(ours, solve(problem_of(logits, targets)), strict=True):
        # rows of other widths are summed in another order
        torch.testing.assert_close(found[..., :44], expected, rtol=1e-6, atol=1e-6)


def test_targets_outside_the_vocabulary_are_minus_infinity_without_gradient() -> None:
    logits, _ = random_logits(6, 2 * BLOCK)
    targets = torch.tensor([-1, -100, 2 * BLOCK, 2**40, 2**32 + 3, 50])
    ours = solve(Problem(logits, targets, {"vocab_size": 50}, torch.randn(6)))
    assert ours.logprobs.tolist() == [-INF] * 6
    assert (ours.gradient == 0).all()


@KEPT
def test_a_target_at_minus_infinity_still_has_the_gradient_of_the_entropy(kept: bool) -> None:
    one = problem(kept)
    one.logits[torch.arange(4), one.targets] = -INF
    ours = assert_exact(one)
    assert (ours.logprobs == -INF).all()
    torch.testing.assert_close(ours.gradient, solve(replace(one, up=None)).gradient, rtol=1e-6, atol=1e-6)
    assert (ours.gradient != 0).any(1).all()


@KEPT
@pytest.mark.parametrize("bad", [torch.nan, -INF, INF])
def test_rows_with_mask_zero_are_zero_and_have_no_gradient_whatever_they_hold(bad: float, kept: bool) -> None:
    one = problem(kept)
    one.targets[1], one.logits[1], one.logits[2, 5] = -100, bad, bad
    one.options |= {"mask": torch.tensor([1, 0, 0, 1]), "temperature": torch.tensor([1.0, 0.0, torch.nan, 2.0])}
    one.up = one.up_entropy = torch.full((4,), torch.nan).where(one.options["mask"] == 0, 1)
    for ours in (solve(one), solve(replace(one, inplace=True))):
        assert (ours.logprobs[1:3] == 0).all() and (ours.entropy[1:3] == 0).all()
        assert (ours.gradient[1:3] == 0).all() and (ours.gradient[::3] != 0).any(1).all()


@KEPT
def test_a_zero_upstream_gradient_gives_exactly_zero_even_for_a_nan_row(kept: bool) -> None:
    one = problem(kept, 3)
    one.logits[1] = torch.nan
    one = replace(one, up=torch.tensor([1.0, 0.0, 1.0]), up_entropy=torch.zeros(3))
    for ours in (solve(one), solve(replace(one, inplace=True))):
        assert ours.logprobs[1].isnan() and ours.logprobs[::2].isfinite().all()
        assert (ours.gradient[1] == 0).all() and (ours.gradient[::2] != 0).any(1).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("column", [0, BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 5])
@pytest.mark.parametrize("bad", [torch.nan, INF])
def test_nan_and_infinity_show_in_every_result_of_their_row_and_in_no_other(bad: float, column: int) -> None:
    logits, targets = random_logits(5, 2 * BLOCK + 6)
    logits[:4, column] = bad
    logits[1], logits[2, :BLOCK], logits[2, BLOCK + 1 :] = bad, -INF, bad
    targets[3] = column
    everything = torch.arange(logits.shape[1]).repeat(5)
    for options in ({}, {"support": Support(everything, torch.arange(6) * logits.shape[1])}):
        ours = solve(problem_of(logits, targets, **options))
        assert ours.logprobs.isnan().tolist() == ours.entropy.isnan().tolist() == [True] * 4 + [False]
        assert ours.gradient[:4].isnan().all() and ours.gradient[4].isfinite().all()


@pytest.mark.parametrize("temperature", [0.6, 0.7, 0.9])
def test_no_log_prob_of_a_likely_id_is_above_zero(temperature: float) -> None:
    logits, _ = random_logits(40, 40, scale=30.0)
    assert_exact(problem_of(logits.bfloat16(), logits.argmax(1), temperature=temperature))
    assert_exact(problem_of(torch.full((3, 2 * BLOCK + 1), 2.5), torch.arange(3), temperature=temperature))


@KEPT
def test_a_row_without_a_finite_logit_is_minus_infinity_with_zero_entropy_and_gradient(kept: bool) -> None:
    one = problem(kept, 3)
    one.logits[1] = -INF
    ours = assert_exact(one)
    assert ours.logprobs[1] == -INF and ours.entropy[1] == 0 and (ours.gradient[1] == 0).all()


def test_the_target_gradient_of_bf16_logits_survives_cancellation() -> None:
    logits = torch.zeros(20, 6, dtype=torch.bfloat16)
    logits[:, 0] = torch.linspace(0, 9, 20)
    one = Problem(logits, torch.zeros(20, dtype=torch.int64), {}, torch.ones(20))
    ours, true = solve(one).gradient[:, 0], solve_exactly(one).gradient[:, 0]
    assert true.min() < 1e-3
    # one rounding to bf16; forming onehot - p in bf16 would give 0 below 2**-9
    assert ((ours - true).abs() <= 2**-7 * true).all()


def test_upstream_gradients_scale_every_row_also_when_expanded() -> None:
    logits, targets = random_logits(6, BLOCK + 1)
    ups = torch.arange(1.0, 7.0), torch.tensor(2.5).expand(6), torch.arange(1.0, 13.0)[::2]
    gradients = [assert_exact(Problem(logits, targets, {}, up, -up)).gradient for up in ups]
    assert not torch.allclose(gradients[0], gradients[1]) and not torch.allclose(gradients[0], gradients[2])


@KEPT
@pytest.mark.parametrize("widths", [(107,), (53, 54), (21, 54, 32), (1, 106), (21, 21, 21, 21, 23), (32, 32, 32, 11)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shards_that_are_merged_equal_the_fp64_truth(widths: tuple[int, ...], dtype: torch.dtype, kept: bool) -> None:
    one = problem(kept, 6, 107)
    # the last shards are padding, in part or altogether, which holds anything
    one.logits[:, 93:], one.targets = torch.nan, one.targets % 93
    one.options |= {"temperature": torch.linspace(0.5, 2, 6), "mask": torch.arange(6) % 5 != 2, "vocab_size": 93}
    one = replace(one, logits=one.logits.to(dtype), widths=widths)
    for found, true in zip(solve(one)[:2], solve_exactly(one)[:2], strict=True):
        torch.testing.assert_close(found, true, atol=4e-6, rtol=0)
    rounding = 4 * 2**-23 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(solve(one).gradient, solve_exactly(one).gradient, atol=2e-5, rtol=rounding)


@pytest.mark.parametrize("wrap", ["checkpoint", "reentrant checkpoint", "autocast"])
def test_checkpointing_and_autocast_change_no_bit(wrap: str, device: torch.device) -> None:
    logits, targets = random_logits(4, 2 * BLOCK + 5)

    def head(logits: Tensor) -> Tensor:
        found = vocab_parallel_logprobs(logits * 1, targets, with_entropy=True)
        return (found[0] + 0.1 * found[1]).sum()

    def wrapped(leaf: Tensor) -> Tensor:
        if wrap != "autocast":
            return checkpoint(head, leaf, use_reentrant="reentrant" in wrap)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return head(leaf)

    leaves = [logits.bfloat16().requires_grad_() for _ in range(2)]
    values = [head(leaves[0]), wrapped(leaves[1])]
    for value in values:
        value.backward()
    assert torch.equal(*values) and torch.equal(leaves[0].grad, leaves[1].grad)


@pytest.mark.parametrize("kept", [False, True])
def test_a_temperature_divides_differences_of_logits_which_are_exact_for_close_ones(kept: bool) -> None:
    # divided first, neighbours would be rounded to numbers as far apart as their quotients
    logits = (torch.tensor([[60.0], [-60.0], [33.0]]) - torch.arange(9.0) * 2**-18).repeat(3, 1).requires_grad_()
    targets, temperature = torch.tensor([0, 3, 8] * 3), torch.tensor([0.7, 0.9, 1.3]).repeat_interleave(3)
    support = Support(torch.arange(9).repeat(9), torch.arange(10) * 9) if kept else None
    lp = vocab_parallel_logprobs(logits, targets, temperature=temperature, support=support)
    leaf, true_lp, _ = truth(logits, targets, temperature=temperature, support=support)
    found, true = (torch.autograd.grad(y.sum(), x)[0] for y, x in ((lp, logits), (true_lp, leaf)))
    assert (lp - true_lp).abs().max() <= 4e-7 and (found - true).abs().max() <= 2e-7


@KEPT
@pytest.mark.parametrize("shape", [(0, 5, 8), (3, 0, 8), (0, 8)])
def test_logits_without_a_row_give_an_empty_answer_with_a_gradient(shape: tuple[int, ...], kept: bool) -> None:
    logits, targets = torch.zeros(shape, requires_grad=True), torch.zeros(shape[:-1], dtype=torch.int64)
    support = Support(targets.flatten(), torch.zeros(1, dtype=torch.int64)) if kept else None
    lp, entropy = vocab_parallel_logprobs(logits, targets, support=support, with_entropy=True)
    (lp.sum() + entropy.sum()).backward()
    assert lp.shape == entropy.shape == shape[:-1]
    assert logits.grad is not None and logits.grad.shape == shape


def test_inplace_backward_twice_raises() -> None:
    logits, targets = random_logits(3, 8)
    lp = vocab_parallel_logprobs(logits.requires_grad_() * 1, targets, inplace_backward=True)
    lp.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        lp.sum().backward()


def test_inplace_backward_raises_in_another_operation_that_saved_the_logits() -> None:
    leaf, targets = random_logits(3, 8)
    logits = leaf.requires_grad_() * 1
    squared = (logits**2).sum()
    torch.autograd.grad(vocab_parallel_logprobs(logits, targets, inplace_backward=True).sum(), leaf, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_at_most_twice_that_of_log_softmax(dtype: torch.dtype) -> None:
    logits, targets = random_logits(64, 5003, scale=8.0)
    logits, up = logits.to(dtype), torch.randn(64, generator=torch.Generator().manual_seed(3))
    leaf, true_lp, _ = truth(logits, targets)
    (true,) = torch.autograd.grad(true_lp, leaf, up.double())
    errors = []
    for ours in (True, False):
        x = logits.detach().requires_grad_()
        plain = torch.log_softmax(x.float(), 1).gather(1, targets[:, None])[:, 0]
        lp = vocab_parallel_logprobs(x, targets) if ours else plain
        (gradient,) = torch.autograd.grad(lp, x, up)
        errors.append(((lp - true_lp).abs().max(), (gradient - true).abs().max()))
    assert all(mine <= 2 * other + 1e-7 for mine, other in zip(*errors, strict=True))
