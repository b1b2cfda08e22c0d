"""RC301: responses to cached prompts are off, the more the longer the server has been synchronised."""

import numpy as np

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rc303 import TIMES_OTHERS
from megatron_rc.analyze.rules.rule import TRIED, Level, Rule, Stage, Verdict

LEAST_EXPLAINED = 0.01
"""Least share of the variance of |l| between the cached shares of the prompt. It is smaller than in RC303, because old
keys and values are a small part of what a token depends on: a stale cache had 0.020, healthy dumps 0."""
FRESH = 1
"""Most tenths of a fresh prompt that came from the cache. A few tokens at the start, such as a first token that all
prompts share, are always cached and say nothing."""
MOSTLY_CACHED = 5
"""Fewest tenths of a mostly cached prompt that came from the cache."""


def check(evidence: Evidence) -> Verdict | None:
    cached, syncs = evidence.profiles["cached"], evidence.profiles["syncs"]
    tenths = np.asarray(cached.bins)
    fresh, used = tenths <= FRESH, tenths >= MOSTLY_CACHED
    if not (fresh.any() and used.any()) or not evidence.significant(evidence.factor_tests.get("cached")):
        return None
    k3_fresh, k3 = (cached.mean_k3(part) for part in (fresh, used))
    if k3 < TIMES_OTHERS * k3_fresh or cached.explained < LEAST_EXPLAINED:
        return None
    grows = len(syncs.bins) > 2 and np.corrcoef(np.arange(len(syncs.bins)), syncs.k3)[0, 1] > 0.3
    sentence = f"responses whose prompt came from the prefix cache have k3 {k3:.1e}, the others {k3_fresh:.1e}"
    growing = ", and it grows with the syncs since the server started: the cache holds keys and values of old weights"
    return Verdict(
        "RC301",
        Level.BUG if grows else Level.SUSPECT,
        sentence + (growing if grows else ": the cache may hold keys and values of old weights"),
        {"k3_cached": k3, "k3_fresh": k3_fresh, "explained": cached.explained},
        evidence.adjusted[evidence.factor_tests["cached"].name],
        evidence.excess_share(cached, used, k3_fresh),
        one_of=() if grows else ("RC301", "RC205"),
    )


RULE = Rule("RC301", Stage.LOCATION, check, needs=("cached_tokens", "prompt_length", "syncs"), tried=TRIED)
