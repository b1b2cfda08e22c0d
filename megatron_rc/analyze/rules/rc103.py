"""RC103: the tokens surprise the trainer less, or more, than its own entropy says they should."""

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rule import Level, Rule, Stage, Verdict
from megatron_rc.analyze.statistics.honesty import Honesty

SURPRISE_FLOOR = 0.005
"""nats; a smaller mean surprise is no bug. In a simulation a hidden top-p of 0.99 causes ten times as much, a hidden
temperature of 0.95 twenty times."""
SMALL_K3 = 0.05
"""nats; up to this k3, and this distance of the mean ratio from 1, log-probs are said to agree."""


def _shows(evidence: Evidence, panel: Honesty) -> bool:
    large = panel.surprise is not None and abs(panel.surprise) >= SURPRISE_FLOOR
    return large and evidence.significant(panel.z_surprise)


def check(evidence: Evidence) -> Verdict | None:
    tasks = evidence.parts["task"] if len(evidence.parts["task"]) > 1 else {}
    showing = sorted(name for name, panel in tasks.items() if _shows(evidence, panel))
    some = 0 < len(showing) < len(tasks)
    panels = [tasks[name] for name in showing] if some else [evidence.whole]
    panel = max(panels, key=lambda each: abs(each.surprise or 0.0))
    if panel.surprise is None or panel.z_surprise is None or not _shows(evidence, panel):
        return None
    where = f" (seen in {' and '.join(showing)})" if some else ""
    kind = (
        "less surprising, as under a hidden top-p, top-k, min-p or a temperature below the trainer's"
        if panel.surprise < 0
        else "more surprising, as under a hidden penalty or a temperature above the trainer's"
    )
    agree = panel.k3 <= SMALL_K3 and abs(panel.mean_ratio - 1) <= SMALL_K3
    return Verdict(
        Level.BUG,
        f"{'the log-probs agree, but' if agree else f'next to a gap of k3 {panel.k3:.1e},'} the tokens are "
        f"{abs(panel.surprise):.3f} nats per token {kind}: something that is not in the logs decided which tokens "
        f"came{where}",
        {"surprise": panel.surprise, "z_W": panel.z_surprise.z},
        evidence.adjusted[panel.z_surprise.name],
        share=0.0,
    )


RULE = Rule("RC103", Stage.HIDDEN_SAMPLING, check, needs=("entropy",), fitted=True, unfiltered=True)
