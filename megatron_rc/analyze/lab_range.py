"""Ranges in which the collapse lab compared corrections: a recommendation says where it is untested."""

from typing import NamedTuple

import numpy as np

from megatron_rc.analyze.evidence import Evidence


class LabRange(NamedTuple):
    """Ranges of a lab's runs in which a correction held; what it does outside them is unknown."""

    depth: float
    """Largest T / T*: mean length of the responses over T* = 1 / (2 K), with K the mean k3 per token."""
    length: tuple[float, float]
    """Shortest and longest mean response, tokens."""
    vocabulary: int
    """Size of the largest vocabulary."""

    def missed(self, evidence: Evidence) -> tuple[str, ...]:
        """In what respects a dump is outside the ranges, as text; empty if it is inside."""
        length = evidence.sums.tokens / evidence.sequences
        depth = length / evidence.growth.horizon
        ids = evidence.sample.tokens.get("token_id")
        shortest, longest = self.length
        out = []
        if not shortest <= length <= longest:
            out.append(f"responses of {length:.3g} tokens (covered: {shortest:g} to {longest:g})")
        if depth > self.depth:
            out.append(f"T/T* = {depth:.2g} (covered: up to {self.depth:g})")
        if ids is None:
            out.append(f"an unknown vocabulary (covered: {self.vocabulary} tokens)")
        elif (largest := int(np.max(ids, initial=0))) >= self.vocabulary:
            out.append(f"token ids up to {largest:,} (covered: vocabularies of {self.vocabulary})")
        return tuple(out)


LAB = LabRange(depth=3.4, length=(6.7, 7.1), vocabulary=16)
"""Ranges over benchmarks/collapse/results, rounded outwards: arms with a correction and without controls, with five
seeds or more, learning rates up to 3e-4 and no failed run. A run that fails widens its own gap, runs without a
correction reach farther, and a correction under which some seeds of an arm fail does not hold."""
