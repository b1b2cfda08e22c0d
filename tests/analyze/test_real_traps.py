"""Every rule answers to its trap alone, on committed dumps of real engines (benchmarks/diagnosis/confusion.py)."""

from pathlib import Path

import pytest
from simulated_dumps import levels

from megatron_rc.analyze.diagnosis import diagnose_dump
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
    "padded-vocabulary": "RC106",
    "shifted-by-one": "RC201",
    "zero-filled": "RC203",
    "forced-end": "RC203",
    "another-template": "RC205",
    "server-stale-prefix-cache": "RC301",
    "one-stale-server": "RC303",
    "server-stale-server": "RC303",
}
NUMERICS, TOO_LARGE = {"RC501": Level.NUMERICS}, {"RC501": Level.SUSPECT}
EXPECTED = {name: {code: Level.BUG} for name, code in BUGS.items()} | {
    **dict.fromkeys(["healthy-bf16", "healthy-int8-weights", "healthy-fp8-weights"], NUMERICS),
    **dict.fromkeys(["server-healthy", "server-retracted-requests"], NUMERICS),
    "policy-lag": {"RC502": Level.LAG, **NUMERICS},
    "expert-flips": {"RC404": Level.NUMERICS, **NUMERICS},
    # beyond any rounding, and no rule knows the cause
    **dict.fromkeys(["wrong-conversion-of-one-tensor", "server-wrong-conversion"], TOO_LARGE),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_dump_is_answered_by_the_rule_of_its_cause_and_by_no_other(name: str) -> None:
    assert levels(diagnose_dump(FOLDER / f"{name}.parquet")) == EXPECTED[name]


def test_every_committed_dump_is_judged_here() -> None:
    assert {file.stem for file in FOLDER.glob("*.parquet")} == EXPECTED.keys()


def test_the_committed_dumps_stay_small() -> None:
    examples = list((ROOT / "examples/dumps").glob("*.parquet"))
    assert len(examples) == 2 and all(file.stat().st_size <= 200_000 for file in examples)
    assert sum(file.stat().st_size for file in FOLDER.glob("*.parquet")) <= 3_000_000
