"""How many bytes the kernels move, counted from the interpreter's own loads and stores."""

from typing import Any

import pytest
import torch
from correction_cases import case, correct
from kernel_calls import EVERY_LEVEL
from triton.runtime.errors import InterpreterError

from megatron_rc.correction.settings import PRESETS, RolloutCorrection
from megatron_rc.kernels.row_statistics import row_statistics_fwd
from megatron_rc.kernels.softmax import Rows
from megatron_rc.logprobs.logits import vocab_parallel_logprobs
from speed.traffic import Place, Traffic, counted_traffic

pytestmark = pytest.mark.interpreter

FORWARD, BACKWARD = "row_statistics_fwd_kernel", "row_gradient_bwd_kernel"
CORRECTIONS = {name: preset.correction for name, preset in PRESETS.items()} | {"every level": EVERY_LEVEL}


def traffic_of_rows(logits: torch.Tensor, **options: Any) -> Traffic:
    leaf = logits.requires_grad_()
    targets = torch.arange(leaf.shape[0]) * 7
    with counted_traffic() as traffic:
        logprobs, entropy = vocab_parallel_logprobs(leaf, targets, with_entropy=True, backend="triton", **options)
        torch.autograd.backward((logprobs, entropy), (torch.ones_like(logprobs), torch.ones_like(entropy)))
    return traffic


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [20_000, 8192, 37])
def test_rows_are_read_once_forward_and_read_and_written_once_backward(dtype: torch.dtype, width: int) -> None:
    rows, temperature = 4, torch.tensor([1.0, 0.7, 1.3, 1.0])
    traffic = traffic_of_rows(torch.randn(rows, width).to(dtype), temperature=temperature, mask=torch.ones(rows))
    row = width * dtype.itemsize
    assert rows * row < traffic.total(FORWARD) <= rows * (row + 64)
    assert rows * 2 * row < traffic.total(BACKWARD) <= rows * (2 * row + 64)
    assert traffic.total() == traffic.total(FORWARD) + traffic.total(BACKWARD)


def test_rows_with_mask_0_and_columns_of_padding_are_not_read() -> None:
    rows, width, vocab_size = 4, 9000, 8500
    kept = torch.tensor([True, False, False, True])
    traffic = traffic_of_rows(torch.randn(rows, width), mask=kept, vocab_size=vocab_size, inplace_backward=False)
    read = 2 * vocab_size * 4
    assert traffic.loaded[Place(FORWARD, "logits")] <= read + 2 * 4
    assert traffic.loaded[Place(BACKWARD, "logits")] <= read
    # zeros are a gradient too
    assert traffic.stored[Place(BACKWARD, "out")] == rows * width * 4


@pytest.mark.usefixtures("no_debug_checks")
@pytest.mark.parametrize("correction", CORRECTIONS.values(), ids=CORRECTIONS)
def test_correcting_with_all_metrics_moves_at_most_64_bytes_a_token(correction: RolloutCorrection) -> None:
    batch = case([300, 1, 512, 700, 0, 900, 400, 640, 643], density=0.98)
    tokens = len(batch.mask)
    with counted_traffic() as traffic:
        correct(*batch.arguments, correction=correction, backend="triton", **batch.options)
    assert tokens == 4096
    assert tokens * 14 < traffic.total() <= tokens * 64, traffic


def test_the_counter_sees_a_lane_outside_of_every_argument() -> None:
    logits, targets = torch.randn(3, 100), torch.zeros(3, dtype=torch.int64)
    rows = Rows(targets, 1.0, None, None, None, start=0, num_valid=80)
    with counted_traffic() as traffic:
        row_statistics_fwd(logits[:, :80], rows, with_entropy=False, merged=True)
        # every logit of the row, and the target's again
        assert traffic.loaded[Place(FORWARD, "logits")] == 3 * (80 + 1) * 4
        with pytest.raises(InterpreterError, match="outside of its arguments"):
            row_statistics_fwd(logits[:, :80], rows._replace(num_valid=81), with_entropy=False, merged=True)
