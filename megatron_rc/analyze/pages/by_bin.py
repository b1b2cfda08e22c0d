"""Pictures of the log-ratio against what it may depend on: the logged log-prob, the position, every factor."""

import base64
import math
from collections.abc import Sequence

import numpy as np

from megatron_rc.analyze import report_text
from megatron_rc.analyze.diagnosis import Diagnosis
from megatron_rc.analyze.evidence import HEAT_EDGES, Evidence
from megatron_rc.analyze.pages.card import Cell, card, table
from megatron_rc.analyze.statistics.factors import LOG_MU_EDGES, octave_start
from megatron_rc.analyze.statistics.profile import Profile
from megatron_rc.drawing.axes import linear_axis, tight_log_axis
from megatron_rc.drawing.heat_map import png
from megatron_rc.drawing.series import Series
from megatron_rc.drawing.svg import Band, Line, Picture, Shape, chart

TEMPERATURES = (0.7, 0.9, 1.1, 1.4)
"""Ratios of the sampler's temperature to the trainer's; the map shows a curve for each."""
FEWEST = 10
"""Tokens that a bin must have to be drawn."""


def likelihood_map(diagnosis: Diagnosis) -> str:
    """Map of log pi against log mu, with the line of equal log-probs, and temperature curves if RC101 applies."""
    evidence = diagnosis.evidence
    beyond = HEAT_EDGES[1] / HEAT_EDGES[0]
    low, high = float(HEAT_EDGES[0] / beyond), float(HEAT_EDGES[-1] * beyond)
    axis = tight_log_axis(low, high)
    # rows of a picture run from top to bottom
    counts = evidence.heat.T[::-1]
    cells = np.where(counts > 0, np.log10(np.maximum(counts, 1)), np.nan)
    # a single token must be visible on white, so the scale starts below it
    most = float(np.nanmax(cells))
    image = png(cells.tolist(), -most / 3, max(most, 1.0))
    shapes: list[Shape] = [Picture(base64.b64encode(image).decode()), Line([low, high], [low, high], "c2")]
    legend, meaning = [("c2", "equal (l = 0)")], ""
    if any(verdict.code == "RC101" for verdict in diagnosis.verdicts):
        steps = -np.geomspace(-low, -high, 80)
        others = _others(evidence.profiles["log_mu"])
        for temperature in TEMPERATURES:
            shapes.append(Line(steps.tolist(), _tempered(steps, temperature, others).tolist(), "c0 dashed"))
        legend.append(("c0", f"temperature of the sampler over the trainer's: {', '.join(map(str, TEMPERATURES))}"))
        meaning = " A dashed curve is roughly what one quotient of the temperatures does; 0.7 is the flattest."
    return card(
        "Log-probs of trainer and sampler",
        chart(shapes, axis, axis, title="log pi against log mu", across="log mu, nats", clipped=True),
        f"Tokens by the log-prob of the sampler (across) and of the trainer (up); dark red is most of them.{meaning}",
        "a narrow stripe on the line, a little wider for rare tokens.",
        "log pi, nats",
        legend=legend,
    )


def by_log_mu(evidence: Evidence) -> str:
    """Mean l and |l| by the logged log-prob, inside the envelope of noise of the same size in every logit."""
    profile = evidence.profiles["log_mu"]
    # the first bin has no end and the last is the single value 0
    shown = [i for i, code in enumerate(profile.bins) if 0 < code < LOG_MU_EDGES.size and profile.count[i] >= FEWEST]
    places = [-math.sqrt(LOG_MU_EDGES[c - 1] * LOG_MU_EDGES[c]) for c in (profile.bins[i] for i in shown)]
    if len(shown) < 2:
        return ""
    envelope = [evidence.whole.sigma * -math.expm1(place) for place in places]
    return _profile_card(
        profile,
        shown,
        places,
        envelope,
        title="By logged log-prob",
        across="log mu, nats",
        meaning="Means over tokens of like log-prob; the band is the noise of sigma in every logit, which fades as "
        "(1 - p) where a token is likely.",
        healthy="mean l on zero, mean |l| along the edge of the band.",
    )


def by_position(evidence: Evidence, name: str = "position", title: str = "By position in the response") -> str:
    """Mean l and |l| by a factor that counts tokens."""
    profile, shown = _drawn(evidence, name)
    if profile is None or len(shown) < 2:
        return ""
    return _profile_card(
        profile,
        shown,
        [octave_start(profile.bins[i]) + 1.0 for i in shown],
        [],
        title=title,
        across="token",
        meaning="Means over tokens at like places, counted from 1. A gap that decays from the start is another prompt; "
        "one that begins somewhere is a position encoding or a limit; one that grows is an accumulating state.",
        healthy="mean l on zero; |l| follows how sure the model is at the place.",
    )


