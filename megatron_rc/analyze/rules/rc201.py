"""RC201: log pi of one token correlates with log mu of its neighbour."""

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rule import Level, Rule, Stage, Verdict

LEAST_GAIN = 0.2
"""The least by which the correlation at another lag must exceed that at lag 0. Neighbours correlate by 0.2 to 0.4, the
same token by nearly 1, so a shift gains far more."""


def check(evidence: Evidence) -> Verdict | None:
    lag, correlations = evidence.best_lag, evidence.lag_correlations
    if lag == 0 or correlations[lag] - correlations[0] < LEAST_GAIN or not evidence.significant(evidence.alignment):
        return None
    later = "later" if lag > 0 else "earlier"
    return Verdict(
        Level.BUG,
        f"the trainer's log-prob of a token correlates with the sampler's of the token {abs(lag)} {later} ("
        f"{correlations[lag]:.2f}, against {correlations[0]:.2f} for the same token): one list is shifted",
        {"lag": float(lag), "correlation": correlations[lag], "correlation_at_0": correlations[0]},
        p=evidence.adjusted[evidence.alignment.name],
        share=1.0,
    )


RULE = Rule("RC201", Stage.ALIGNMENT, check)
