"""Answers follow from made-up runs by the rules of the lab."""

from pathlib import Path

from collapse import made_up as lab
from collapse.claims import CLAIMS as STATED
from collapse.rules import CANNOT_TELL, CONTRADICTS, SUPPORTS, answers, verdict
from collapse.runs import Results, load

CLAIMS = {claim.letter: claim for claim in STATED}


def by_question(letter: str, results: Results) -> dict[str, str]:
    """Answers by the start of the question, and its strength."""
    given = answers(CLAIMS[letter], results)
    return {each.question.split(", arith")[0]: each.answer for each in given if each.why != "not run yet"}


def test_answers_follow_from_what_happened_to_the_runs(tmp_path: Path) -> None:
    lab.write(tmp_path)
    made_up = load(tmp_path)
    noise = "Runs with fixed noise on the sampler's weights fall more often than those of the exact sampler, strength"
    fails = (
        "For comparison: runs with fixed noise on the sampler's weights fail more often than those of the exact sampler"
    )
    lag = "For comparison: runs with lag fall more often than those of the exact sampler, strength"
    assert by_question("a", made_up) == {
        f"{noise} 0.2": CONTRADICTS,  # 0 of 10 against 0 of 10
        f"{noise} 0.4": CANNOT_TELL,  # 1 of 10
        "Runs with a hidden top-p fall more often than those of the exact sampler": SUPPORTS,  # 6 of 10
        f"{lag} 4, lr 0.0003": CANNOT_TELL,
        f"{lag} 16, lr 0.0001": SUPPORTS,
        f"{lag} 16, lr 0.0003": SUPPORTS,
        f"{fails}, strength 0.2": CONTRADICTS,
        f"{fails}, strength 0.4": CANNOT_TELL,
        "For comparison: runs with a hidden top-p fail more often than those of the exact sampler": SUPPORTS,
    }  # fmt: skip
    assert verdict(CLAIMS["a"], answers(CLAIMS["a"], made_up)) == SUPPORTS
    assert set(by_question("d", made_up).values()) == {SUPPORTS}
    assert set(by_question("e", made_up).values()) == {SUPPORTS}
    assert set(by_question("i", made_up).values()) == {SUPPORTS}
    assert verdict(CLAIMS["f"], answers(CLAIMS["f"], made_up)) == CANNOT_TELL
