"""What the collapse lab compared corrections on, so that a recommendation says where nobody has tested it."""

from typing import NamedTuple

import numpy as np

from megatron_rc.analyze.evidence import Evidence


class Covered(NamedTuple):
    """Ranges over the runs of a lab in which a correction held; what it does outside them is not known."""

    depth: float
    """Largest T / T*: mean length of the responses over T* = 1 / (2 K), with K the mean k3 of a token."""
    length: tuple[float, float]
    """Shortest and longest mean response, tokens."""
    vocabulary: int
    """Tokens of the largest one."""

    def missed(self, evidence: Evidence) -> tuple[str, ...]:
        """What of a dump lies outside, in words; empty where the lab covered it."""
        length = evidence.sums.tokens / evidence.sequences
        depth = 2 * evidence.sums.mean("k3") * length
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


LAB = Covered(depth=3.4, length=(6.7, 7.1), vocabulary=16)
"""The arms with a correction in benchmarks/collapse/results that have no failed run, with five seeds or more and
learning rates up to 3e-4, without controls; rounded outwards. A run that fails opens a gap of its own, runs that
correct nothing reach farther, and where some seeds of an arm hold and others fail, a correction does not hold."""
