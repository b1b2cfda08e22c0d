"""docs/collapse.md and docs/collapse_evidence.md, from the committed rows, the questions and the words of page.md."""

import functools
import math
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from collapse.compare import Difference, answers, difference, fall_p, rows_of, without_choosing
from collapse.rows import TUNING, UNSEEN, full_name
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
    known = rows[event].dropna()
    return f"{int(known.sum())} of {len(known)}" if len(known) else ""


def k3(frame: pd.DataFrame, gap: str) -> float:
    """Median k3 of the runs of a gap that correct nothing, in the first quarter of their steps."""
    return float(rows_of(frame, f"{gap}-none").k3_early.median())


class _Fields(dict[str, Any]):
    """Fields of page.md; `arm` in {final:arm}, {failed:arm} and {seeds:arm} names runs."""

    def __missing__(self, key: str) -> Any:
        raise KeyError(f"page.md names {key}, which the lab does not print")


class _Of:
    """Formats a number of the arm that a field of page.md names."""

    def __init__(self, frame: pd.DataFrame, name: str) -> None:
        self.frame, self.name = frame, name

    def __format__(self, arm: str) -> str:
        rows = rows_of(self.frame, arm)
        if rows.empty:
            raise ValueError(f"page.md: no run is called {full_name(arm)}")
        match self.name:
            case "seeds":
                return str(rows.seed.nunique())
            case "k3":
                return f"{rows.k3_early.median():.2g}"
            case "outside":
                return f"{100 * rows.outside.median():.2g} %"
            case "persistence":
                return f"{rows.persistence.median():.2f}"
            case "failed" | "collapsed":
                return counted(rows, self.name)
        return percent(rows.final)


def fields(frame: pd.DataFrame) -> Mapping[str, Any]:
    """What page.md names."""
    names = ("final", "failed", "collapsed", "seeds", "k3", "outside", "persistence")
    of_arms = {name: _Of(frame, name) for name in names}
    counted_rows = frame[frame.seed < TUNING]
    return _Fields(
        of_arms,
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
    exact = rows_of(frame, "exact-none")
    lines.append(["(exact sampler)", *[f"{percent(exact.final)}, {counted(exact, 'failed')} failed"] * 2])
    return table(heads, lines)


def replicate_spread(frame: pd.DataFrame) -> float:
    """Standard deviation of the final accuracy of one recipe and seed from two warm-ups of the same kind."""
    of_recipe = frame[frame.task == "arithmetic"].groupby(["run", "seed"]).final
    variances = of_recipe.var()[of_recipe.count() > 1]
    return math.sqrt(variances.mean())


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
             f"{100 * seeds.mean():.0f} %", f"{100 * rows.final.min():.0f} %", shown, counted(rows, "failed")]
        )  # fmt: skip
    heads = ("method", "seeds, runs", "mean", "lowest run", f"points above {REFERENCE}, 95 %", "failed")
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
    yield "## Fresh rollouts of a bf16 sampler"
    yield "`quickstart` of `launch/recipes/methods.yaml`: k3 is 1e-5, and the whole gap is rounding."
    yield ranking(frame, "quickstart")
    yield "## Learning rates"
    yield _rates(frame)
    yield "## Which signal moves first"
    yield _order(frame)
    yield "## The founding papers' rows"
    yield (HERE / "papers.md").read_text().strip()


def _answered(each: Question, frame: pd.DataFrame) -> Iterator[str]:
    arms = [tuple(rows_of(frame, arm, each.task) for arm in pair) for pair in each.pairs]
    gaps = [difference(*pair, each.of) for pair in arms]
    later = [difference(*map(without_choosing, pair), each.of) for pair in arms]
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
             percent(rows.final), *(counted(rows, event) for event in ("fell", "collapsed", "failed"))]
        )  # fmt: skip
    heads = ("task", "gap", "runs", "k3", "T / T*", "outside the clip", "persistence", "entropy with k3",
             "gradient norm", "final", "fell", "collapsed", "failed")  # fmt: skip
    words = """Medians over runs without a correction. k3, T / T* and the share of tokens outside [0.8, 1.28] are
        those of the first quarter of the steps. Persistence is the mean cosine of the mean log-ratio by token id
        of a step and of the next; entropy with k3 is their rank correlation over the steps of a run."""
    return f"{_prose(words)}\n\n{table(heads, lines)}"


def _rates(frame: pd.DataFrame) -> str:
    """Mean final accuracy by learning rate; bold is the rate at which the tuning seeds end highest."""
    rates = ("1e-5", "3e-5", "1e-4", "3e-4", "6e-4", "1e-3")
    lines = []
    for gap, method in (("exact", "none"), *(("lag-16", name) for name in ("none", "token-tis", "seq-tis"))):
        arms = {r: frame[(frame.task == "arithmetic") & (frame.run == f"{gap}-{method}-lr-{r}-plain")] for r in rates}
        tuned = {r: rows[rows.seed >= TUNING].final.mean() for r, rows in arms.items()}
        best = max((r for r in rates if tuned[r] == tuned[r]), key=lambda r: tuned[r])
        cells = []
        for r in rates:
            reported = arms[r][arms[r].seed < TUNING]
            chosen_by = f", {100 * tuned[r]:.0f} %" if tuned[r] == tuned[r] else ""
            text = (percent(reported.final) or "–") + chosen_by
            cells.append(f"**{text}**" if r == best else text)
        lines.append([gap, method, *cells])
    words = f"""Mean final accuracy of the reported seeds, then of seeds {TUNING} to {TUNING + 2}, which
        choose a rate (bold) and are counted nowhere else. An optimum at an end would say that the grid is too short."""
    return f"{_prose(words)}\n\n{table(('gap', 'method', *(f'lr {r}' for r in rates)), lines)}"


def _order(frame: pd.DataFrame) -> str:
    """Steps by which each signal moves later than k3, in uncorrected runs that fell, by clusters of task and seed."""
    fallen = frame[(frame.seed < TUNING) & (frame.fell == True) & frame.run.str.contains("-none-")]  # noqa: E712
    lines = []
    for name in ("grad_norm", "log_ppl", "entropy", "accuracy"):
        gaps = (fallen[f"half_{name}"] - fallen.half_k3).groupby([fallen.task, fallen.seed]).mean().dropna()
        if gaps.size > 1:
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
