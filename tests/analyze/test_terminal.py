"""The summary of a diagnosis fits one screen."""

from dataclasses import replace
from pathlib import Path

import pytest
from simulated_dumps import TRAPS, world

from megatron_rc.analyze import terminal
from megatron_rc.analyze.diagnosis import Diagnosis, diagnosis_of
from megatron_rc.analyze.readers.dump import CorruptRows
from megatron_rc.analyze.rules import RULES, Judgement
from megatron_rc.analyze.rules.rule import HOSTS, Level, Verdict

ROOT = Path(__file__).parents[2]
SCREEN = 40
SOURCE = "/data/runs/qwen3-30b-a3b/dump/rollouts-000123.parquet"


def diagnosis_named(name: str) -> Diagnosis:
    return diagnosis_of([TRAPS[name][1](world(1, sequences=32))], SOURCE, "megatron-rc Parquet", CorruptRows())


def test_the_summary_fits_one_screen_when_everything_is_wrong() -> None:
    diagnosis = diagnosis_named("renormalised top-p .95")
    (verdict,) = diagnosis.verdicts
    more = [Verdict(code, Level.BUG, verdict.sentence, {}, 1e-9, 0.5) for code in ("RC303", "RC301", "RC104")]
    evidence = replace(diagnosis.evidence, damaged={"nan": 3, "positive": 4}, damaged_places=[1, 2, 3, 4, 5])
    missing = {code: list(rule.needs) for code, rule in RULES.items() if rule.needs}
    worst = replace(
        diagnosis,
        evidence=replace(evidence, columns=frozenset()),
        judgement=Judgement([verdict, *more], missing, {"RC205": "RC102", "RC501": "RC102"}),
        corrupt=CorruptRows(9, 2, [f"{SOURCE}, row 17: old_logprobs has 3 values, rollout_logprobs has 4"]),
        ignored=["3 files of no known format are not read, such as notes.txt", "1 file of slime is not read"],
    )
    text = terminal.text(worst)
    assert len(text.splitlines()) <= SCREEN, text
    said = ("9 corrupt rows; 2 damaged files", "row 17", "notes.txt", "nan (3), positive (4) log-probs")
    assert [words for words in said if words not in text] == []


def test_fixes_are_named_by_their_command_or_printed_for_one_codebase() -> None:
    diagnosis = diagnosis_named("renormalised top-p .95")
    assert "Fixes: megatron-rc explain RC102" in terminal.text(diagnosis)
    assert not [host for host in HOSTS if f"{host}:" in terminal.text(diagnosis)]
    text = " ".join(terminal.text(diagnosis, host="TRL").split())
    assert f"RC102 in TRL: {diagnosis.verdicts[0].page.fixes['TRL']}" in text
    with pytest.raises(ValueError, match="unknown codebase 'trl2'; known: verl, slime"):
        terminal.host_named("trl2")
    assert terminal.host_named("megatron-lm") == "Megatron-LM"
    with pytest.raises(ValueError, match="dumps of prime-rl are read, but no fixes are written for it; known: verl"):
        terminal.host_named("prime-rl")


def test_what_is_shared_names_no_path() -> None:
    text = terminal.text(diagnosis_named("one stale server"), share=True)
    assert SOURCE not in text and "Server c" not in text and "RC303" in text
