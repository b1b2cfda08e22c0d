"""RC203: log mu is exactly 0 for tokens to which the trainer gives less than one half."""

import numpy as np

from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rule import Level, Rule, Stage, Verdict
from megatron_rc.analyze.statistics.sums import ZERO_BELOW

FEWEST = 3
"""Impossible zeros that are needed for a bug: a single one can be a damaged token."""
LEAST_SHARE = 1e-5
"""Least share of the tokens. Logs of four decimals have such zeros in healthy dumps: 3 of 4.8 million tokens."""
PLACED, ANYWHERE = 0.01, 0.5
"""Least share of k3, where the tokens have a place in common and where they do not. Certain tokens have a log mu of 0.0
in fp32: where the trainer reads other ids (RC204), some of them look like these."""


def check(evidence: Evidence) -> Verdict | None:
    count = evidence.sums.impossible_zeros
    if count < max(FEWEST, LEAST_SHARE * evidence.whole.tokens):
        return None
    sample = evidence.sample
    zeros = (sample.log_mu == 0) & (sample.log_pi < ZERO_BELOW)
    place, share = _place(sample, zeros), evidence.sums.impossible_zeros_k3 / max(evidence.sums.k3, 1e-300)
    if share < (PLACED if place else ANYWHERE):
        return None
    return Verdict(
        Level.BUG,
        f"{count:,.0f} tokens ({count / evidence.whole.tokens:.2%}) were logged with log-prob 0.0 although the trainer "
        f"gives them less than one half{place}; no "
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
    turn = chunk.tokens.get("turn")
    if turn is not None and chunk.begins(turn)[zeros].mean() > 0.9:
        return ", nearly all at the first token of a turn (a loss mask that begins one token early?)"
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
