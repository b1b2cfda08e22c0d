"""RC203: log mu is exactly 0 for tokens to which the trainer gives less than one half."""

import numpy as np

from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rule import Level, Rule, Stage, Verdict
from megatron_rc.analyze.statistics.sums import ZERO_BELOW

FEWEST = 3
"""Impossible zeros that are needed for a bug: a single one can be a damaged token."""


def check(evidence: Evidence) -> Verdict | None:
    count = evidence.sums.impossible_zeros
    if count < FEWEST:
        return None
    sample = evidence.sample
    zeros = (sample.log_mu == 0) & (sample.log_pi < ZERO_BELOW)
    share = float(sample.k3[zeros].sum() / sample.k3.sum()) if zeros.any() else None
    return Verdict(
        "RC203",
        Level.BUG,
        f"{count:,.0f} tokens ({count / evidence.whole.tokens:.2%}) were logged with log-prob 0.0 although the trainer "
        f"gives them less than one half{_place(sample, zeros)}; no "
        "sampler draws such tokens with certainty",
        {"impossible_zeros": count, "share_of_tokens": count / evidence.whole.tokens},
        share=share,
    )


def _place(chunk: Chunk, zeros: np.ndarray) -> str:
    """Where the zeros are, as the end of a sentence part; empty when they have no common place."""
    if not zeros.any():
        return ""
    last = chunk.index[zeros] == chunk.lengths[chunk.sequence_of[zeros]] - 1
    if last.mean() > 0.9:
        return ", nearly all at the last token of a response (a forced end?)"
    sequences = np.unique(chunk.sequence_of[zeros])
    logged = np.bincount(chunk.sequence_of, weights=chunk.log_mu != 0, minlength=chunk.num_sequences)
    if (logged[sequences] == 0).mean() > 0.9:
        return f", in {sequences.size:,} whole responses of zeros (missing log-probs filled in?)"
    if "token_id" in chunk.tokens:
        ids, counts = np.unique(chunk.tokens["token_id"][zeros], return_counts=True)
        if counts.max() > 0.9 * zeros.sum():
            return f", nearly all of token id {ids[counts.argmax()]} (a forced token?)"
    neighbours = zeros[1:] & zeros[:-1]
    return ", in spans (tool results inside the loss mask?)" if neighbours.sum() > 0.5 * zeros.sum() else ""


RULE = Rule("RC203", Stage.COUNTS, check)
