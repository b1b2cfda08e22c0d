"""Write docs/real.md and its three figures from the committed sums.

python benchmarks/real/page.py
"""

import csv
import json
import math
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from scipy.stats import chi2

sys.path.append(str(Path(__file__).parents[1]))
from megatron_rc.analyze import atlas
from megatron_rc.analyze.statistics.displacement import EDGES
from megatron_rc.correction.warnings import horizon
from megatron_rc.files import replace_text
from megatron_rc.jobs.describe import table
from real.sums import ENDS, LENGTHS, POSITIONS, RESULTS, RUN, figures, interval

DOCS = Path(__file__).parents[2] / "docs"
IMAGES = DOCS / "images"
ROUNDED = {
    "fp32": "nothing",
    "bf16": "weights, activations, cache and logits to bf16",
    "bf16-batch-16": "the same, in batches of at most 16 requests",
    "bf16-batch-4": "the same, in batches of at most 4 requests",
    "fp16": "the same to fp16",
    "int8": "bf16, and weights to 8 bits per output channel",
    "int8-tensor": "bf16, and weights to 8 bits per tensor",
    "fp8-tensor": "bf16, and weights and inputs of matrices to e4m3 per tensor",
    "fp8-block": "bf16, weights to e4m3 per 128 x 128, inputs per token and 128 features",
    "fp8-cache": "bf16, and keys and values to e4m3",
    "int4-32": "bf16, and weights to 4 bits per 32 inputs",
    "int4-128": "bf16, and weights to 4 bits per 128 inputs",
    "bf16-trainer-bf16": "bf16, and the trainer in bf16, too",
    "bf16-hot": "bf16, at temperature 1.4",
}
"""Choice of gap.yaml -> what its sampler rounds."""
(PUBLISHED,) = atlas.by_confidence().values()
FEWEST = 20
"""Tokens of a range that is shown."""
HELD_OUT = 256
"""Held-out problems of runs.yaml."""
TOY_K3 = 3.6e-5
"""k3 of the quickstart, in bf16."""
SHOWN = ("bf16", "int8", "fp8-tensor", "int4-128")
"""Rows of the figures, where they were measured."""


def rows(file: str = "gap.json", seed: int = 1) -> dict[str, dict[str, Any]]:
    """Choice -> its sums, in the order of ROUNDED."""
    found = json.loads((RESULTS / file).read_text())
    return {name: found[f"{name}/seed-{seed}"] for name in ROUNDED if f"{name}/seed-{seed}" in found}


def number(value: float) -> str:
    return f"{value:.2g}" if abs(value) < 0.1 else f"{value:.3g}"


def again() -> str:
    """k3 of every seed, the probability of differences as large as theirs, and k3 of all tokens."""
    lines = []
    for name, first in rows().items():
        each = [first, *(found[name] for found in others() if name in found)]
        k3 = [figures(row["prompts"])["k3"] for row in each]
        bounds = [interval(row["prompts"], "k3") for row in each]
        # weights of the mean of all, and the sum of squares about it
        exact = [((high - low) / (2 * 1.96)) ** -2 for low, high in bounds]
        mean = float(np.average(k3, weights=exact))
        apart = float(chi2.sf(sum(w * (one - mean) ** 2 for w, one in zip(exact, k3, strict=True)), len(k3) - 1))
        cells = [f"{one:.3g} ({low:.3g} to {high:.3g})" for one, (low, high) in zip(k3, bounds, strict=True)]
        pooled = figures([one for row in each for one in row["prompts"]])
        lines.append([f"`{name}`", "; ".join(cells), f"{apart:.2g}", f"{pooled['k3']:.3g}", f"{pooled['tokens']:,}"])
    return table(["sampler", "k3 of each seed", "p", "k3 of all", "tokens"], lines)


def others() -> list[dict[str, dict[str, Any]]]:
    """The rows of the seeds from 2 on."""
    return [found for seed in range(2, 10) if (found := rows(seed=seed))]


