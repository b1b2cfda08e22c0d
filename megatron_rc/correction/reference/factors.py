"""The two factors of rho: mismatch = sampling / rollout, and staleness = train / sampling."""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rc.correction.inputs import Pair
from megatron_rc.correction.reference.log_ratio import LogRatio, k3
from megatron_rc.correction.sums import FACTOR_SUMS, Key


class LogFactors(NamedTuple):
    """Logs of the factors, [N], 0 where a token is not valid; their sum is l up to rounding."""

    mismatch: Tensor
    staleness: Tensor
    """-inf where pi is 0."""


def log_factors(pair: Pair, sampling_logprobs: Tensor, ratio: LogRatio) -> LogFactors:
    """From log-probs of any float dtype."""
    dtype, valid = ratio.value.dtype, ratio.valid
    train, rollout, sampling = (
        tensor.reshape(-1).to(dtype) for tensor in (pair.train_logprobs, pair.rollout_logprobs, sampling_logprobs)
    )
    return LogFactors(torch.where(valid, sampling - rollout, 0), torch.where(valid, train - sampling, 0))


def factor_statistics(factors: LogFactors, valid: Tensor, bound: float) -> dict[Key, Tensor]:
    """0-d sums over valid tokens, by FACTOR_SUMS."""
    sums: list[Tensor] = []
    for log_value in factors:
        ell = log_value.double().clamp(-bound, bound)
        rho = ell.exp() * valid
        sums += [rho.sum(), rho.square().sum(), k3(ell).sum()]
    return dict(zip(FACTOR_SUMS, sums, strict=True))
