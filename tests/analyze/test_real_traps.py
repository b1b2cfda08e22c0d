"""Every rule answers to its trap alone, on committed dumps of real engines (benchmarks/diagnosis/confusion.py)."""

from pathlib import Path

import pytest
from headlines import contradictions
from simulated_dumps import levels

from megatron_rc.analyze.diagnosis import diagnose_dump
from megatron_rc.analyze.headline import HEADLINES, headline
from megatron_rc.analyze.known import Known
from megatron_rc.analyze.rules.rule import Level

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests/support/data/traps"
BUGS = {
    "logged-temperature-0.9": "RC101",
    "logged-temperature-0.98": "RC101",
    "renormalised-top-p-0.95": "RC102",
    "renormalised-top-p-0.99": "RC102",
    "server-top-p-0.95-renormalised-logs": "RC102",
    "hidden-temperature-0.9": "RC103",
    "hidden-temperature-0.95": "RC103",
    "hidden-top-p-0.95": "RC103",
    "hidden-top-p-0.99": "RC103",
    "hidden-presence-penalty": "RC103",
    "server-hidden-temperature-0.9": "RC103",
    "server-top-p-0.95-full-logs": "RC103",
    "raw-logs-at-temperature-0.8": "RC104",
    "raw-logs-at-temperature-0.95": "RC104",
    # 0.5 % of the probability: a top-k would take as much
    "padded-vocabulary": "RC102",
    "shifted-by-one": "RC201",
    "zero-filled": "RC203",
    "forced-end": "RC203",
    "another-template": "RC205",
    "server-stale-prefix-cache": "RC301",
    "one-stale-server": "RC303",
    "server-stale-server": "RC303",
}
NUMERICS = {"RC501": Level.NUMERICS}
WRONG_TENSOR = ("wrong-conversion-of-one-tensor", "server-wrong-conversion")
EXPECTED = {name: {code: Level.BUG} for name, code in BUGS.items()} | {
    **dict.fromkeys(["healthy-bf16", "healthy-int8-weights", "healthy-fp8-weights"], NUMERICS),
    **dict.fromkeys(["server-healthy", "server-retracted-requests"], NUMERICS),
    "policy-lag": {"RC502": Level.LAG},
    "expert-flips": {"RC404": Level.NUMERICS, **NUMERICS},
    # size alone accuses nobody
    **dict.fromkeys(WRONG_TENSOR, NUMERICS),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_dump_is_answered_by_the_rule_of_its_cause_and_by_no_other(name: str) -> None:
    found = diagnose_dump(FOLDER / f"{name}.parquet")
    assert levels(found) == EXPECTED[name]
    assert contradictions(found) == []


@pytest.mark.parametrize("name", WRONG_TENSOR)
def test_the_size_of_a_gap_is_doubted_until_the_precision_is_known(name: str) -> None:
    found = diagnose_dump(FOLDER / f"{name}.parquet")
    assert headline(found).startswith("CANNOT TELL") and "--precision" in found.verdicts[0].sentence
    told = {kind: diagnose_dump(FOLDER / f"{name}.parquet", known=Known(kind)) for kind in ("bf16", "int8")}
    assert "above what bf16 usually gives" in told["bf16"].verdicts[-1].sentence
    assert headline(told["int8"]) == HEADLINES[Level.NUMERICS]


def test_every_committed_dump_is_judged_here() -> None:
    assert {file.stem for file in FOLDER.glob("*.parquet")} == EXPECTED.keys()


def test_the_committed_dumps_stay_small() -> None:
    examples = list((ROOT / "examples/dumps").glob("*.parquet"))
    assert len(examples) == 2 and all(file.stat().st_size <= 200_000 for file in examples)
    assert sum(file.stat().st_size for file in FOLDER.glob("*.parquet")) <= 3_000_000