def gaps(found: dict[str, dict[str, Any]]) -> str:
    lengths = [str(n) for n in LENGTHS if any(str(n) in row["sequence weights"] for row in found.values())]
    names = ["sampler", "what it rounds", "tokens", "k3, nats per token", "sigma", "T*"]
    names += [f"ESS at {', '.join(lengths)} tokens"]
    lines = []
    for name, row in found.items():
        now, (low, high) = figures(row["prompts"]), interval(row["prompts"], "k3")
        weights = row["sequence weights"]
        ess = ", ".join(f"{weights[n]['ess']:.2f}" if n in weights else "-" for n in lengths)
        length = horizon(now["k3"])
        k3 = f"{number(now['k3'])} ({number(low)} to {number(high)})"
        cells = [f"`{name}`", ROUNDED[name], f"{now['tokens']:,}", k3]
        cells += [number(now["sigma"]), f"{length:,.0f}" if length < 1e6 else "> 1e6", ess, f"{now['ratio']:.4f}"]
        lines.append(cells)
    return table([*names, "mean ratio"], lines)


def law(found: dict[str, dict[str, Any]]) -> str:
    edges = [f"{a:g} to {b:g}" for a, b in pairwise(EDGES)]
    lines = []
    for name, row in found.items():
        cells = [
            f"{number(one['mad'])}; {number(one['q05'])}, {number(one['q95'])}" if one["tokens"] >= FEWEST else ""
            for one in row["bins"]
        ]
        lines.append([f"`{name}`", *cells, f"{row['kurtosis']:.1f}"])
    lines.append(["*Qwen1.5-MoE-A2.7B, published*", *(f"{one:.3f}" for one in PUBLISHED), ""])
    return table(["mean of abs(eps); q05, q95", *edges, "kurtosis"], lines)


def parts(found: dict[str, dict[str, Any]]) -> str:
    """sigma by place in the response and by kind of prompt."""
    spans = [f"{a + 1} to {b}" if b < 10**5 else f"from {a + 1}" for a, b in pairwise(POSITIONS)]
    spans = spans[: max(len(row["positions"]) for row in found.values())]
    kinds = sorted({one["kind"] for row in found.values() for one in row["prompts"]} - {""})
    lines = []
    for name, row in found.items():
        of_kinds = [[one for one in row["prompts"] if one["kind"] == kind] for kind in kinds]
        shorter = [{}] * (len(spans) - len(row["positions"]))
        cells = [figures([one]) for one in row["positions"]] + shorter + [figures(one) for one in of_kinds]
        lines.append([f"`{name}`", *(number(one["sigma"]) if "sigma" in one else "" for one in cells)])
    return table(["sigma", *spans, *kinds], lines)


def draw(found: dict[str, dict[str, Any]]) -> None:
    shown = {name: found[name] for name in SHOWN if name in found}
    figure = Figure((3.2 * len(shown), 3.3), layout="constrained")
    for axes, (name, row) in zip(np.atleast_1d(figure.subplots(1, len(shown))), shown.items(), strict=True):
        mu, pi = np.exp(np.array(row["scatter"])).T
        axes.plot(mu, pi, ".", markersize=1.5, alpha=0.5)
        axes.axline((0, 0), slope=1, color="black", linewidth=0.5)
        axes.set(title=name, xlabel="probability of the sampler", ylabel="probability of the trainer", aspect="equal")
    figure.savefig(IMAGES / "real_scatter.png", dpi=90)

    figure = Figure((7, 3.6), layout="constrained")
    axes, places = figure.subplots(), np.arange(len(PUBLISHED))
    for name, row in shown.items():
        axes.plot(places, [one.get("mad", np.nan) for one in row["bins"]], "o-", label=name)
    axes.plot(places, PUBLISHED, "k^--", label="Qwen1.5-MoE-A2.7B, published")
    axes.set_xticks(places, [f"{a:g}–{b:g}" for a, b in pairwise(EDGES)])
    axes.set(xlabel="trainer's probability of the token", ylabel="mean |eps|", yscale="log")
    axes.legend(fontsize=8)
    figure.savefig(IMAGES / "real_eps.png", dpi=90)

    figure = Figure((3.2 * len(shown), 3.3), layout="constrained")
    for axes, (name, row) in zip(np.atleast_1d(figure.subplots(1, len(shown))), shown.items(), strict=True):
        now, longest = figures(row["prompts"]), max(int(n) for n in row["sequence weights"])
        lengths = np.linspace(0, longest, 100)
        half = 1.96 * np.sqrt(2 * now["k3"] * lengths)
        drift = -now["k3"] * lengths
        axes.fill_between(lengths, drift - half, drift + half, alpha=0.15)
        for length, one in row["sequence weights"].items():
            axes.plot([int(length)] * one["n"], one["sums"], "_", color="C1", markersize=6, alpha=0.5)
        star = horizon(now["k3"])
        if star < longest:
            axes.axvline(star, color="black", linewidth=0.7, linestyle="--")
        axes.set(title=f"{name}: T* = {star:,.0f}", xlabel="tokens", ylabel="sum of l, nats")
    figure.savefig(IMAGES / "real_sums.png", dpi=90)


