"""Every rule answers to its trap alone, on committed dumps of real engines (benchmarks/diagnosis/confusion.py)."""

import pytest
from headlines import contradictions
from simulated_dumps import levels

from diagnosis.traps import server
from diagnosis.traps.dumps import EXAMPLES, TESTS, slug
from diagnosis.traps.planted import TRAPS
from megatron_rc.analyze.diagnosis import diagnose_dump
from megatron_rc.analyze.headline import HEADLINES, headline
from megatron_rc.analyze.known import Known
from megatron_rc.analyze.rules.rule import Level

WRONG_TENSOR = ("wrong-conversion-of-one-tensor", "server-wrong-conversion")
"""Size alone accuses nobody."""
EXPECTED = {slug(name): {trap.answer: Level(trap.level)} for name, trap in (TRAPS | server.TRAPS).items()}
EXPECTED["expert-flips"]["RC501"] = Level.NUMERICS
# 0.5 % of the probability: a top-k would take as much
EXPECTED["padded-vocabulary"] = {"RC102": Level.BUG}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_dump_is_answered_by_the_rule_of_its_cause_and_by_no_other(name: str) -> None:
    found = diagnose_dump(TESTS / f"{name}.parquet")
    assert levels(found) == EXPECTED[name]
    assert contradictions(found) == []


@pytest.mark.parametrize("name", WRONG_TENSOR)
def test_the_size_of_a_gap_is_doubted_until_the_precision_is_known(name: str) -> None:
    found = diagnose_dump(TESTS / f"{name}.parquet")
    assert headline(found).startswith("CANNOT TELL") and "--precision" in found.verdicts[0].sentence
    bf16, int8 = (diagnose_dump(TESTS / f"{name}.parquet", known=Known(kind)) for kind in ("bf16", "int8"))
    assert "above what bf16 usually gives" in bf16.verdicts[-1].sentence
    assert headline(int8) == HEADLINES[Level.NUMERICS]


def test_every_committed_dump_is_judged_here() -> None:
    assert {file.stem for file in TESTS.glob("*.parquet")} == EXPECTED.keys()


def test_the_committed_dumps_stay_small() -> None:
    examples = list(EXAMPLES.glob("*.parquet"))
    assert len(examples) == 2 and all(file.stat().st_size <= 200_000 for file in examples)
    assert sum(file.stat().st_size for file in TESTS.glob("*.parquet")) <= 3_000_000
