"""docs/collapse.md and docs/collapse_evidence.md, from the committed rows, the questions and the words of page.md."""

import functools
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from collapse.compare import Difference, answers, difference, fall_p, rows_of
from collapse.rows import CHOOSING, TUNING, UNSEEN, full_name
from megatron_rc import schema
from megatron_rc.jobs.describe import table

HERE = Path(__file__).parent
GAPS = {"16 updates old": "lag-16", "off by fixed noise of 0.2": "fixed-0.2"}
TREATMENTS = {
    "no correction": "none",
    "no correction, `old: rollout` (PPO's clip on π/μ)": "two-policies",
    "`token-tis`": "token-tis",
    "`seq-tis`": "seq-tis",
}
Z_LIMIT = 3.0
"""A z_W farther from 0 is seen as hidden sampling; honest samples pass 997 times in 1,000."""
REFERENCE = "seq-tis"
"""Method that all others are compared with in the ranking."""


class Question(NamedTuple):
    question: str
    task: str
    of: str
    added: str
    pairs: list[tuple[str, str]]


@functools.cache
def questions() -> tuple[Question, ...]:
    """Those of questions.yaml."""
    defaults = {"task": "arithmetic", "of": "final", "added": ""}
    return tuple(Question(**(defaults | each)) for each in schema.load_yaml(HERE / "questions.yaml")["questions"])


def write(frame: pd.DataFrame, docs: Path) -> None:
    (docs / "collapse.md").write_text((HERE / "page.md").read_text().format_map(fields(frame)))
    (docs / "collapse_evidence.md").write_text("\n\n".join(evidence(frame)) + "\n")


def percent(values: pd.Series) -> str:
    return f"{100 * values.mean():.0f} %" if len(values) else ""


def counted(rows: pd.DataFrame, event: str) -> str:
    return f"{int(rows[event].sum())} of {len(rows)}" if len(rows) else ""


def k3(frame: pd.DataFrame, gap: str) -> float:
    """Median k3 of the runs of a gap that correct nothing, in the first quarter of their steps."""
    return float(rows_of(frame, f"{gap}-none").k3_early.median())


NUMBERS: dict[str, Callable[[pd.DataFrame], str]] = {
    "final": lambda rows: percent(rows.final),
    "failed": lambda rows: counted(rows, "failed"),
    "seeds": lambda rows: str(rows.seed.nunique()),
    "k3": lambda rows: f"{rows.k3_early.median():.2g}",
    "outside": lambda rows: f"{100 * rows.outside.median():.2g} %",
    "persistence": lambda rows: f"{rows.persistence.median():.2f}",
}
"""What page.md prints of an arm: {final:fixed-0.2-none}, of another task {final:copy/fixed-0.2-none}."""


class _Of:
    """A number of the arm that a field of page.md names."""

    def __init__(self, frame: pd.DataFrame, number: Callable[[pd.DataFrame], str]) -> None:
        self.frame, self.number = frame, number

    def __format__(self, arm: str) -> str:
        task, _, name = arm.rpartition("/")
        if (rows := rows_of(self.frame, name, task or "arithmetic")).empty:
            raise ValueError(f"page.md: no run is called {full_name(arm)}")
        return self.number(rows)


def fields(frame: pd.DataFrame) -> Mapping[str, Any]:
    """What page.md names."""
    counted_rows = frame[frame.seed < TUNING]
    return {name: _Of(frame, number) for name, number in NUMBERS.items()} | dict(
        headline=headline(frame).strip(),
        ranking=ranking(frame).strip(),
        noise=f"{100 * replicate_spread(frame):.0f}",
        runs=len(counted_rows),
        hours=f"{frame.seconds.sum() / 3600:.0f}",
        lengths=f"{counted_rows.length.min():.0f} to {counted_rows.length.max():.0f}",
    )


def headline(frame: pd.DataFrame) -> str:
    """Two gaps by four treatments: what they end at, and how many failed."""
    heads = ["", *(f"{words} (k3 {k3(frame, gap):.2g})" for words, gap in GAPS.items())]
    lines = []
    for words, method in TREATMENTS.items():
        arms = [rows_of(frame, f"{gap}-{method}") for gap in GAPS.values()]
        lines.append([words, *(f"{percent(rows.final)}, {counted(rows, 'failed')} failed" for rows in arms)])
    lines.append(["(exact sampler)", *[percent(rows_of(frame, "exact-none").final)] * 2])
    return table(heads, lines)


def replicate_spread(frame: pd.DataFrame) -> float:
    """Standard deviation of the final accuracy of one recipe and seed from two warm-ups of the same kind."""
    # the variance of one run alone is NaN
    return math.sqrt(frame[frame.task == "arithmetic"].groupby(["run", "seed"]).final.var().mean())


