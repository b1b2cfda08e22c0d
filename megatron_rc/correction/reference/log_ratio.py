"""Log-ratios of two policies, and their sums over sequences and segments."""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rc.correction.inputs import Pair
from megatron_rc.correction.reference.segments import unit_sums
from megatron_rc.correction.sums import POSITIVE_FROM


class LogRatio(NamedTuple):
    """l = log pi - log mu per token, fp32 (fp64 for fp64 log-probs)."""

    pair: Tensor
    """[2, N]: l, which is -inf where pi is 0 and mu is not, and log mu; both are 0 where valid is False."""
    valid: Tensor
    """[N] bool: loss tokens whose log-probs are not corrupt."""
    positive: Tensor
    """[N] bool: loss tokens with a log-prob above 0, which is corrupt."""
    loss_mask: Tensor
    """[N] bool."""

    @property
    def value(self) -> Tensor:
        """[N], l."""
        return self.pair[0]

    @property
    def rollout(self) -> Tensor:
        """[N], log mu."""
        return self.pair[1]


def log_ratio(train_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor) -> LogRatio:
    """l = train_logprobs - rollout_logprobs, where pi = 0 is legal and corruption is not.

    NaN and what is above POSITIVE_FROM on either side, and -inf from the sampler, are corrupt. Everything is [N];
    log-probs are of any float dtype, and may be anything, NaN too, where loss_mask is 0.
    """
    dtype = torch.float64 if torch.float64 in (train_logprobs.dtype, rollout_logprobs.dtype) else torch.float32
    train, rollout = train_logprobs.to(dtype), rollout_logprobs.to(dtype)
    # NaN for NaN on either side, and so neither below nor above the limit
    larger = torch.maximum(train, rollout)
    valid = loss_mask & (larger <= POSITIVE_FROM) & (rollout > -torch.inf)
    positive = loss_mask & (larger > POSITIVE_FROM)
    pair = torch.stack([train - rollout, rollout])
    return LogRatio(torch.where(valid, pair, pair.new_zeros(())), valid, positive, loss_mask)


def pair_log_ratio(pair: Pair) -> tuple[LogRatio, Tensor]:
    """l, and the number of the sequence of every row [N]; rows that no sequence covers have no loss."""
    train, rollout, mask = (tensor.reshape(-1) for tensor in pair[:3])
    mask, offsets = mask.bool(), pair.offsets
    rows = torch.arange(len(mask), device=offsets.device, dtype=offsets.dtype)
    # rows that no sequence covers count to the first or the last one
    of_token = torch.bucketize(rows, offsets[1:-1], right=True)
    if pair.cu_seqlens is not None:
        mask = mask & (rows >= offsets[0]) & (rows < offsets[-1])
    return log_ratio(train, rollout, mask), of_token


def log_ratio_sums(ratio: LogRatio, offsets: Tensor) -> Tensor:
    """[4, U] fp64: sum l, sum log mu, valid tokens and loss tokens of every unit, rows offsets[u] to offsets[u + 1]."""
    columns = torch.cat([ratio.pair, ratio.valid[None], ratio.loss_mask[None]])
    # counts too: fp32 would stop at 2^24 tokens per unit
    return unit_sums(columns.double(), offsets)


def k3(log_ratio: Tensor) -> Tensor:
    """e^l - 1 - l. Through expm1, because near l = 0 e^l - 1 would lose all digits to cancellation."""
    return log_ratio.expm1() - log_ratio


def bounded_ratio(log_value: Tensor, lower: float | None, upper: float | None, bound: float) -> Tensor:
    """clamp(rho, lower, upper) with rho = e^l, l clamped to +- bound before exp, and rho = 0 at l = -inf."""
    rho = log_value.clamp(-bound, bound).exp() * (log_value > -torch.inf)
    return rho if lower is None and upper is None else rho.clamp(lower, upper)
