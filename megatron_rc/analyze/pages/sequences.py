"""Pictures of whole responses: the running sum of log-ratios, the tail of the weights, and what they are worth."""

import math

import numpy as np

from megatron_rc.analyze import report_text
from megatron_rc.analyze.chunk import Chunk, Floats
from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.pages.card import card
from megatron_rc.analyze.statistics.tail import LIMIT
from megatron_rc.drawing.axes import linear_axis, tight_log_axis
from megatron_rc.drawing.series import Mark, Series
from megatron_rc.drawing.svg import Band, Line, Shape, chart

FEWEST = 20
"""Responses that must reach a length before statistics are drawn there."""
DRAWN = 30
"""Responses whose running sum is drawn."""
POINTS = 100
"""Lengths at which a curve is drawn; twice as many ranks."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Quantiles of the running sums that are drawn: the median, and two bands around it."""


def running_sums(evidence: Evidence) -> str:
    """S_t of some responses and its quantiles, over the cone that noise stays in."""
    sample = evidence.sample
    longest = _longest(sample)
    if longest < 2:
        return ""
    lengths = np.unique(np.linspace(1, longest, POINTS).astype(np.int64))
    sums = [_sums_at(sample, int(length)) for length in lengths]
    lean, width = -evidence.whole.k3 * lengths, 2 * np.sqrt(2 * evidence.whole.k3 * lengths)
    many = [np.quantile(s, QUANTILES) if s.size else np.zeros(len(QUANTILES)) for s in sums]
    quantiles = dict(zip(QUANTILES, np.stack(many, axis=1).tolist(), strict=True))
    ends = [lean - width, lean + width, np.array(quantiles[0.05]), np.array(quantiles[0.95])]
    low, high = min(float(e.min()) for e in ends), max(float(e.max()) for e in ends)
    steps = lengths.tolist()
    # at most DRAWN responses, evenly spread over the sample
    filled = np.flatnonzero(sample.lengths)
    drawn_ones = np.unique(filled[np.linspace(0, filled.size - 1, DRAWN).astype(np.int64)])
    shapes: list[Shape] = [Band(steps, (lean - width).tolist(), (lean + width).tolist(), "c2")]
    shapes += [_path(sample, int(index), steps) for index in drawn_ones]
    shapes += [
        Band(steps, quantiles[0.25], quantiles[0.75], "c0"),
        Line(steps, quantiles[0.05], "c0 dashed"),
        Line(steps, quantiles[0.95], "c0 dashed"),
        Line(steps, quantiles[0.5], "c0 mean"),
    ]
    hover = [Series(f"{name:.0%} quantile", steps, quantiles[name]) for name in QUANTILES]
    axes = linear_axis(1, longest, whole=True), linear_axis(low, high)
    drawn = chart(shapes, *axes, title="running sum of log-ratios", across="token", hover=hover, clipped=True)
    outside = [float((np.abs(s - at) > w).mean()) for s, at, w in zip(sums, lean, width, strict=True)]
    return card(
        "Is the sum of log-ratios noise?",
        drawn,
        f"The sum of l up to each token: {DRAWN} responses (thin), all of the sample (blue: median, quartiles, 5 % and "
        f"95 %), and the cone -k3 t +- 2 sqrt(2 k3 t) that noise stays in; {outside[-1]:.0%} are outside at the "
        f"end, and at most {max(outside):.0%} anywhere.",
        "about 5 % are outside, and the fan widens like a square root; one that opens straight or bends is not noise.",
        "nats",
        legend=[("c2", "cone of noise"), ("c0", "responses")],
    )


