"""The noise on the logits by confidence, beside what was published of other models."""

from megatron_rc.analyze import atlas
from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.pages.card import card
from megatron_rc.analyze.statistics import displacement
from megatron_rc.drawing.axes import log_axis, tight_log_axis
from megatron_rc.drawing.series import Series
from megatron_rc.drawing.svg import Line, chart

FEWEST = 30
"""Tokens of a range that is drawn."""
PLACES = (0.75, 0.3, 0.03, 0.003, 0.0003)
"""1 - p in the middle of each range."""


def by_confidence(evidence: Evidence) -> str:
    """Mean |eps| by the trainer's probability, for the dump and for the rows of the atlas that have it."""
    found = displacement.by_confidence(evidence.sample, FEWEST)
    shown = [(place, size) for place, size in zip(PLACES, found, strict=True) if size]
    if len(shown) < 2:
        return ""
    curves = {"this dump": shown} | {
        name: list(zip(PLACES, values, strict=True)) for name, values in atlas.by_confidence().items()
    }
    sizes = [size for points in curves.values() for _, size in points]
    lines, hover, legend = [], [], []
    for number, (name, points) in enumerate(curves.items()):
        places, values = map(list, zip(*sorted(points), strict=True))
        lines.append(Line(places, values, "c0" if not number else f"c{number + 1} dashed", dots=True))
        hover.append(Series(name, places, values))
        legend.append((f"c{number + 1}" if number else "c0", name))
    axes = tight_log_axis(PLACES[-1], 1.0), log_axis(min(sizes), max(sizes))
    drawn = chart(lines, *axes, title="mean |eps| by confidence", across="1 - p of the trainer", hover=hover)
    return card(
        "Noise on the logits, by confidence",
        drawn,
        "Mean of |eps|, eps = logit pi - logit mu, by how sure the trainer is; dashed: what was published of healthy "
        "models. A temperature or penalty on one side displaces certain tokens far more than others.",
        "flat, or rising by up to 1.7 times towards the certain tokens (left).",
        "log-odds",
        legend=legend,
    )
