"""Picture of the error of a truncated importance weight against its bound C."""

from megatron_rc.analyze.diagnosis import Diagnosis
from megatron_rc.analyze.pages.card import card
from megatron_rc.analyze.statistics.bound import TRIED
from megatron_rc.drawing.axes import tight_log_axis
from megatron_rc.drawing.series import Series
from megatron_rc.drawing.svg import Line, Shape, chart

COLOURS = {"token": "c0", "sequence": "c1"}
NAMES = {"token": "tokens", "sequence": "responses"}
MARGIN = 1.05
"""Factor of room next to the first and last C, so that their dots are whole."""
DECADES = 4.0
"""Decades below the largest error that the picture shows: where a bound cuts nothing, its bias falls to 0."""


def error_of_bound(diagnosis: Diagnosis) -> str:
    """MSE(C) of weights of tokens and of responses with its two terms, and the C that is recommended."""
    bounds = {level: bound for level, bound in diagnosis.recommendation.bounds.items() if bound.error.min() > 0}
    if not bounds:
        return ""
    tried = TRIED.tolist()
    largest = max(float(bound.error.max()) for bound in bounds.values())
    smallest = min(float(bound.error.min()) for bound in bounds.values())
    vertical = tight_log_axis(max(smallest / 2, largest / 10**DECADES), 2 * largest)
    shapes: list[Shape] = []
    for level, bound in bounds.items():
        for values, kind in ((bound.bias_squared, "dashed"), (bound.variance, "thin")):
            # a bound that cuts nothing has a bias of 0, which a logarithmic axis cannot show
            points = [(c, v) for c, v in zip(tried, values.tolist(), strict=True) if v > vertical.low / 10]
            if len(points) > 1:
                shapes.append(Line([c for c, _ in points], [v for _, v in points], f"{COLOURS[level]} {kind}"))
        shapes.append(Line(tried, bound.error.tolist(), COLOURS[level], dots=True))
        # not marks: the labels of two marks could overlap
        shapes.append(Line([bound.upper] * 2, [vertical.low, vertical.high], f"{COLOURS[level]} thin dashed"))
    axes = tight_log_axis(tried[0] / MARGIN, tried[-1] * MARGIN), vertical
    hover = [Series(NAMES[level], tried, bound.error.tolist()) for level, bound in bounds.items()]
    drawn = chart(shapes, *axes, title="error of a truncated weight", across="C", hover=hover, clipped=True)
    chosen = ", ".join(f"{bound.upper:.3g} for {NAMES[level]}" for level, bound in bounds.items())
    return card(
        "Which bound C?",
        drawn,
        "MSE(C) of one step, (mean (rho - C)+ |A|)^2 + Var(min(rho, C) A) / n, of weights of tokens and of whole "
        f"responses: dashed the bias of the truncation, thin the variance that remains. The best C (upright line) is "
        f"{chosen}: the one nearest to 2 whose error is within 1 % of the least.",
        "flat, so that C does not matter; one that falls to the right wants a larger C, one that rises a smaller C.",
        "squared advantage",
        legend=[(COLOURS[level], f"MSE, {NAMES[level]}") for level in bounds],
    )
