"""The metrics of every token are those that `correct` averages."""

import pytest
import torch

from megatron_rc import RolloutCorrection, correct
from megatron_rc.correction.per_token import per_token


def test_means_over_loss_tokens_are_the_metrics_of_the_correction() -> None:
    rollout = -torch.rand(64, generator=torch.Generator().manual_seed(1)) * 3
    train = rollout + torch.randn(64, generator=torch.Generator().manual_seed(2)) * 0.5
    train = train.clamp(max=0)
    mask, correction = torch.arange(64) % 5 != 0, RolloutCorrection.of("token-mis")
    train[1], train[5] = torch.nan, torch.nan
    offsets = torch.tensor([0, 64], dtype=torch.int32)
    corrected = correct(train, rollout, mask, correction=correction, cu_seqlens=offsets)
    found = per_token(train, rollout, mask, corrected, correction)
    values, sound = corrected.metrics.values(), mask & train.isfinite()
    assert all(value.dtype == torch.float32 and not value[~mask].any() for value in found.values())
    for name in ("k1", "k3", "chi2_token"):
        assert found[name][sound].mean().item() == pytest.approx(values[name], rel=1e-5)
    assert found["nonfinite_share"].sum() == 1, "the other one is no loss token"
    assert torch.equal(found["weight_squared"], corrected.weights.square())
    assert torch.equal(found["masked_token"] == 1, sound & ~corrected.mask) and found["masked_token"].any()
