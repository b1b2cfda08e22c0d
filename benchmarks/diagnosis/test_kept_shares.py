"""The tables of docs/presets.md are what their command prints."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from diagnosis import kept_shares

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]


def test_the_tables_of_the_presets_are_what_the_benchmark_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["kept_shares.py"])
    kept_shares.main()
    assert (ROOT / "docs/presets.md").read_text().endswith(capsys.readouterr().out), "make docs"


@pytest.mark.parametrize("gate", kept_shares.GATES.values(), ids=kept_shares.GATES)
def test_gaussian_shares_are_those_of_a_sample(gate: kept_shares.Rejection) -> None:
    noise = kept_shares.np.random.default_rng(0).normal(size=(4000, 40)) * (2e-3) ** 0.5 - 1e-3
    chunk = kept_shares.Chunk(noise.ravel(), 0 * noise.ravel(), kept_shares.np.arange(4001) * 40)
    kept, gaussian, k3 = kept_shares._shares(chunk, gate)
    assert k3 == pytest.approx(1e-3, rel=0.02)
    assert kept.mean() == pytest.approx(gaussian.mean(), abs=0.02)