def rank_size(evidence: Evidence) -> str:
    """The largest weights by rank, of tokens and of whole responses."""
    tails = {"tokens": evidence.token_tail, "responses": evidence.sequence_tail}
    series = []
    for name, tail in tails.items():
        if tail.largest.size > 1:
            ranks = np.unique(np.geomspace(1, tail.largest.size, 2 * POINTS).astype(np.int64))
            series.append(Series(name, ranks.tolist(), tail.largest[ranks - 1].tolist()))
    if not series:
        return ""
    values = [value for s in series for value in s.values]
    shapes = [Line(s.steps, s.values, f"c{index}") for index, s in enumerate(series)]
    axes = tight_log_axis(1, max(s.steps[-1] for s in series)), linear_axis(min(values), max(values))
    drawn = chart(shapes, *axes, title="largest log-weights by rank", across="rank", hover=series)
    k = ", ".join(f"{report_text.number(tail.k)} of {name}" for name, tail in tails.items())
    return card(
        "The largest weights",
        drawn,
        f"The log-weights of the tail from the largest down; the slope to the left is k-hat: {k}. Above {LIMIT} the "
        "mean of the weights cannot be trusted, whatever the size of the batch.",
        f"flat lines, k-hat below {LIMIT}.",
        "nats",
        legend=[(f"c{index}", s.label) for index, s in enumerate(series)],
    )


def effective_size(evidence: Evidence) -> str:
    """Effective share of the responses against the length at which they are cut, with what the k3 predicts."""
    sample, mean = evidence.sample, evidence.whole.k3
    longest = _longest(sample)
    if longest < 2:
        return ""
    lengths = np.unique(np.geomspace(1, longest, 40).astype(np.int64))
    measured = [_effective(_sums_at(sample, int(length))) for length in lengths]
    predicted = np.exp(-2 * mean * lengths).tolist()
    horizon = evidence.growth.horizon
    steps = lengths.tolist()
    axes = tight_log_axis(1, longest), linear_axis(0, 1)
    whole = evidence.growth.ess
    lines = [
        Line(steps, predicted, "soft dashed"),
        Line([1, longest], [whole, whole], "c1 dashed"),
        Line(steps, measured, "c0", dots=True),
    ]
    marks = [Mark(horizon, "T*")] if math.isfinite(horizon) else []
    hover = [Series("measured", steps, measured), Series("predicted", steps, predicted)]
    drawn = chart(lines, *axes, title="effective sample size", across="tokens", marks=marks, hover=hover)
    reach = "without end" if math.isinf(horizon) else evidence.growth.reach
    return card(
        "How much of a batch is left under sequence weights",
        drawn,
        "The effective share of the responses if their weight is the product of the first T ratios, against "
        f"exp(-2 T k3); T* = 1 / (2 k3) is {reach}. The curve compares equal numbers of first tokens, up to the length "
        f"that {FEWEST} responses reach. The ESS of {whole:.0%} of the table above has whole responses of all lengths: "
        "where l leans to one side, short and long ones weigh differently.",
        "near 1 at the lengths you train with, and on the dashed line: below it, the gap is correlated inside "
        "responses.",
        "ESS as a share",
        legend=[("c0", "first T tokens"), ("soft", "predicted by k3"), ("c1", "whole responses")],
    )


def _longest(sample: Chunk) -> int:
    """The largest length that FEWEST responses reach; with fewer responses, the length that all of them reach."""
    lengths = np.sort(sample.lengths)[::-1]
    lengths = lengths[lengths > 0]
    return int(lengths[min(FEWEST, lengths.size) - 1]) if lengths.size else 0


def _sums_at(sample: Chunk, length: int) -> Floats:
    """[R] sum of the first ``length`` log-ratios of the responses that have as many."""
    running = np.concatenate([[0.0], np.cumsum(sample.log_ratio)])
    start = sample.cu_seqlens[:-1][sample.lengths >= length]
    return np.asarray(running[start + length] - running[start])


def _effective(sums: Floats) -> float:
    weights = np.exp(sums - sums.max())
    return float(weights.sum() ** 2 / (weights @ weights * weights.size))


def _path(sample: Chunk, index: int, steps: list[int]) -> Line:
    start, end = (int(i) for i in sample.cu_seqlens[index : index + 2])
    running = np.cumsum(sample.log_ratio[start:end])
    reached = [t for t in steps if t <= end - start]
    return Line(reached, [float(running[t - 1]) for t in reached], "soft thin")
