"""Write our rows of megatron_rc/analyze/atlas.csv from the committed sums, and docs/atlas.md from all rows.

    python benchmarks/real/atlas.py

Published rows are edited by hand. Each row quotes its source and names its statistic.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from megatron_rc.analyze.atlas import FILE, Row
from megatron_rc.files import read_csv, replace_text, write_csv
from megatron_rc.jobs.describe import table
from real.page import DOCS, number, rows
from real.sums import figures, interval

OURS = "docs/real.md"
STATISTICS = {
    "sigma": "noise on every logit, sqrt(sum l^2 / sum (1 - p)^2); l = log pi - log mu",
    "k3": "mean of e^l - 1 - l, nats per token",
    "eps_mad": "mean of |eps|, eps = logit pi - logit mu; low and high are its 5 % and 95 % quantiles",
    "mean_abs_l": "mean of |l|, nats",
    "rms_l": "root mean square of l, nats",
    "sd_l": "standard deviation of l, nats",
    "max_abs_l": "largest |l|, nats",
    "mean_exp_abs_l": "mean of e^|l| (token_mult_prob_error)",
    "gen_kl_error": "NeMo-RL's KL of the generation from the trainer, nats per token",
    "mismatch_kl": "prime-rl's KL of trainer and inference, nats per token",
    "rollout_corr/kl": "verl's KL of rollout and old log-probs, nats per token",
}


def own() -> list[Row]:
    """sigma and k3 of every row of docs/real.md."""
    out = []
    for name, row in rows().items():
        now, model = figures(row["prompts"]), "SmolLM2-135M-Instruct, from 4 bits"
        for statistic in ("sigma", "k3"):
            values = now[statistic], *interval(row["prompts"], statistic)
            trainer = "Megatron, bf16" if name == "bf16-trainer-bf16" else "Megatron, fp32"
            note = f"{now['tokens']:,} tokens; the range is a 95 % interval"
            out.append(Row(model, "dense", trainer, "embedded", name, statistic, *values, note, OURS, ""))
    return out


def page(atlas: Sequence[Row]) -> str:
    head = ["model", "kind", "trainer", "sampler", "precision", "statistic", "value", "range", "note", "source"]
    lines = []
    for row in sorted(atlas, key=lambda row: (row.source == OURS, list(STATISTICS).index(row.statistic))):
        span = "" if math.isnan(row.low) else f"{number(row.low)} to {number(row.high)}"
        link = "[real.md](real.md)" if row.source == OURS else f"[{name_of(row.source)}]({row.source})"
        lines.append([*row[:5], f"`{row.statistic}`", number(row.value), span, row.note, link])
    known = table(["statistic", "definition"], [(f"`{name}`", meaning) for name, meaning in STATISTICS.items()])
    return "\n".join([Path(__file__).with_name("atlas.md").read_text(), known, table(head, lines)])


def name_of(source: str) -> str:
    """The project and number of a URL, as people write it."""
    parts = source.rstrip("/").split("/")
    return f"arXiv {parts[-1]}" if "arxiv" in source else f"{parts[3]}/{parts[4]} {parts[-1]}"


def main() -> None:
    published = [row for row in read_csv(Row, FILE) if row.source != OURS]
    atlas = [*published, *own()]
    write_csv(Row, atlas, FILE, digits=5)
    replace_text(DOCS / "atlas.md", page(atlas))
    print(f"{len(published)} published rows and {len(atlas) - len(published)} of ours: {DOCS / 'atlas.md'}")


if __name__ == "__main__":
    main()
