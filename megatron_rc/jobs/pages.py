"""The Markdown pages of docs/ that the command line prints."""

from pathlib import Path

from megatron_rc import versions as known
from megatron_rc.jobs.describe import changed, sections, table

_METRICS = Path(__file__).with_name("metrics.md")
"""docs/metrics.md, with the names of its tables in their places."""


def settings() -> str:
    from megatron_rc.settings.job import JobSettings

    return f"# Settings of `megatron-rc train`\n\nPrinted by `megatron-rc settings`.\n\n{sections(JobSettings)}"


def presets() -> str:
    from megatron_rc.correction.settings import PRESETS, STATISTICS

    rows = []
    for name, each in PRESETS.items():
        of_loss = "".join(f", `loss.{k}: {v}`" for k, v in each.loss.items())
        rows.append((f"`{name}`", changed(each.correction) + of_loss, each.source))
    body = table(("preset", "settings", "source"), rows)
    gates = table(("statistic", "value"), [(f"`{name}`", known.sentence) for name, known in STATISTICS.items()])
    return (
        f"# Correction presets\n\nPrinted by `megatron-rc presets`.\n\n{body}\n"
        f"A rejection compares one of these statistics with its bounds; l = log pi - log mu of a token:\n\n{gates}"
    )


def versions() -> str:
    columns = ("megatron-core", "Python", "Triton", "SGLang")
    uses = ("`train`", '`patch("megatron-training")`', '`patch("megatron-lm")`')
    return f"""# Supported releases

Printed by `megatron-rc versions`. An installation accepts any newer release of them.
One that is too old, or has another signature than the patch was made for, is refused when it is used.

{table((*columns, *uses), known.matrix())}
## What ran together

{table(("Python", "megatron-core", "Triton", "SGLang", "what ran"), known.TESTED)}"""


def metrics() -> str:
    from megatron_rc.correction.formulas import BY_LAG, METRICS, OF_FACTORS, SHARES
    from megatron_rc.correction.sums import LAG_BINS
    from megatron_rc.moe.shift_metrics import EXPERT_SHIFT, EXPERT_SHIFT_LISTS
    from megatron_rc.training.metric_names import JOB_METRICS

    sections = {
        section: table(("metric", "unit", "meaning"), [(f"`{name}`", m.unit, m.meaning) for name, m in members.items()])
        for section, members in JOB_METRICS.items()
    }
    tables = {
        "pairs": {name: metric.formula for name, metric in METRICS.items()},
        "shares": SHARES,
        "by_lag": {f"{name}_lag_<lags>": formula for name, (formula, _) in BY_LAG.items()},
        "factors": {name: metric.formula for name, metric in OF_FACTORS.items()},
        "shift": EXPERT_SHIFT | EXPERT_SHIFT_LISTS,
    }
    return _METRICS.read_text(encoding="utf-8").format(
        sections="".join(f"\n## {section}\n\n{body}" for section, body in sections.items()),
        bins=", ".join(LAG_BINS),
        **{
            place: "\n" + table(("metric", "formula"), [(f"`{name}`", formula) for name, formula in each.items()])
            for place, each in tables.items()
        },
    )
