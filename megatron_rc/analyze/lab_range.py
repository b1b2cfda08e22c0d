"""Ranges in which the collapse lab compared corrections: a recommendation says where it is untested."""

from typing import NamedTuple

import numpy as np

from megatron_rc.analyze.evidence import Evidence

SILENT = 1.5
"""Factor by which a dump may be beyond a range without a word."""
FAILED_K3 = 0.012
"""nats per token; smallest early k3 of a run without a correction that failed (docs/collapse_evidence.md: policies that
were 16 updates old, responses of 512 tokens). No correction is never recommended from here on."""


class LabRange(NamedTuple):
    """Ranges of a lab's runs in which a correction held; what it does outside them is unknown."""

    depth: float
    """Largest T / T*: mean length of the responses over T* = 1 / (2 K), with K the mean k3 per token."""
    length: tuple[float, float]
    """Shortest and longest mean response, tokens."""
    vocabulary: int
    """Size of the largest vocabulary."""

    def missed(self, evidence: Evidence) -> tuple[str, ...]:
        """In what respects, in which direction and by which factor a dump is beyond the ranges; empty if inside."""
        length = evidence.sums.tokens / evidence.sequences
        depth = length / evidence.growth.horizon
        ids = evidence.sample.tokens.get("token_id")
        shortest, longest = self.length
        out = []
        if length > SILENT * longest:
            out.append(f"responses {length / longest:.1f} times as long as the longest tested ({longest:g} tokens)")
        elif length < shortest / SILENT:
            out.append(f"responses {shortest / length:.1f} times as short as the shortest tested ({shortest:g} tokens)")
        if depth > SILENT * self.depth:
            out.append(f"a length over T* {depth / self.depth:.1f} times the largest tested ({self.depth:g})")
        if ids is None:
            out.append(f"an unknown vocabulary (tested: {self.vocabulary} ids)")
        elif (largest := int(np.max(ids, initial=0)) + 1) > SILENT * self.vocabulary:
            out.append(
                f"a vocabulary {largest / self.vocabulary:,.0f} times the largest tested ({self.vocabulary} ids)"
            )
        return tuple(out)


LAB = LabRange(depth=4.5, length=(6.7, 7.2), vocabulary=16)
"""Ranges over benchmarks/collapse/runs.csv, rounded outwards: arms with a correction and without controls, with five
seeds or more, learning rates up to 3e-4 and no failed run. A run that fails widens its own gap, runs without a
correction reach farther, and a correction under which some seeds of an arm fail does not hold."""