def ranking(frame: pd.DataFrame, gap: str = "lag-16") -> str:
    """Every method at a gap and the usual learning rate, the one that ends highest first."""
    here = frame[(frame.task == "arithmetic") & (frame.seed < TUNING)]
    names = here.run.str.extract(rf"^{gap}-(?!in-)(.+)-lr-3e-4-plain$")[0].dropna().unique()
    arms = {name: here[here.run == f"{gap}-{name}-lr-3e-4-plain"] for name in names}
    order = sorted(arms, key=lambda name: -arms[name].groupby("seed").final.mean().mean())
    lines = []
    for name in order:
        rows, seeds = arms[name], arms[name].groupby("seed").final.mean()
        shown = "" if name == REFERENCE else points(difference(rows, arms[REFERENCE]))
        lines.append(
            [f"`{name}`" if name != "two-policies" else "`none`, `old: rollout`", f"{seeds.size}, {len(rows)}",
             f"{100 * seeds.mean():.0f} %", f"{100 * rows.final.min():.0f} %", shown, counted(rows, "failed"),
             f"{100 * rows.dropped.mean():.0f} %" if rows.dropped.max() > 0 else ""]
        )  # fmt: skip
    heads = ("method", "seeds, runs", "mean", "lowest run", f"points above {REFERENCE}, 95 %", "failed", "dropped")
    return table(heads, lines)


def points(gap: Difference, of: str = "final", *, with_median: bool = False) -> str:
    """A difference with its interval."""
    if math.isnan(gap.mean):
        return "too few runs"
    if of == "k3_early":
        return "x {:.2g} [{:.2g}, {:.2g}]".format(*(10**each for each in gap[:3]))
    shown = f"{100 * gap.mean:+.1f} [{100 * gap.low:+.1f}, {100 * gap.high:+.1f}]"
    if with_median:
        shown += f", median {100 * gap.median:+.1f}"
    return shown if gap.paired else f"{shown}, unpaired"


def evidence(frame: pd.DataFrame) -> Iterator[str]:
    """The blocks of docs/collapse_evidence.md."""
    yield "# The evidence of the collapse lab"
    yield _prose(
        """Printed by `python benchmarks/collapse/verdict.py --docs` from `runs.csv` and `questions.yaml` there;
        [collapse.md](collapse.md) is the page to read first. An arm is named gap-method; a learning rate of 3e-4 and no
        variant go without saying."""
    )
    yield _prose(
        """A difference is that of the mean held-out accuracy of the last 3 evaluations, in points, with Student's 95 %
        interval over seeds that share a warm-up, and its median; replicates of a seed are averaged first. Where no pair
        shares one, the interval is Welch's, and the row says "unpaired". The answer is *higher* or *lower* where Holm's
        procedure rejects equality among the comparisons of the question, with 5 seeds or more. Settings were found on
        seeds 1 to 3, which the last two columns leave out. *Failed* is below 70 % of the seed's exact run, *fell* is
        30 % or more below the run's own best at any time, with the p of the log-rank test of that time."""
    )
    for each in questions():
        yield from _answered(each, frame)
    yield "## Size and persistence of each gap"
    yield _gaps(frame)
    yield "## What the clip stops"
    yield _clips(frame)
    yield "## Fresh rollouts of a bf16 sampler"
    yield f"The whole gap is rounding: k3 is {k3(frame, 'bf16-sampler'):.0e}."
    yield ranking(frame, "bf16-sampler")
    yield "## Learning rates"
    yield _rates(frame)
    yield "## Which signal moves first"
    yield _order(frame)
    yield "## The founding papers' rows"
    yield (HERE / "papers.md").read_text().strip()


def _answered(each: Question, frame: pd.DataFrame) -> Iterator[str]:
    arms = [tuple(rows_of(frame, arm, each.task) for arm in pair) for pair in each.pairs]
    gaps = [difference(*pair, each.of) for pair in arms]
    later = [difference(*(rows[~rows.seed.isin(CHOOSING)] for rows in pair), each.of) for pair in arms]
    lines = []
    for (one, two), (arm, other), gap, rest, answer, again in zip(
        each.pairs, arms, gaps, later, answers(gaps), answers(later), strict=True
    ):
        p = fall_p(arm, other)
        lines.append(
            [f"{one} against {two}", answer, points(gap, each.of, with_median=True),
             f"{gap.above} of {gap.seeds}" if gap.paired else "",
             f"{gap.sign_p:.2g}" if gap.paired else "", f"{counted(arm, 'failed')}, {counted(other, 'failed')}",
             f"{counted(arm, 'fell')}, {counted(other, 'fell')}" + (f" ({p:.2g})" if p == p else ""),
             points(rest, each.of), again]
        )  # fmt: skip
    heads = ("comparison", "answer", "difference, 95 %", "higher on", "sign test p", "failed", "fell (log-rank p)",
             "without seeds 1 to 3", "answer")  # fmt: skip
    where = "" if each.task == "arithmetic" else f" ({each.task})"
    yield f"## {each.question}{where}"
    if each.added:
        yield f"Added after a look: {each.added}"
    yield table(heads, lines)