def run() -> tuple[str, list[float]]:
    """(the steps of the run through SGLang that were evaluated and those between, its persistences)."""
    with (RESULTS / "run_sglang.csv").open() as file:
        found = list(csv.DictReader(file))
    lines = [[row["step"], *(row[name] or "-" for name in RUN)] for row in found if int(row["step"]) % 5 == 0]
    return table(["step", *RUN], lines), [float(row["persistence"]) for row in found if row["persistence"]]


def runs() -> str:
    """The ends of the runs of runs.yaml, and what each lost against the exact sampler."""
    with (RESULTS / "runs.csv").open() as file:
        found = list(csv.DictReader(file))
    exact = {row["seed"]: float(row["accuracy"]) for row in found if row["run"] == "exact-none"}
    lines = []
    for row in found:
        accuracy, other = float(row["accuracy"]), exact[row["seed"]]
        # two evaluations of each run, their answers taken as independent
        error = math.sqrt(sum(p * (1 - p) for p in (accuracy, other)) / (2 * HELD_OUT))
        lost = f"{100 * (other - accuracy):+.1f} +- {196 * error:.1f}" if row["run"] != "exact-none" else ""
        cells = [f"`{row['run']}`", row["seed"], f"{float(row['first accuracy']):.1%}", f"{accuracy:.1%}", lost]
        lines.append([*cells, *(row[name] or "-" for name in ENDS)])
    return table(["run", "seed", "accuracy before", "at the end", "points lost", *ENDS], lines)


def machines(found: Iterable[dict[str, Any]]) -> str:
    return "; ".join(sorted({f"{row['processor']} ({row['flags']})" for row in found}))


def page(found: dict[str, dict[str, Any]]) -> str:
    bf16, cuda = figures(found["bf16"]["prompts"]), rows("gap_cuda.json")
    text = (Path(__file__).parent / "page.md").read_text()
    steps, persistence = run()
    for name, value in {
        "CUDA_MACHINES": machines(cuda.values()),
        "CUDA_TABLE": gaps(cuda),
        "CUDA_PARTS": parts(cuda),
        "AGAIN": again(),
        "OTHERS": machines(row for found in others() for row in found.values()),
        "SGLANG_TABLE": gaps(rows("gap_sglang.json")),
        "RUN_TABLE": steps,
        "RUNS_TABLE": runs(),
        "PERSISTENCE": f"{sum(persistence) / len(persistence):.2f} ({min(persistence):.2f} to {max(persistence):.2f})",
        "PROBE": (RESULTS / "probe.txt").read_text().strip(),
        "MACHINES": machines(found.values()),
        "SPEED": "\n\n".join(path.read_text().strip() for path in sorted(RESULTS.glob("speed_*.md"))),
        "TABLE": gaps(found),
        "LAW": law(found),
        "PARTS": parts(found),
        "BF16_K3": f"{bf16['k3']:.1e}",
        "BF16_TIMES": f"{bf16['k3'] / TOY_K3:.0f}",
        "BF16_LENGTH": f"{horizon(bf16['k3']):,.0f}",
    }.items():
        text = text.replace(name, value.rstrip("\n"))
    return text


if __name__ == "__main__":
    matplotlib.use("agg")
    everything = rows()
    draw(everything)
    replace_text(DOCS / "real.md", page(everything))
    print(DOCS / "real.md")
