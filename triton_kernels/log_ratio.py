"""Log-ratios of lanes of tokens, and e^x - 1 and e^x - 1 - x of them."""

import triton
import triton.language as tl

_POSITIVE_FROM = tl.constexpr(1e-3)  # nats, as in megatron_rc/correction/sums.py: what is above it is not rounding


@triton.jit
def load_log_ratio(train_logprobs, rollout_logprobs, loss_mask, rows, inside):
    """(l, log mu, valid, loss, positive); l and log mu are fp32, and 0 where a token is not valid."""
    loss = tl.load(loss_mask + rows, mask=inside, other=0) != 0
    rollout = tl.load(rollout_logprobs + rows, mask=inside, other=0.0).to(tl.float32)
    train = tl.load(train_logprobs + rows, mask=inside, other=0.0).to(tl.float32)
    # false for NaN or +inf on either side, and for -inf from the sampler
    valid = loss & (train <= _POSITIVE_FROM) & (rollout <= _POSITIVE_FROM) & (rollout > float("-inf"))
    # and no NaN beside it
    positive = loss & ((train > _POSITIVE_FROM) | (rollout > _POSITIVE_FROM)) & (train == train) & (rollout == rollout)
    return tl.where(valid, train - rollout, 0.0), tl.where(valid, rollout, 0.0), valid, loss, positive


@triton.jit
def k3(x):
    """e^x - 1 - x to fp32 accuracy for every x: below 1, where the difference cancels, sum_n x^n / n!, n = 2 to 13."""
    near = tl.abs(x) < 1.0
    small = tl.where(near, x, 0.0)
    series = tl.full(x.shape, 1.0, tl.float32)
    for n in tl.static_range(13, 2, -1):
        series = 1.0 + small * series * (1.0 / n)
    return tl.where(near, 0.5 * small * small * series, tl.exp(x) - 1.0 - x)


@triton.jit
def expm1(x, exp_x):
    """e^x - 1 in fp64 from x and e^x: below 0.1, where the difference cancels, sum_n x^n / n!, n = 1 to 10."""
    near = tl.abs(x) < 0.1
    small = tl.where(near, x, 0.0)
    series = small * 0.0 + 1.0
    for n in tl.static_range(10, 1, -1):
        series = 1.0 + small * series * (1.0 / n)
    return tl.where(near, small * series, exp_x - 1.0)


@triton.jit
def k3_exact(x, exp_x):
    """e^x - 1 - x in fp64 from x and e^x: unlike fp32, which k3 serves, it has digits to spare for the difference."""
    return expm1(x, exp_x) - x
