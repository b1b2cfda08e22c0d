"""analyze on short dumps of a real language model (benchmarks/real/dumps.py); nobody looks at those named aside."""

from pathlib import Path

import numpy as np
import pytest

from megatron_rc.analyze.diagnosis import diagnose, diagnose_dump
from megatron_rc.analyze.rules.rule import Level

FOLDER = Path(__file__).parents[1] / "support/data/real"
ANSWERS = {"shifted-by-one": "RC201", "zeros": "RC203"}
"""Fault -> the rule that must answer BUG, in noise of any size."""
QUICK = ("bf16-1-0", "int8-1-0", "fp8-block-1-0", "fp8-cache-2-1")


def shown(kind: str) -> list[Path]:
    return [file for file in sorted(FOLDER.glob(f"{kind}-*.parquet")) if not file.stem.endswith("aside")]


def test_there_are_enough_of_both_kinds_and_half_are_kept_aside() -> None:
    healthy = list(FOLDER.glob("healthy-*.parquet"))
    faulty = set(FOLDER.glob("*.parquet")) - set(healthy)
    assert len(healthy) >= 60 and len(faulty) >= 30
    for files in (healthy, faulty):
        assert sum(file.stem.endswith("aside") for file in files) == len(files) // 2
    assert sum(file.stat().st_size for file in FOLDER.glob("*.parquet")) <= 4_000_000


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(one, marks=() if one.stem.endswith(QUICK) else pytest.mark.full, id=one.stem)
        for one in shown("healthy")
    ],
)
def test_no_healthy_dump_is_called_a_bug(file: Path) -> None:
    assert [verdict for verdict in diagnose_dump(file).verdicts if verdict.level is Level.BUG] == []


@pytest.mark.parametrize("fault", ANSWERS)
def test_a_fault_is_found_in_noise_of_any_size(fault: str) -> None:
    files = shown(fault)
    assert len(files) == 3
    for file in files:
        assert (ANSWERS[fault], Level.BUG) in [(v.code, v.level) for v in diagnose_dump(file).verdicts], file.stem


def test_a_dump_whose_every_response_is_damaged_is_refused_with_the_reason() -> None:
    log_pi, log_mu = np.full((2, 30), -1.0)
    log_mu[[3, 20]] = np.nan
    with pytest.raises(ValueError, match="no loss token left without the damaged responses: 2 with NaN log-probs"):
        diagnose(log_pi, log_mu, np.array([0, 10, 30]), step=np.array([1, 1]))
