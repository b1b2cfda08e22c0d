"""The functions of log-ratios inside kernels."""

import pytest
import torch
import triton
import triton.language as tl

from megatron_rc.kernels.log_ratio import expm1

pytestmark = pytest.mark.kernel


@triton.jit
def expm1_kernel(
    x,  # [N] fp64
    out,  # [N] fp64 out
    N: tl.constexpr,
):
    index = tl.arange(0, N)
    value = tl.load(x + index)
    tl.store(out + index, expm1(value, tl.exp(value)))


def test_expm1_is_exact_to_rounding_from_the_smallest_numbers_to_where_exp_minus_1_takes_over() -> None:
    sizes = torch.logspace(-18, 0.3, 256, dtype=torch.float64)
    x = torch.cat([-sizes, sizes])
    found = torch.empty_like(x)
    expm1_kernel[(1,)](x, found, N=len(x))
    # the difference e^x - 1 loses the most at 0.1: half a unit of 2^-52 in the last place of e^x, over 0.1
    torch.testing.assert_close(found, x.expm1(), rtol=2e-15, atol=0)