def _gaps(frame: pd.DataFrame) -> str:
    """One line per gap, of the runs that correct nothing."""
    lines = []
    plain = frame[(frame.seed < TUNING) & frame.run.str.contains(r"-none-lr-3e-4-plain(?:-live)?$", regex=True)]
    for (task, run), rows in plain.groupby(["task", "run"]):
        early = rows.k3_early.median()
        values = [rows[name].median() for name in ("outside", "persistence", "entropy_k3", "grad_norm")]
        lines.append(
            [task, run.partition("-none-")[0], str(len(rows)), f"{early:.2g}" if early >= UNSEEN else "0",
             f"{rows.depth.median():.2g}" if early >= UNSEEN else "0", *("" if v != v else f"{v:.2g}" for v in values),
             percent(rows.final), *(counted(rows, event) for event in ("fell", "collapsed", "failed")),
             f"{(seen.abs() > Z_LIMIT).sum()} of {seen.size}" if (seen := rows.z_surprise.dropna()).size else ""]
        )  # fmt: skip
    heads = ("task", "gap", "runs", "k3", "T / T*", "outside the clip", "persistence", "entropy with k3",
             "gradient norm", "final", "fell", "collapsed", "failed", "z_W beyond 3")  # fmt: skip
    words = """Medians over runs without a correction. k3, T / T* and the share of tokens outside [0.8, 1.28] are
        those of the first quarter of the steps. Persistence is the metric of a job; entropy with k3 is
        their rank correlation over the steps of a run; z_W is the test of `megatron-rc analyze` for hidden sampling."""
    return f"{_prose(words)}\n\n{table(heads, lines)}"


def _clips(frame: pd.DataFrame) -> str:
    """One line per gap, of the runs whose clip acts on pi / mu."""
    lines = []
    plain = frame[(frame.seed < TUNING) & frame.run.str.endswith("-two-policies-lr-3e-4-plain") & frame.clipped.notna()]
    for run, rows in plain.groupby("run"):
        clipped, growth = 100 * rows.clipped, rows.growth.dropna()
        spread = f"{growth.min():.1f} to {growth.max():.1f}" if growth.size else ""
        seen = str(len(rows)), f"{clipped.min():.1f} to {clipped.max():.1f} %", spread
        lines.append([run.partition("-two-")[0], *seen, percent(rows.final), counted(rows, "failed")])
    words = """Runs with `old: rollout`: the share of tokens that the clip stops in the first quarter of the steps, and
        how it grows from steps 1 to 10 to steps 11 to 20, lowest to highest run."""
    return f"{_prose(words)}\n\n{table(('gap', 'runs', 'clipped', 'growth', 'final', 'failed'), lines)}"


def _rates(frame: pd.DataFrame) -> str:
    """Mean final accuracy by learning rate; bold is the rate at which the tuning seeds end highest."""
    rates = ("1e-5", "3e-5", "1e-4", "3e-4", "6e-4", "1e-3")
    lines = []
    for gap, method in (("exact", "none"), *(("lag-16", name) for name in ("none", "token-tis", "seq-tis"))):
        arms = {r: frame[(frame.task == "arithmetic") & (frame.run == f"{gap}-{method}-lr-{r}-plain")] for r in rates}
        tuned = {r: rows[rows.seed >= TUNING].final.mean() for r, rows in arms.items()}
        cells = []
        for r in rates:
            reported = percent(arms[r][arms[r].seed < TUNING].final)
            text = f"{reported or '–'}, {100 * tuned[r]:.0f} %"
            cells.append(f"**{text}**" if tuned[r] == max(tuned.values()) else text)
        lines.append([gap, method, *cells])
    words = f"""Mean final accuracy of the reported seeds, then of seeds {TUNING} to {TUNING + 2}, which
        choose a rate (bold) and are counted nowhere else. An optimum at an end would say that the grid is too short."""
    return f"{_prose(words)}\n\n{table(('gap', 'method', *(f'lr {r}' for r in rates)), lines)}"


def _order(frame: pd.DataFrame) -> str:
    """Steps by which each signal moves later than k3, in uncorrected runs that fell, by clusters of task and seed."""
    fallen = frame[(frame.seed < TUNING) & frame.fell & frame.run.str.contains("-none-")]
    lines = []
    for name in ("grad_norm", "log_ppl", "entropy", "accuracy"):
        gaps = (fallen[f"half_{name}"] - fallen.half_k3).groupby([fallen.task, fallen.seed]).mean().dropna()
        numbered = pd.DataFrame({"seed": range(gaps.size), "warm": "", "steps": gaps.to_numpy()})
        gap = difference(numbered, numbered.assign(steps=0.0), "steps")
        shown = f"{gap.mean:+.0f} [{gap.low:+.0f}, {gap.high:+.0f}]"
        lines.append([name, str(gap.seeds), f"{gap.median:+.0f}", shown, f"{gap.sign_p:.2g}"])
    heads = ("signal", "tasks x seeds", "median steps later than k3", "mean, 95 %", "sign test p")
    words = """Uncorrected runs that fell, of all gaps and rates; runs of a task and seed are one observation. A signal
        has moved when it has gone half of its way, entropy and held-out accuracy downwards."""
    return f"{_prose(words)}\n\n{table(heads, lines)}"


def _prose(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 140, break_long_words=False, break_on_hyphens=False)
