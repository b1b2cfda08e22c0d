"""Draw docs/images/rules/: what each rule sees, in a real dump with its trap next to a healthy one.

python benchmarks/diagnosis/confusion.py --server     # makes the dumps
python benchmarks/diagnosis/rule_pictures.py          # draws them
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_rc.analyze.diagnosis import diagnose_dump
from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.statistics.factors import LOG_MU_EDGES, octave_start

PICTURES = Path(__file__).parents[2] / "docs/images/rules"
HEALTHY = "healthy-bf16"
COLOURS = {"healthy": "#8a8f98", "sick": "#d1495b"}
FEWEST = 20
"""Tokens of a bin that is drawn."""
SCATTERED = 3000
"""Tokens of a scatter plot."""


def octave_label(code: int) -> str:
    low, high = octave_start(code), octave_start(code + 1) - 1
    return str(low) if high <= low else f"{low}-{high}"


LABELS: dict[str, Callable[[int], str]] = {"position": octave_label, "cached": lambda tenths: f"{10 * tenths} %"}
"""Text of a bin of a factor, where it is not the bin itself."""

Draw = Callable[[Axes, Evidence, Evidence], None]
"""Draws (axes, healthy, sick)."""


def by_probability(axes: Axes, healthy: Evidence, sick: Evidence) -> None:
    """Mean l over the probability that the sampler logged."""
    _over_probability(axes, "log_ratio", {"healthy": healthy, "sick": sick})
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set(xlabel="probability that the sampler logged", ylabel="mean log-ratio l, nats")


def noise(axes: Axes, healthy: Evidence, sick: Evidence) -> None:
    """Mean |l| over the logged probability, which noise on logits makes proportional to 1 - p."""
    _over_probability(axes, "size", {"bf16": healthy, "fp8 weights": sick})
    axes.set(xlabel="probability that the sampler logged", ylabel="mean |l|, nats")


def _over_probability(axes: Axes, value: str, labelled: dict[str, Evidence]) -> None:
    # the middle of each bin of the logged log-prob; exact zeros have a probability of 1
    edges = np.concatenate([[2 * LOG_MU_EDGES[0]], LOG_MU_EDGES, [0.0, 0.0]])
    for (label, evidence), colour in zip(labelled.items(), COLOURS.values(), strict=True):
        profile = evidence.profiles["log_mu"]
        drawn, index = profile.count >= FEWEST, np.asarray(profile.bins)
        probabilities = np.exp((edges[index] + edges[np.minimum(index + 1, edges.size - 1)]) / 2)
        axes.plot(probabilities[drawn], getattr(profile, value)[drawn], ".-", color=colour, label=label)


def _bars(axes: Axes, healthy: dict[int, float], sick: dict[int, float]) -> None:
    """Values by place, next to each other."""
    for shift, name, values in ((-0.2, "healthy", healthy), (0.2, "sick", sick)):
        axes.bar(np.array(list(values)) + shift, list(values.values()), 0.4, color=COLOURS[name], label=name)


def honesty(axes: Axes, healthy: Evidence, sick: Evidence) -> None:
    found = [{0: w.z_ratio.z, 1: w.z_surprise.z if w.z_surprise else 0.0} for w in (healthy.whole, sick.whole)]
    _bars(axes, *found)
    axes.axhspan(-4, 4, color="black", alpha=0.07, linewidth=0)
    axes.set_xticks([0, 1], ["z_rho: the logs agree", "z_W: the tokens do not"])
    axes.set(ylabel="statistic; honest within the band")


def lags(axes: Axes, healthy: Evidence, sick: Evidence) -> None:
    _bars(axes, healthy.lag_correlations, sick.lag_correlations)
    axes.set(xlabel="tokens between the two log-probs", ylabel="correlation of log π and log μ")


def scatter(axes: Axes, healthy: Evidence, sick: Evidence) -> None:
    for name, evidence in (("sick", sick), ("healthy", healthy)):
        shown = evidence.sample.log_mu[:SCATTERED], evidence.sample.log_pi[:SCATTERED]
        axes.plot(*shown, ".", color=COLOURS[name], markersize=2, rasterized=True)
        axes.plot([], [], "o", color=COLOURS[name], label=name)
    axes.set(xlabel="logged log-prob log μ, nats", ylabel="trainer's log π, nats")


def over(factor: str, across: str) -> Draw:
    """k3 by the values of a factor."""

    def draw(axes: Axes, healthy: Evidence, sick: Evidence) -> None:
        profile = sick.profiles[factor]
        drawn = np.flatnonzero(profile.count >= FEWEST)
        axes.bar(np.arange(drawn.size), profile.k3[drawn], color=COLOURS["sick"], label="sick")
        axes.axhline(healthy.whole.k3, color=COLOURS["healthy"], label="healthy, mean")
        labels = [LABELS.get(factor, str)(profile.bins[index]) for index in drawn]
        every = max(1, -(-drawn.size // 8))
        axes.set_xticks(np.arange(drawn.size)[::every], labels[::every])
        axes.set_yscale("log")
        axes.set(xlabel=across, ylabel="k3, nats per token")

    return draw


DRAWN: dict[str, tuple[str, Draw]] = {
    "RC101": ("logged-temperature-0.9", by_probability),
    "RC102": ("renormalised-top-p-0.95", by_probability),
    "RC103": ("hidden-top-p-0.95", honesty),
    "RC104": ("raw-logs-at-temperature-0.8", by_probability),
    "RC106": ("padded-vocabulary", by_probability),
    "RC201": ("shifted-by-one", lags),
    "RC203": ("zero-filled", scatter),
    "RC205": ("another-template", over("position", "position in the response")),
    "RC301": ("server-stale-prefix-cache", over("cached", "share of the prompt from the prefix cache")),
    "RC303": ("one-stale-server", over("server", "server")),
    "RC404": ("expert-flips", over("routes", "tenths of the layers with other experts")),
    "RC501": ("healthy-fp8-weights", noise),
    "RC502": ("policy-lag", over("lag", "updates since sampling")),
}
"""Dump and drawing of each rule that has a picture."""


def picture(code: str, healthy: Evidence, sick: Evidence) -> Figure:
    figure = Figure(figsize=(6, 2.8), layout="constrained")
    axes = figure.subplots()
    DRAWN[code][1](axes, healthy, sick)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/megatron_rc_traps"), help="that of confusion.py")
    dumps = parser.parse_args().folder / "dumps/0"
    # ids and the date would change with every run
    matplotlib.rcParams.update({"svg.hashsalt": "rules", "svg.fonttype": "none", "font.size": 9})
    PICTURES.mkdir(parents=True, exist_ok=True)
    healthy = diagnose_dump(dumps / f"{HEALTHY}.parquet").evidence
    for code, (name, _) in DRAWN.items():
        sick = diagnose_dump(dumps / f"{name}.parquet").evidence
        picture(code, healthy, sick).savefig(PICTURES / f"{code}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
