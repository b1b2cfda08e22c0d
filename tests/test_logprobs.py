"""vocab_parallel_logprobs on one process: values and gradients against fp64, known bugs of its kind by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rc import logprobs as module
from megatron_rc.batch import Support
from megatron_rc.logprobs import vocab_parallel_logprobs

INF = float("inf")
EPSILON = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6}
GRADIENT_EPSILON = {**EPSILON, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def truth(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    vocab_size: int | None = None,
    support: Support | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(fp64 leaf, log-probs, entropy), by log_softmax over the legal ids of every row and autograd."""
    leaf = logits.detach().double().requires_grad_()
    rows, width = logits.shape
    legal = (torch.arange(width) < (vocab_size or width)).expand(rows, width)
    if support is not None:
        kept = torch.zeros(rows, width, dtype=torch.bool)
        kept[torch.arange(rows).repeat_interleave(support.offsets.diff()), support.ids] = True
        legal = legal & kept
    legal = legal & (leaf.detach() != -INF)
    row_kept = torch.ones(rows, dtype=torch.bool) if mask is None else mask.bool()
    some = legal.any(1) & row_kept
    z = leaf / (temperature.double()[:, None] if isinstance(temperature, Tensor) else temperature)
    z = torch.where(legal & some[:, None], z, torch.where(some, -INF, 0.0)[:, None])
    lp = torch.log_softmax(z, 1)
    entropy = -(lp.exp() * torch.where(legal, lp, 0)).sum(1)
    inside = (targets >= 0) & (targets < width)
    column = torch.where(inside, targets, 0)[:, None]
    inside = inside & legal.gather(1, column)[:, 0]
    lp = torch.where(inside, lp.gather(1, column)[:, 0], -INF)
    return leaf, torch.where(row_kept, lp, 0), torch.where(some, entropy, 0)


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


