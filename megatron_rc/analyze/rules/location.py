"""Honest logs of two sides that differ in one place: a server, a cache, the start of a response."""

import numpy as np

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.profile import Profile
from megatron_rc.analyze.rules.rule import Level, Verdict

LEAST_EXPLAINED = 0.05
"""Least share of the variance of |l| between the values of the column. benchmarks/diagnosis/confusion.py measured 0.19
for a stale server, 0.10 for another template, and at most 0.0014 in healthy dumps."""
CACHE_EXPLAINED = 0.01
"""The same for the cached share of the prompt: 0.020 for a stale cache, because old keys and values are a small part of
what a token depends on; 0 in healthy dumps."""
TIMES_OTHERS = 3.0
"""Least k3 of the place, as a multiple of k3 elsewhere."""
FRESH, MOSTLY_CACHED = 1, 5
"""Most tenths of a fresh prompt that came from the cache, and fewest of a mostly cached one. A few tokens at the start,
such as a first token that all prompts share, are always cached and say nothing."""


def one_server(evidence: Evidence) -> Verdict | None:
    """RC303: one server's gap is far above that of the others."""
    profile = evidence.profiles["server"]
    if len(profile.bins) < 2 or not evidence.significant(evidence.factor_tests.get("server")):
        return None
    worst = int(profile.k3.argmax())
    elsewhere = np.arange(len(profile.bins)) != worst
    others = _mean_k3(profile, elsewhere)
    if profile.k3[worst] < TIMES_OTHERS * others or profile.explained < LEAST_EXPLAINED:
        return None
    share = _excess_share(evidence, profile, ~elsewhere, others)
    return Verdict(
        "RC303",
        Level.BUG,
        f"server {profile.label(worst)} has k3 {profile.k3[worst]:.1e}, {profile.k3[worst] / max(others, 1e-12):.0f} "
        f"times that of the others, and {share:.0%} of the gap: it serves other weights",
        {"k3": float(profile.k3[worst]), "k3_of_others": others, "explained": profile.explained},
        evidence.adjusted[evidence.factor_tests["server"].name],
        share,
    )


def stale_cache(evidence: Evidence) -> Verdict | None:
    """RC301: responses to cached prompts are off, the more the longer the server has been synchronised."""
    cached, syncs = evidence.profiles["cached"], evidence.profiles["syncs"]
    tenths = np.asarray(cached.bins)
    fresh, used = tenths <= FRESH, tenths >= MOSTLY_CACHED
    if not (fresh.any() and used.any()) or not evidence.significant(evidence.factor_tests.get("cached")):
        return None
    k3_fresh, k3 = (_mean_k3(cached, part) for part in (fresh, used))
    if k3 < TIMES_OTHERS * k3_fresh or cached.explained < CACHE_EXPLAINED:
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
        _excess_share(evidence, cached, used, k3_fresh),
        one_of=() if grows else ("RC301", "RC205"),
    )


def other_prompt(evidence: Evidence) -> Verdict | None:
    """RC205: the gap is large at the start of a response and decays."""
    profile = evidence.profiles["position"]
    if not evidence.significant(evidence.factor_tests.get("position")) or profile.explained < LEAST_EXPLAINED:
        return None
    half = np.cumsum(profile.count) > profile.count.sum() / 2
    start, rest = ~half & (np.cumsum(profile.count) < profile.count.sum() / 8), half
    if not start.any():
        return None
    first, later = (_mean_k3(profile, part) for part in (start, rest))
    if first < TIMES_OTHERS * later:
        return None
    return Verdict(
        "RC205",
        Level.BUG,
        f"the gap is k3 {first:.1e} in the first eighth of the tokens by position and {later:.1e} in the last half: "
        "the two sides see different prompts, and the shared response slowly outweighs them",
        {"k3_start": first, "k3_rest": later, "explained": profile.explained},
        evidence.adjusted[evidence.factor_tests["position"].name],
        _excess_share(evidence, profile, ~half, later),
    )


def _mean_k3(profile: Profile, bins: np.ndarray) -> float:
    return float(np.average(profile.k3[bins], weights=profile.count[bins]))


def _excess_share(evidence: Evidence, profile: Profile, bins: np.ndarray, floor: float) -> float:
    """Share of all k3 that ``bins`` have above ``floor``."""
    excess = float((profile.count[bins] * (profile.k3[bins] - floor)).sum())
    return min(1.0, max(0.0, excess / evidence.sums.k3)) if evidence.sums.k3 else 0.0