def by_lag(evidence: Evidence) -> str:
    """k3 by the updates between sampling and scoring; empty without the versions, or with a single lag."""
    profile, shown = _drawn(evidence, "lag")
    if profile is None or len(shown) < 2:
        return ""
    lags, k3 = [float(profile.bins[i]) for i in shown], [float(profile.k3[i]) for i in shown]
    line = Line(lags, k3, "c0", dots=True)
    axes = linear_axis(lags[0], lags[-1], whole=True), linear_axis(0.0, max(k3))
    hover = [Series("k3", lags, k3), Series("tokens", lags, [float(profile.count[i]) for i in shown])]
    drawn = chart([line], *axes, title="k3 by version lag", across="updates since sampling", hover=hover)
    return card(
        "By version lag",
        drawn,
        "k3 of the tokens by the updates between the weights that drew them and those that scored them. A small policy "
        "step makes it grow with the lag, up to its square; tokens of lag 0 show the engines alone.",
        "low at 0, and a curve that bends upward; one that is flat says that the versions are wrong, or do not matter.",
        "nats per token",
    )


def _drawn(evidence: Evidence, name: str) -> tuple[Profile | None, list[int]]:
    """The profile of a factor, and its bins that are drawn; None and none without its columns."""
    profile = evidence.profiles.get(name)
    return profile, [] if profile is None else np.flatnonzero(profile.count >= FEWEST).tolist()


def who_explains(evidence: Evidence) -> str:
    """A bar per factor."""
    rows: list[list[str | Cell]] = [
        [title, f"{explained:.1%}", Cell("", "room", explained), p, f"{values:,}"]
        for title, explained, p, values in report_text.factor_lines(evidence)
    ]
    return card(
        "Who explains |l|?",
        table(rows, head=("factor", "of its variance", "", "", "values")),
        "The share of the variance of |l| between the values of each column, minus what as many random groups "
        "would have; the p-value permutes responses, or tokens inside their response.",
        "the logged log-prob leads, because rare tokens are noisier; all others are near zero.",
    )


def _profile_card(
    profile: Profile,
    shown: Sequence[int],
    places: Sequence[float],
    envelope: Sequence[float],
    *,
    title: str,
    across: str,
    meaning: str,
    healthy: str,
) -> str:
    size = [float(profile.size[i]) for i in shown]
    mean = [float(profile.log_ratio[i]) for i in shown]
    horizontal = tight_log_axis(places[0], places[-1])
    values = [*size, *mean, 0.0, *envelope, *(-e for e in envelope)]
    shapes: list[Shape] = [Band(places, [-e for e in envelope], envelope, "soft")] if envelope else []
    shapes += [
        Line([horizontal.low, horizontal.high], [0.0, 0.0], "soft thin"),
        Line(places, size, "c0", dots=True),
        Line(places, mean, "c1", dots=True),
    ]
    legend = [("c0", "mean |l|"), ("c1", "mean l"), *([("soft", "noise of sigma")] if envelope else [])]
    rounded = [float(f"{place:.4g}") for place in places]
    hover = [Series("mean |l|", rounded, size), Series("mean l", rounded, mean)]
    vertical = linear_axis(min(values), max(values))
    drawn = chart(shapes, horizontal, vertical, title=title, across=across, hover=hover)
    return card(title, drawn, meaning, healthy, "nats", legend=legend)


def _others(profile: Profile) -> float:
    """The number n of equally likely other tokens that the dump suggests.

    A temperature leaves a token of probability 1 / (1 + n) as it is, so n follows from where the mean log-ratio changes
    its sign.
    """
    changes = np.flatnonzero(np.diff(np.sign(profile.log_ratio)) != 0)
    codes = np.asarray(profile.bins)
    inside = [c for c in changes if 0 < codes[c] < LOG_MU_EDGES.size]
    if not inside:
        return 1.0
    widest = max(inside, key=lambda c: min(profile.count[c], profile.count[c + 1]))
    return max(1.0, math.expm1(-LOG_MU_EDGES[codes[widest]]))


def _tempered(log_mu: np.ndarray, temperature: float, others: float) -> np.ndarray:
    """log pi of a token with this ``log_mu``, if mu is pi at ``temperature`` and ``others`` tokens share the rest."""
    rest = temperature * (np.log(-np.expm1(log_mu)) - math.log(others)) + math.log(others)
    return temperature * log_mu - np.logaddexp(temperature * log_mu, rest)
