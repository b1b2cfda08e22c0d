"""analyze on dumps of a real model, half of which were looked at only after the limits were committed."""

from pathlib import Path

import numpy as np
import pytest
from simulated_dumps import contradictions

from diagnosis import real_dumps
from diagnosis.traps.dumps import read, with_columns
from megatron_rc.analyze import report_text
from megatron_rc.analyze.diagnosis import diagnosis_of
from megatron_rc.analyze.headline import HEADLINES, headline
from megatron_rc.analyze.known import Known
from megatron_rc.analyze.readers.dump import CorruptRows
from megatron_rc.analyze.rules.rule import Level

SAMPLED, INJECTED = (real_dumps.files(folder) for folder in ("sampled", "real"))
STALE = {"fresh-label-lag-8", "growing-lag-unlabelled", "logged-bias", "sync-failing", "unlabelled-lag-8"}  # fmt: skip
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


@pytest.mark.parametrize(
    ("name", "temperature", "suspected"), [("system-missing", 1.0, True), ("healthy-t0.3", 0.3, False)]
)
def test_noise_is_evidence_where_the_dump_says_what_divided_the_logits(
    name: str, temperature: float, suspected: bool
) -> None:
    for file in SAMPLED[name]:
        told = with_columns(read(file), temperature=np.full(read(file).num_sequences, temperature))
        found = diagnosis_of([told], name, "arrays", CorruptRows(), known=Known("bf16"))
        assert [str(verdict.code) for verdict in real_dumps.accusing(found)] == ["RC307"] * suspected


def test_a_labelled_lag_is_staleness_whatever_its_size() -> None:
    for name in ("healthy-lag-4-labelled", "healthy-lag-8-labelled", "healthy-growing-lag-labelled"):
        for file in SAMPLED[name]:
            found = real_dumps.diagnosed(file)
            assert headline(found).startswith("LAG")
    assert "engine" not in report_text.course(found)


def test_healthy_training_in_the_precision_that_is_named_has_no_sign_of_a_bug() -> None:
    for file in SAMPLED["healthy-steps"]:
        assert headline(real_dumps.diagnosed(file, "bf16")) == HEADLINES[Level.NUMERICS]
    doubt = headline(real_dumps.diagnosed(SAMPLED["healthy-steps"][0], "fp16"))
    assert doubt == "CANNOT TELL: no rule found a bug, but the gap is larger than what you named explains"
