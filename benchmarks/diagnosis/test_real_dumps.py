"""analyze on dumps of a real model, half of which were looked at only after the limits were committed."""

from pathlib import Path

import pytest
from headlines import contradictions

from diagnosis import real_dumps
from megatron_rc.analyze.headline import headline
from megatron_rc.analyze.rules.rule import Level

SAMPLED, INJECTED = (real_dumps.files(folder) for folder in ("sampled", "real"))
STALE = {"fresh-label-lag-8", "unlabelled-lag-8", "system-missing", "logged-bias"}
"""Gaps that rounding to 16 bits cannot make, and that 8 or 4 bits could."""


FILES = [file for kinds in (SAMPLED, INJECTED) for members in kinds.values() for file in members]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_rule_of_the_cause_accuses_and_nobody_else(file: Path) -> None:
    found, kind = real_dumps.diagnosed(file), real_dumps.kind(file)
    assert real_dumps.right(kind, found), [str(v.code) for v in found.verdicts]
    assert found.level is Level.BUG or kind not in ("shifted-by-one", "zeros"), "found in noise of any size"
    assert contradictions(found) == []


def test_there_are_enough_of_both_kinds_and_half_are_kept_aside() -> None:
    healthy, faulty = INJECTED["healthy"], [f for kind, files in INJECTED.items() if kind != "healthy" for f in files]
    assert len(healthy) >= 60 and len(faulty) >= 30
    for files in (healthy, faulty):
        assert sum(file.stem.endswith("aside") for file in files) == len(files) // 2
    assert sum(file.stat().st_size for file in healthy + faulty) <= 4_000_000


@pytest.mark.parametrize("name", sorted(SAMPLED))
def test_a_known_precision_lets_structure_be_suspected_and_no_healthy_dump(name: str) -> None:
    for file in SAMPLED[name]:
        found = real_dumps.diagnosed(file, "bf16")
        suspected = any(v.code == "RC307" and v.level is Level.SUSPECT for v in found.verdicts)
        assert suspected == (name in STALE), file.stem
        if name.startswith("healthy"):
            assert not real_dumps.accusing(found)


def test_a_labelled_lag_is_staleness_whatever_its_size() -> None:
    for lag in ("4", "8"):
        for file in SAMPLED[f"healthy-lag-{lag}-labelled"]:
            assert headline(real_dumps.diagnosed(file)).startswith("LAG")
