"""analyze on dumps of a real model, half of which were looked at only after the limits were committed."""

from pathlib import Path

import pytest
from headlines import contradictions

from diagnosis import real_dumps
from megatron_rc.analyze.headline import headline
from megatron_rc.analyze.rules.rule import Level

SAMPLED = real_dumps.files("sampled")
STALE = {"fresh-label-lag-8", "unlabelled-lag-8", "system-missing", "logged-bias"}
"""Gaps that rounding to 16 bits cannot make, and that 8 or 4 bits could."""


@pytest.mark.parametrize("file", [file for members in SAMPLED.values() for file in members], ids=lambda file: file.stem)
def test_the_rule_of_the_cause_accuses_and_nobody_else(file: Path) -> None:
    found = real_dumps.diagnosed(file)
    assert real_dumps.right(real_dumps.kind(file), found), [str(v.code) for v in found.verdicts]


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


def test_the_headline_does_not_contradict_the_numbers_below_it() -> None:
    for members in [*SAMPLED.values(), *real_dumps.files("real").values()]:
        for file in members:
            assert contradictions(real_dumps.diagnosed(file)) == [], file.stem
