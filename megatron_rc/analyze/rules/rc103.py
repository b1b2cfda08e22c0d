"""RC103: the tokens surprise the trainer less, or more, than its own entropy says they should."""

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rule import TRIED, Level, Rule, Stage, Verdict

SURPRISE_FLOOR = 0.005
"""nats; a smaller mean surprise is no bug. In a simulation a hidden top-p of 0.99 causes ten times as much, a hidden
temperature of 0.95 twenty times."""
SMALL_K3 = 0.05
"""nats; up to this k3, and this distance of the mean ratio from 1, log-probs are said to agree."""


def check(evidence: Evidence) -> Verdict | None:
    whole = evidence.whole
    if whole.surprise is None or whole.z_surprise is None:
        return None
    if abs(whole.surprise) < SURPRISE_FLOOR or not evidence.significant(whole.z_surprise):
        return None
    kind = (
        "less surprising, as under a hidden top-p, top-k, min-p or a temperature below the trainer's"
        if whole.surprise < 0
        else "more surprising, as under a hidden penalty or a temperature above the trainer's"
    )
    agree = whole.k3 <= SMALL_K3 and abs(whole.mean_ratio - 1) <= SMALL_K3
    return Verdict(
        Level.BUG,
        f"{'the log-probs agree, but' if agree else f'next to a gap of k3 {whole.k3:.1e},'} the tokens are "
        f"{abs(whole.surprise):.3f} nats per token {kind}: something that is not in the logs decided which tokens "
        "came",
        {"surprise": whole.surprise, "z_W": whole.z_surprise.z},
        evidence.adjusted[whole.z_surprise.name],
        share=0.0,
    )


RULE = Rule("RC103", Stage.HIDDEN_SAMPLING, check, needs=("entropy",), tried=TRIED, unfiltered=True)
