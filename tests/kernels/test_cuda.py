"""What a card adds to the mathematics: graphs, streams, no waits, other devices, compilers, and sizes as in a run.

The calls are those of tests/support/kernel_calls.py, which test_aot.py compiles without a card.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from head_case import by_head, distance, exact, head_case
from kernel_calls import CALLS, COVERED, ON_A_CARD
from kernel_correction_data import SEGMENTS, assert_agrees, batch_of
from loss_batch import answered, tokens
from on_device import MadeByTests
from row_problems import Problem, assert_exact, kept_problem
from torch import Tensor

from megatron_rc import correct, vocab_parallel_logprobs
from megatron_rc.batch import Support
from megatron_rc.correction.settings import PRESETS, RolloutCorrection

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("no_debug_checks")]

EVERY_CALL = pytest.mark.parametrize("name", [name for name in CALLS if name not in COVERED])
WIDTHS = (1, 127, 128, 1187, 4095, 4096, 4097, 18_992, 32_768, 50_257, 131_072, 151_936, 262_144)
LENGTHS = {
    "one long sequence": [200_000],
    "as many sequences as tokens": [1] * 20_000,
    "5,000 sequences, half of them empty": [13, 0] * 2500,
    "lengths around a block": [1023, 1024, 1025, 2047, 2048, 2049, 0, 1],
    "a million tokens": [1000, 0, 3000, 2000] * 170,
}


@contextmanager
def as_outside_of_tests() -> Iterator[None]:
    """Without the filling of new memory, which launches and which some operations of PyTorch refuse to record."""
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True, warn_only=True)


def assert_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        # NaN equals NaN
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@EVERY_CALL
def test_two_runs_have_the_same_bits(name: str) -> None:
    run = CALLS[name](ON_A_CARD, 0).run
    assert_bits(run("triton").bits(), run("triton").bits())


@EVERY_CALL
def test_a_graph_that_was_captured_once_is_replayed_on_other_data(name: str) -> None:
    calls = [CALLS[name](ON_A_CARD, seed) for seed in range(3)]
    with as_outside_of_tests():
        expected = [call.run("triton").bits() for call in calls]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                calls[0].run("triton")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = calls[0].run("triton")
        for call, bits in zip(calls, expected, strict=True):
            for mine, its in zip(calls[0].inputs, call.inputs, strict=True):
                mine.copy_(its)
            graph.replay()
            assert_bits(results.bits(), bits)


@EVERY_CALL
def test_two_streams_at_once_do_not_disturb_each_other(name: str) -> None:
    calls = [CALLS[name](ON_A_CARD, seed) for seed in (1, 2)]
    expected = [call.run("triton").bits() for call in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    answers = []
    for _ in range(5):
        for stream, call in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                answers.append(call.run("triton"))
    torch.cuda.synchronize()
    for answer, bits in zip(answers, itertools.cycle(expected), strict=False):
        assert_bits(answer.bits(), bits)


@EVERY_CALL
def test_nothing_waits_for_the_device(name: str) -> None:
    call = CALLS[name](ON_A_CARD, 0)
    with as_outside_of_tests():
        call.run("triton")
        torch.cuda.set_sync_debug_mode("error")
        try:
            answer = call.run("triton")
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(tensor.is_cuda for tensor in answer.tensors.values())


@EVERY_CALL
def test_tensors_may_be_on_a_device_that_is_not_the_current_one(name: str) -> None:
    if torch.cuda.device_count() < 2 or torch.cuda.get_device_name(0) != torch.cuda.get_device_name(1):
        pytest.skip("needs two CUDA devices of one kind")
    expected = CALLS[name](ON_A_CARD, 0).run("triton").bits()
    with MadeByTests(torch.device("cuda", 1)):
        found = CALLS[name](ON_A_CARD, 0).run("triton").bits()
    assert torch.cuda.current_device() == 0
    assert_bits([part.cpu() for part in found], [part.cpu() for part in expected])


def test_a_tensor_that_is_not_on_the_card_is_named() -> None:
    values = torch.zeros(3)
    with pytest.raises(ValueError, match=r"^loss_mask must be on a CUDA device for backend 'triton', got cpu"):
        mask = torch.ones(3, dtype=torch.bool, device="cpu")
        correct(values, values, mask, correction="none", cu_seqlens=torch.tensor([0, 3]), backend="triton")


def rows(count: int, width: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(count, width, generator=generator)).to(dtype)
    up, up_entropy = torch.randn(2, count, generator=generator)
    return Problem(logits, torch.randint(width, (count,), generator=generator), {}, up, up_entropy)


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_any_width(width: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        assert_exact(rows(48, width, dtype))


@pytest.mark.parametrize(("count", "width"), [(70_000, 33), (2**20, 257)])
def test_more_rows_than_a_second_axis_of_the_grid_has(count: int, width: int) -> None:
    assert_exact(rows(count, width))


@pytest.mark.parametrize("kept", [1, 128, 600])
def test_kept_ids_of_a_real_vocabulary(kept: int) -> None:
    problem = kept_problem(64, 5000, kept, temperature=0.7)
    for dtype in (torch.bfloat16, torch.float32):
        assert_exact(replace(problem, logits=problem.logits.to(dtype)))


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("bits", [31, 32])
def test_the_last_rows_of_more_elements_than_an_integer_counts(bits: int, kept: bool) -> None:
    width, last = 151_936, 8
    count = 2**bits // width + last + 1
    if torch.cuda.mem_get_info()[0] < 6 * count * width + 2**32:
        pytest.skip("needs 30 GiB of free memory")
    near = rows(last, width)
    logits, targets = torch.zeros(count, width, dtype=torch.bfloat16), torch.zeros(count).long()
    ups = torch.zeros(2, count)
    logits[-last:], targets[-last:] = near.logits, near.targets
    ups[0, -last:], ups[1, -last:] = near.up, near.up_entropy
    # every row keeps its target and the id behind it
    support = Support(torch.stack([targets, (targets + 1) % width], 1).flatten(), 2 * torch.arange(count + 1))
    of_last = support.select(torch.arange(count - last, count)) if kept else None
    found = answer(logits, targets, ups, support if kept else None)
    expected = answer(near.logits.clone(), near.targets, ups[:, -last:], of_last)
    for far, close in zip(found, expected, strict=True):
        torch.testing.assert_close(far[-last:], close, rtol=1e-6, atol=1e-7)


def answer(logits: Tensor, targets: Tensor, ups: Tensor, support: Support | None) -> list[Tensor]:
    view = logits.requires_grad_().view_as(logits)
    options = {"with_entropy": True, "inplace_backward": True, "support": support}
    found = vocab_parallel_logprobs(view, targets, backend="triton", **options)
    return [*(part.detach() for part in found), *torch.autograd.grad(found, view, list(ups))]


@pytest.mark.parametrize(
    "correction", [SEGMENTS, PRESETS["geo-mask-token-tis"].correction, PRESETS["seq-mis"].correction]
)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_correction_of_many_tokens(lengths: str, correction: RolloutCorrection) -> None:
    assert_agrees(batch_of(LENGTHS[lengths], gap=0.02), correction)


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025, 2**20])
def test_a_loss_of_many_tokens(count: int) -> None:
    batch = tokens(count)
    options = {"kl_coef": 0.2, "entropy_coef": 0.1, "dual_clip": 3.0}
    found, truth = answered(batch, "triton", **options), answered(batch, "torch", dtype=torch.float64, **options)
    size = sum(abs(truth.metrics.values()[name]) for name in ("policy_loss", "kl_ref", "entropy"))
    assert found.loss.item() == pytest.approx(truth.loss.item(), abs=1e-6 * max(1.0, size))
    assert (found.by_current.double() - truth.by_current).norm() <= 1e-6 * truth.by_current.norm()


@pytest.mark.parametrize("fused", [True, False], ids=["policy_loss", "logprobs"])
@pytest.mark.parametrize("vocabulary", [1187, 50_257, 151_936])
def test_a_head_over_a_real_vocabulary(vocabulary: int, fused: bool) -> None:
    head = head_case(torch.float32, tokens=300, hidden=64, vocabulary=vocabulary)
    head = head._replace(hidden=head.hidden * 0.25)
    found = by_head(head, fused=fused, chunk=128, backend="triton", temperature=0.8)
    assert max(map(distance, found, exact(head, temperature=0.8))) <= 1e-5
