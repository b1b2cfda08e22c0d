"""RC402: a few responses are far off at nearly every token, the others are not."""

import numpy as np

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rule import Level, Rule, Stage, Verdict
from megatron_rc.analyze.statistics.factors import lag

LEAST_RATIO = 6.0
"""Least median noise of a failed response over that of the median response. In healthy dumps the loudest response has
at most 2.6, in a policy that is eight updates older 3.3, and ten failed responses in NeMo-RL#2141 about 30."""
FEWEST = 3
"""Failed responses that are needed."""
LEAST_TOKENS = 20
"""Uncertain tokens that a response needs: a few shifted experts do not move its median then."""
LARGEST_SHARE = 0.5
"""Share of the responses up to which these are a few."""


def check(evidence: Evidence) -> Verdict | None:
    chunk, unsure = evidence.sample, evidence.noise.unsure
    medians = _medians(chunk.sequence_of[unsure], _size(evidence)[unsure], chunk.num_sequences)
    known = medians[np.isfinite(medians)]
    if known.size < 2 * FEWEST:
        return None
    failed = medians > LEAST_RATIO * float(np.median(known))
    if failed.sum() < FEWEST or failed.sum() > LARGEST_SHARE * known.size:
        return None
    share = float(chunk.k3[failed[chunk.sequence_of]].sum() / chunk.k3.sum())
    ratio = float(np.median(medians[failed]) / np.median(known))
    groups = chunk.sequences.get("group")
    prompts = "" if groups is None else f", of {np.unique(groups[failed]).size:,} of {np.unique(groups).size:,} prompts"
    return Verdict(
        Level.SUSPECT,
        f"{failed.sum():,} of {known.size:,} responses have {ratio:.0f} times the noise of the others at nearly every "
        f"token{prompts}, and {share:.0%} of the gap: a broken state of the engine or other weights",
        {"failed": float(failed.sum()), "noise_ratio": ratio},
        share=share,
        one_of=("RC402", "RC303"),
    )


def _size(evidence: Evidence) -> np.ndarray:
    """[N] |eps|, over its median among the tokens of the same lag where versions are known."""
    size = np.abs(evidence.noise.eps)
    if not evidence.older:
        return size
    lags = np.unique(lag(evidence.sample), return_inverse=True)[1]
    medians = np.array([np.median(size[lags == value]) for value in range(int(lags.max()) + 1)])
    scaled: np.ndarray = size / np.maximum(medians[lags], 1e-300)
    return scaled


def _medians(sequence: np.ndarray, noise: np.ndarray, sequences: int) -> np.ndarray:
    """[S] median of the noise of each response; NaN with fewer than LEAST_TOKENS values."""
    order = np.lexsort((noise, sequence))
    count = np.bincount(sequence, minlength=sequences)
    middle = np.cumsum(count) - count + count // 2
    result = np.full(sequences, np.nan)
    enough = count >= LEAST_TOKENS
    result[enough] = noise[order][middle[enough]]
    return result


RULE = Rule("RC402", Stage.PROMPT, check, fitted=True)
