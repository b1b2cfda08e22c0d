"""RC106: the trainer spreads probability over ids that do not exist, and that the sampler cannot draw."""

from dataclasses import replace

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rc102 import undrawable
from megatron_rc.analyze.rules.rule import Rule, Stage, Verdict


def check(evidence: Evidence) -> Verdict | None:
    verdict, truncated = undrawable(evidence)
    if verdict is None or truncated is not False:
        return None
    leaked = 1 / evidence.whole.mean_ratio - 1
    sentence = (
        f"{verdict.sentence}, most where the trainer is unsure and nowhere where it is certain: its softmax runs over "
        f"ids that do not exist (padded vocabulary), which take {leaked:.2%} as much as the real ones"
    )
    return replace(verdict, sentence=sentence, numbers={**verdict.numbers, "leaked_mass": leaked})


RULE = Rule("RC106", Stage.HONESTY, check, fitted=True, unfiltered=True)
