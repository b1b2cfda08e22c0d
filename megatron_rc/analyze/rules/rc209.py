"""RC209: log mu of drawn tokens is so small that no sampler would ever have drawn them."""

import numpy as np

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rule import Level, Rule, Stage, Verdict
from megatron_rc.analyze.statistics.sums import IMPOSSIBLE_BELOW

FEWEST = 3
"""Such tokens that are needed for a bug: a single one can be a damaged token."""


def check(evidence: Evidence) -> Verdict | None:
    count = evidence.sums.impossible_draws
    if count < FEWEST:
        return None
    values = evidence.sample.log_mu[evidence.sample.log_mu < IMPOSSIBLE_BELOW]
    named = ""
    if values.size:
        seen, times = np.unique(values, return_counts=True)
        most = int(times.argmax())
        repeated = times[most] > 0.5 * values.size and values.size > 1
        named = (
            f", most of them exactly {seen[most]:g} (a filler for missing values?)"
            if repeated
            else f", down to {values.min():.3g} (an overflow, or logits in place of log-probs?)"
        )
    return Verdict(
        Level.BUG,
        f"{count:,.0f} tokens ({count / evidence.whole.tokens:.2%}) have a log mu below {IMPOSSIBLE_BELOW:g}{named}; a "
        "sampler draws such a token less than once in ten million",
        {"impossible_draws": count, "share_of_tokens": count / evidence.whole.tokens},
    )


RULE = Rule("RC209", Stage.COUNTS, check)
