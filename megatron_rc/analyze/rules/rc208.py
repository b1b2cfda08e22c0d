"""RC208: log mu of a response is that of another response of the same length."""

import numpy as np

from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rule import Level, Rule, Stage, Verdict

SHORTEST = 16
"""Tokens of a response, at least: shorter ones correlate by chance."""
MOST = 256
"""Responses of one length that are compared with each other."""
OWN, OTHER = 0.5, 0.9
"""Correlation of log pi with its own log mu at most, and with that of another response at least. Honest rows have
nearly 1 with their own, even with weights in 4 bits 0.8."""
LEAST_SPREAD = 0.2
"""nats; least standard deviation of log pi in a response: where all tokens are certain, noise decides a correlation."""
FEWEST = 2
"""Responses that must find their log-probs in another one."""
LEAST_SHARE = 0.2
"""Least share of these among the responses whose own lists do not correlate. In noise that is larger than the
differences between tokens, no list correlates, and 3 of 9,111 responses found another one by chance."""


def check(evidence: Evidence) -> Verdict | None:
    compared, strange, moved = _moved(evidence.sample)
    if moved < max(FEWEST, LEAST_SHARE * strange):
        return None
    return Verdict(
        Level.BUG,
        f"log mu of {moved:,} of {compared:,} responses does not follow their log pi (correlation below {OWN:g}), and "
        f"that of another response of the same length does (above {OTHER:g}): rows are paired wrongly",
        {"moved": float(moved), "compared": float(compared)},
        share=1.0,
    )


def _moved(chunk: Chunk) -> tuple[int, int, int]:
    """How many responses were compared with others, how many do not fit to themselves, and how many to another one."""
    compared = strange = moved = 0
    for length in np.unique(chunk.lengths[chunk.lengths >= SHORTEST]):
        starts = chunk.cu_seqlens[:-1][chunk.lengths == length][:MOST]
        if starts.size < 2:
            continue
        rows = starts[:, None] + np.arange(length)
        raw_pi, raw_mu = (np.maximum(values[rows], -1e3) for values in (chunk.log_pi, chunk.log_mu))
        pi, mu = _standard(raw_pi), _standard(raw_mu)
        correlation = pi @ mu.T / length
        own = np.diag(correlation).copy()
        np.fill_diagonal(correlation, -1)
        compared += starts.size
        alien = (own < OWN) & (raw_pi.std(axis=1) > LEAST_SPREAD)
        strange += int(alien.sum())
        moved += int((alien & (correlation.max(axis=1) > OTHER)).sum())
    return compared, strange, moved


def _standard(rows: np.ndarray) -> np.ndarray:
    """[S, T] rows of mean 0 and variance 1."""
    centred = rows - rows.mean(axis=1, keepdims=True)
    scaled: np.ndarray = centred / np.maximum(centred.std(axis=1, keepdims=True), 1e-12)
    return scaled


RULE = Rule("RC208", Stage.ALIGNMENT, check)
