"""The sections of the page about its runs: how many, how large their gaps, and by what rules they are judged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from collapse.claims import CANNOT_TELL, span
from collapse.lines import hours, item, paragraph
from collapse.mechanisms import mechanisms
from collapse.rows import UNSEEN, Row
from collapse.runs import TUNING, Results
from megatron_rc.jobs.describe import table
from megatron_rc.report.endpoints import Endpoints


def runs(results: Results) -> Iterator[str]:
    rows = results.rows
    stages = ", ".join(f"`{stage}`" for stage in sorted({results.stage_of(row) for row in rows}))
    yield "## The runs\n"
    yield paragraph(
        f"{len(rows)} runs took {hours(rows)}. `bash launch/collapse_lab.sh` runs them by stages",
        f"({stages}), whose recipes are in `launch/recipes/collapse/`. Seeds from {TUNING} on are for choosing",
        "settings, and are left out here. Runs of the same task differ only in the seed and in what an arm names:",
    )
    yield table(
        ("task", "vocabulary", "runs", "seeds", "mean response length T", "T / T*", "k3, first quarter"),
        [_world(label, [row for row in rows if row.world == world]) for world, label in results.worlds().items()],
    )
    yield from _plan(results)
    yield "How large a gap each mechanism opens, in runs that correct nothing; medians over runs:\n"
    yield mechanisms(results)
    yield paragraph(
        "k3 (nats per token), T / T* and the standard deviation of a token's log-ratio, sqrt(2 k3) if it is Gaussian,",
        "are those of the first quarter of the steps; mismatch and staleness are the two parts of k3 over all steps,",
        "by the trainer's log-probs at the version that sampled; the gradient norm is that before clipping. Below",
        f"{UNSEEN:g} k3 is rounding, and is written as 0.",
    )


def _plan(results: Results) -> Iterator[str]:
    left = {stage: counts for stage, counts in results.progress().items() if counts[0] < counts[1]}
    if left:
        listed = ", ".join(f"`{stage}` {done} of {planned} runs" for stage, (done, planned) in left.items())
        yield paragraph(
            f"The plan is larger than what has been run: {listed}. What is missing answers *{CANNOT_TELL}*."
        )


def _world(label: str, rows: Sequence[Row]) -> list[str]:
    return [
        label,
        span([row.vocabulary for row in rows]),
        str(len(rows)),
        str(len({row.seed for row in rows})),
        span([row.length for row in rows]),
        span([row.depth_seen for row in rows]),
        span([row.k3_seen for row in rows]),
    ]


def rules(results: Results) -> Iterator[str]:
    used = {row.stage: _rule(results.rules.get(row.stage, Endpoints())) for row in results.rows}
    for rule in dict.fromkeys(used.values()):
        stages = ", ".join(f"`{stage}`" for stage in sorted(used) if used[stage] == rule)
        yield item(f"{stages}: {rule}")
    least = min(row.answers for row in results.rows)
    served = sum(row.evaluated == "served" for row in results.rows)
    whose = f"In {served} runs the sampler's weights answered, in the others the trainer's."
    yield "\n" + paragraph(
        f"Every evaluation has {least:,} answers or more.", whose if served else "The trainer's own weights answered."
    )


def _rule(rules: Endpoints) -> str:
    return (
        f"a run is judged by the means of {rules.window} consecutive evaluations. It has **fallen** where this mean "
        f"lies {rules.fall:.0%} or more below its maximum so far. It has **collapsed** when at least its last "
        f"{rules.to_end} means have fallen, "
        "or a value was not finite; a fall that it recovered from is a **relapse**. It has **failed** when its last "
        f"mean is below {rules.failure:.0%} of that of the exact sampler with the same seed."
    )
