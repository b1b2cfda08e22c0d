"""Join the softmax statistics of all vocabulary shards, in rank order: the same bits on every rank."""

import triton
import triton.language as tl
from torch import Tensor

from .device import on_its_device
from .launch_table import LAUNCH
from .softmax import FLOOR, OF_ROWS, POINTERS, Softmax, finish_row, load_inverse, row_offset, with_strides


@triton.jit(do_not_specialize=[*OF_ROWS, "num_rows", "num_shards"], do_not_specialize_on_alignment=POINTERS)
def merge_statistics_fwd_kernel(
    gathered,  # [R, 4, N] the statistics of row_statistics_fwd of every shard
    temperature,  # a number, or [N] or [B, T]
    mask,  # [N] or [B, T], or None
    logprobs,  # [N] nats
    entropy,  # [N] nats, if WITH_ENTROPY
    maximum,  # [N] the largest logit, 0 if that is -inf
    log_sum,  # [N] log sum e^((logit - maximum) / temperature)
    num_rows, num_shards, rows_per_page,
    stride_temperature_page, stride_temperature, stride_mask_page, stride_mask,
    TEMPERATURE_PER_ROW: tl.constexpr, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = rows < num_rows
    # elements from one of the four statistics to the next
    step = tl.cast(num_rows, tl.int64)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    target = tl.full([BLOCK], float("-inf"), tl.float32)
    for shard in range(num_shards):
        statistics = gathered + tl.cast(shard, tl.int64) * 4 * step + rows
        top = tl.maximum(top, tl.load(statistics, mask=here, other=0.0))
        target = tl.maximum(target, tl.load(statistics + 3 * step, mask=here, other=0.0))
    base = tl.where(top == float("-inf"), 0.0, top)
    kept = here
    if mask is not None:
        kept = tl.load(mask + row_offset(rows, rows_per_page, stride_mask_page, stride_mask), mask=here, other=0) != 0
    inverse = load_inverse(
        temperature, rows, rows_per_page, stride_temperature_page, stride_temperature, kept, TEMPERATURE_PER_ROW
    )
    total = tl.zeros([BLOCK], tl.float32)
    shifted = tl.zeros([BLOCK], tl.float32)
    for shard in range(num_shards):
        statistics = gathered + tl.cast(shard, tl.int64) * 4 * step + rows
        # a NaN lives on in the sums of its shard
        down = tl.maximum((tl.load(statistics, mask=here, other=0.0) - base) * inverse, FLOOR)
        keep = tl.exp(down)
        part = tl.load(statistics + step, mask=here, other=0.0)
        total += keep * part
        if WITH_ENTROPY:
            shifted += keep * (tl.load(statistics + 2 * step, mask=here, other=0.0) + down * part)

    row_logprobs, row_entropy, row_maximum, row_log_sum = finish_row(top, total, shifted, target, inverse)
    tl.store(logprobs + rows, tl.where(kept, row_logprobs, 0.0), mask=here)
    tl.store(maximum + rows, row_maximum, mask=here)
    tl.store(log_sum + rows, row_log_sum, mask=here)
    if WITH_ENTROPY:
        tl.store(entropy + rows, tl.where(kept, row_entropy, 0.0), mask=here)


@on_its_device
def merge_statistics_fwd(
    gathered: Tensor, mask: Tensor | None, temperature: float | Tensor, *, with_entropy: bool
) -> Softmax:
    """logprob = (x[target] - M) / temperature - log S and entropy = log S - U / S of every row, from R shards.

    With M = max_r m_r, b_r = (m_r - M) / temperature and a_r = e^b_r: S = sum_r a_r s_r, U = sum_r a_r (u_r + b_r s_r),
    from the statistics (m_r, s_r, u_r, x[target]) of each shard. One launch.

    Args:
        gathered: [R, 4, N] fp32 contiguous, the statistics of row_statistics_fwd in rank order.
        mask: [N] or [B, T]; a row with 0 has logprob and entropy 0.
        temperature: that of the statistics, a number, or [N] or [B, T].
        with_entropy: compute the entropy.

    Returns:
        The softmax, [N] each.
    """
    launch = LAUNCH["merge_statistics"]
    num_shards, _, num_rows = gathered.shape
    softmax = Softmax.empty(num_rows, gathered.device, with_entropy=with_entropy)
    per_row = [each for each in (mask, temperature) if isinstance(each, Tensor)]
    merge_statistics_fwd_kernel[(triton.cdiv(num_rows, launch.block),)](
        gathered=gathered,
        **softmax._asdict(),
        num_rows=num_rows,
        num_shards=num_shards,
        rows_per_page=per_row[0].shape[-1] if per_row else num_rows,
        **with_strides(temperature=temperature, mask=mask),
        TEMPERATURE_PER_ROW=isinstance(temperature, Tensor),
        WITH_ENTROPY=with_entropy,
        BLOCK=launch.block,
        **launch.options,
    )
    return softmax