def random_logits(rows: int, width: int, seed: int = 0, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(rows, width, generator=generator), torch.randint(0, width, (rows,), generator=generator)


def random_support(targets: Tensor, width: int, generator: torch.Generator) -> Support:
    """The target and a random share of the other ids of every row, unordered."""
    kept = torch.rand(len(targets), width, generator=generator) < 0.3
    kept[torch.arange(len(targets)), targets.clamp(0, width - 1)] = True
    ids = [row.nonzero()[:, 0].flip(0) for row in kept]
    return Support(torch.cat([*ids, torch.zeros(0, dtype=torch.int64)]), torch.tensor([0, *map(len, ids)]).cumsum(0))


def logprobs_of(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    lp = vocab_parallel_logprobs(logits, targets, **options)
    assert isinstance(lp, Tensor)
    return lp


class Operations(TorchDispatchMode):
    """Names of the operations that ran, and the elements of the largest fp32 result."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest_fp32 = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        if isinstance(result, Tensor) and result.dtype == torch.float32 and result._base is None:
            self.largest_fp32 = max(self.largest_fp32, result.numel())
        return result


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
    lp = logprobs_of(logits, targets, vocab_size=7)
    assert lp.tolist() == [-INF] * 5
    lp.backward(torch.randn(5))
    assert logits.grad is not None and (logits.grad == 0).all()


@pytest.mark.parametrize("bad", [torch.nan, -INF, INF])
def test_rows_with_mask_zero_are_zero_and_have_no_gradient_whatever_they_hold(bad: float) -> None:
    logits, targets = random_logits(4, 12)
    targets[1], logits[1], logits[2, 5] = -100, bad, bad
    logits.requires_grad_()
    mask = torch.tensor([1, 0, 0, 1])
    temperature = torch.tensor([1.0, 0.0, torch.nan, 2.0])
    lp, entropy = vocab_parallel_logprobs(logits, targets, mask=mask, temperature=temperature, with_entropy=True)
    assert (lp[1:3] == 0).all() and (entropy[1:3] == 0).all()
    torch.autograd.backward([lp, entropy], [torch.full((4,), torch.nan).where(mask == 0, 1)] * 2)
    assert logits.grad is not None
    assert (logits.grad[1:3] == 0).all() and (logits.grad[::3] != 0).any(1).all()


def test_a_zero_upstream_gradient_gives_exactly_zero_even_for_a_nan_row() -> None:
    logits, targets = random_logits(3, 12)
    logits[1, 3] = torch.nan
    logits.requires_grad_()
    lp = logprobs_of(logits, targets)
    assert lp[1].isnan() and lp[::2].isfinite().all()
    lp.backward(torch.tensor([1.0, 0.0, 1.0]))
    assert logits.grad is not None and (logits.grad[1] == 0).all() and logits.grad.isfinite().all()


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


def test_a_row_does_not_depend_on_its_batch_its_position_or_its_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets = random_logits(7, 70_001)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        whole = vocab_parallel_logprobs(logits, targets, with_entropy=True)
        for row in range(7):
            alone = vocab_parallel_logprobs(logits[row : row + 1], targets[row : row + 1], with_entropy=True)
            assert torch.equal(alone[0], whole[0][row : row + 1]) and torch.equal(alone[1], whole[1][row : row + 1])
        columns = vocab_parallel_logprobs(logits.t().contiguous().t(), targets, with_entropy=True)
        assert torch.equal(columns[0], whole[0]) and torch.equal(columns[1], whole[1])
        monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 2 * 70_001)
        chunked = vocab_parallel_logprobs(logits, targets, with_entropy=True)
        assert torch.equal(chunked[0], whole[0]) and torch.equal(chunked[1], whole[1])
    finally:
        torch.set_num_threads(threads)


def test_padded_layout_equals_packed_for_any_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 40)
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(5, 3, 17, generator=generator).transpose(0, 1)
    targets = torch.randint(0, 17, (3, 5), generator=generator)
    mask, temperature = torch.rand(3, 5, generator=generator) < 0.7, 0.5 + torch.rand(3, 5, generator=generator)
    up = torch.randn(3, 5, generator=generator)
    for support in (None, random_support(targets.reshape(-1), 17, generator)):
        padded, packed = logits.detach().requires_grad_(), logits.reshape(15, 17).detach().requires_grad_()
        lp, entropy = vocab_parallel_logprobs(
            padded, targets, mask=mask, temperature=temperature, support=support, with_entropy=True
        )
        flat_lp, flat_entropy = vocab_parallel_logprobs(
            packed,
            targets.reshape(-1),
            mask=mask.reshape(-1),
            temperature=temperature.reshape(-1),
            support=support,
            with_entropy=True,
        )
        assert lp.shape == (3, 5) and torch.equal(lp.reshape(-1), flat_lp)
        assert torch.equal(entropy.reshape(-1), flat_entropy)
        (lp * up + entropy).sum().backward()
        (flat_lp * up.reshape(-1) + flat_entropy).sum().backward()
        assert padded.grad is not None and packed.grad is not None
        assert torch.equal(padded.grad.reshape(15, 17), packed.grad)


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


@pytest.mark.parametrize("with_support", [False, True])
def test_inplace_backward_gives_the_same_gradient_in_the_memory_of_the_logits(with_support: bool) -> None:
    hidden, targets = random_logits(6, 8)
    weight = torch.randn(8, 30, generator=torch.Generator().manual_seed(2)).requires_grad_()
    targets = targets * 3
    support = random_support(targets, 30, torch.Generator().manual_seed(1)) if with_support else None
    gradients, storages = [], []
    for inplace in (False, True):
        logits = hidden @ weight
        logits.register_hook(lambda gradient: storages.append(gradient.data_ptr()))
        lp, entropy = vocab_parallel_logprobs(
            logits, targets, support=support, inplace_backward=inplace, with_entropy=True
        )
        gradients += torch.autograd.grad((lp * torch.arange(6)).sum() + entropy.sum(), weight)
        storages[-1] = storages[-1] == logits.data_ptr()
    assert torch.equal(*gradients) and storages == [False, True]


def test_inplace_backward_twice_raises() -> None:
    logits, targets = random_logits(3, 8)
    lp = logprobs_of(logits.requires_grad_() * 1, targets, inplace_backward=True)
    lp.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        lp.sum().backward()


def test_inplace_backward_raises_in_another_operation_that_saved_the_logits() -> None:
    leaf, targets = random_logits(3, 8)
    logits = leaf.requires_grad_() * 1
    squared = (logits**2).sum()
    lp = logprobs_of(logits, targets, inplace_backward=True)
    torch.autograd.grad(lp.sum(), leaf, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()


def test_logits_written_to_after_forward_raise_in_backward() -> None:
    leaf, targets = random_logits(3, 8)
    logits = leaf.requires_grad_() * 1
    lp = logprobs_of(logits, targets)
    logits.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        lp.sum().backward()


def test_arguments_reused_before_backward_change_nothing() -> None:
    logits, targets = random_logits(4, 9)
    expected, given_logits = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    temperature, mask = torch.tensor([0.5, 1, 2, 3]), torch.tensor([True, False, True, True])
    logprobs_of(expected, targets.clone(), temperature=temperature.clone(), mask=mask.clone()).sum().backward()
    lp = logprobs_of(given_logits, targets, temperature=temperature, mask=mask)
    targets.zero_(), temperature.fill_(7), mask.fill_(False)
    lp.sum().backward()
    assert expected.grad is not None and given_logits.grad is not None
    assert torch.equal(expected.grad, given_logits.grad)


@pytest.mark.parametrize("with_support", [False, True])
def test_nothing_waits_for_the_device(with_support: bool) -> None:
    logits, targets = random_logits(8, 40)
    support = random_support(targets, 40, torch.Generator().manual_seed(1)) if with_support else None
    with Operations() as operations:
        lp, entropy = vocab_parallel_logprobs(
            logits.requires_grad_(),
            targets,
            temperature=torch.ones(8),
            mask=torch.ones(8),
            vocab_size=39,
            support=support,
            with_entropy=True,
        )
        (lp.sum() + entropy.sum()).backward()
    waits = {"_local_scalar_dense", "item", "nonzero", "masked_select", "is_nonzero", "equal", "unique_dim", "_unique2"}
    assert len(operations.names) > 30 and not waits & set(operations.names)


def test_bf16_logits_are_never_copied_to_fp32_as_a_whole() -> None:
    logits = torch.randn(600, 2**14).bfloat16().requires_grad_()
    with Operations() as operations:
        lp = logprobs_of(logits, torch.arange(600))
        lp.sum().backward()
    assert operations.largest_fp32 == 2**22 < logits.numel()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"backend": "triton"}, "backend 'triton' is not part of this build"),
        ({"backend": "cuda"}, "backend must be 'auto', 'torch' or 'triton', got 'cuda'"),
        ({"temperature": 0.0}, "temperature must be > 0, got 0.0"),
        ({"temperature": torch.ones(3)}, "temperature must have the shape (4,)"),
        ({"mask": torch.ones(4, 1)}, "mask must have the shape (4,)"),
        ({"targets": torch.zeros(5, dtype=torch.int64)}, "targets must have the shape (4,)"),
        ({"vocab_size": 10}, "vocab_size must be between 1 and the 9 ids of all shards, got 10"),
        ({"logits": torch.zeros(4)}, "logits must be floating point [N, V_local]"),
        ({"logits": torch.zeros(4, 9, dtype=torch.int64)}, "logits must be floating point"),
        ({"support": Support(torch.zeros(0), torch.zeros(4))}, "support.offsets must have 5 entries for 4 rows"),
        ({"logits": torch.zeros(1, 9).expand(4, 9), "inplace_backward": True}, "inplace_backward must be False"),
    ],
)
def test_bad_input_is_named(options: dict[str, Any], sentence: str) -> None:
    arguments = {"logits": torch.zeros(4, 9), "targets": torch.zeros(4, dtype=torch.int64), **options}
    with pytest.raises(ValueError) as error:
        vocab_parallel_logprobs(**arguments)
    assert str(error.value).startswith(sentence)
