"""eps by confidence, and the rows of the atlas beside it."""

import numpy as np
import pytest

from megatron_rc.analyze import atlas
from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.statistics import displacement


def of_noise(sigma: float, tokens: int = 60_000) -> Chunk:
    """Tokens that mu drew, whose log-odds the trainer sees displaced by normal noise."""
    rng = np.random.default_rng(0)
    odds, eps = rng.normal(2, 4, tokens), rng.normal(0, sigma, tokens)
    pi, mu = -np.log1p(np.exp(-odds)), -np.log1p(np.exp(eps - odds))
    return Chunk(log_pi=pi, log_mu=mu, cu_seqlens=np.array([0, tokens]), tokens={}, sequences={})


def test_noise_on_logits_is_found_at_every_confidence() -> None:
    for one in displacement.by_confidence(of_noise(0.1), 500):
        assert one is not None
        assert one.mean_size == pytest.approx(0.1 * np.sqrt(2 / np.pi), rel=0.05)
        assert (one.low, one.high) == pytest.approx((-0.164, 0.164), abs=0.01)


def test_a_range_of_few_tokens_has_no_value_and_certain_tokens_have_no_log_odds() -> None:
    assert displacement.by_confidence(of_noise(0.1, 40), 30) == [None] * 5
    p = np.array([1e-8, 0.3, 0.999, 1 - 1e-6])
    np.testing.assert_allclose(displacement.log_odds(np.log(p)), np.log(p) - np.log1p(-p), rtol=1e-9)
    assert np.isfinite(displacement.log_odds(np.array([0.0, -1e-12]))).all()


def test_every_curve_of_the_atlas_has_a_value_for_each_range() -> None:
    curves = atlas.by_confidence()
    assert "Qwen1.5-MoE-A2.7B, bf16" in curves
    assert {len(values) for values in curves.values()} == {len(displacement.EDGES) - 1}
