"""RC301: responses to cached prompts are off, the more the longer the server has been synchronised."""

import numpy as np

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rule import Level, Rule, Stage, Verdict
from megatron_rc.analyze.statistics.factors import FACTORS

LEAST_RATIO = 1.4
"""Least noise behind cached prompts over that behind fresh ones, if it grows with the syncs: a stale cache had 1.7 on a
real server and 5.4 elsewhere, a harder task that was cached more often 0.97."""
ALONE = 2.0
"""The same, if it does not grow: then the rule only suspects."""
LEAST_Z = 5.0
"""Least standard errors of the difference, with the responses of a prompt as one unit."""
GROWS = 3.0
"""Least z of the noise behind caches that saw many syncs, over that behind caches that saw few."""
FRESH = 1
"""Most tenths of a fresh prompt that came from the cache. A few tokens at the start, such as a first token that all
prompts share, are always cached and say nothing."""
MOSTLY_CACHED = 5
"""Fewest tenths of a mostly cached prompt that came from the cache."""


def check(evidence: Evidence) -> Verdict | None:
    cached = evidence.profiles["cached"]
    tenths = np.asarray(cached.bins)
    fresh, used = tenths <= FRESH, tenths >= MOSTLY_CACHED
    if not (fresh.any() and used.any()) or not evidence.significant(evidence.factor_tests.get("cached")):
        return None
    sample = evidence.sample
    of = FACTORS["cached"].codes(sample)[sample.sequence_of]
    found = evidence.noise.contrast(of >= MOSTLY_CACHED, of <= FRESH)
    seen = sample.per_token("syncs")
    many = seen > np.median(seen)
    grows = evidence.noise.contrast((of >= MOSTLY_CACHED) & many, (of >= MOSTLY_CACHED) & ~many).z >= GROWS
    if not found.above(LEAST_RATIO if grows else ALONE, LEAST_Z):
        return None
    k3_fresh, k3 = (cached.mean_k3(part) for part in (fresh, used))
    sentence = (
        f"responses whose prompt came from the prefix cache have {found.ratio:.1f} times the noise of the others at "
        f"equal confidence, and k3 {k3:.1e} against {k3_fresh:.1e}"
    )
    growing = ", and it grows with the syncs since the server started: the cache holds keys and values of old weights"
    return Verdict(
        Level.BUG if grows else Level.SUSPECT,
        sentence + (growing if grows else ": the cache may hold keys and values of old weights"),
        {"k3_cached": k3, "k3_fresh": k3_fresh, "noise_ratio": found.ratio},
        evidence.adjusted[evidence.factor_tests["cached"].name],
        evidence.excess_share(cached, used, k3_fresh),
        one_of=() if grows else ("RC301", "RC205"),
    )


RULE = Rule("RC301", Stage.LOCATION, check, needs=("cached_tokens", "prompt_length", "syncs"), fitted=True)
