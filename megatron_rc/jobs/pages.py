"""The Markdown pages of docs/ that the command line prints."""

from __future__ import annotations

from megatron_rc import versions
from megatron_rc.jobs.describe import changed, sections, table


def settings() -> str:
    from megatron_rc.settings import JobSettings

    return f"# Settings of `megatron-rc train`\n\nPrinted by `megatron-rc settings`.\n\n{sections(JobSettings)}"


def presets() -> str:
    from megatron_rc.config import PRESETS

    rows = [(f"`{name}`", changed(preset.correction), preset.source) for name, preset in PRESETS.items()]
    body = table(("preset", "settings", "source"), rows)
    return f"# Correction presets\n\nPrinted by `megatron-rc presets`.\n\n{body}"


def releases() -> str:
    columns = ("megatron-core", "Python", "Triton", "SGLang")
    uses = ("`train`", '`patch("megatron-training")`', '`patch("megatron-lm")`')
    return f"""# Supported releases

Printed by `megatron-rc versions`. An installation bounds none of them from above:
what is too old, or has another signature than the patch was made for, is refused when it is used.

{table((*columns, *uses), versions.matrix())}
## What ran together

{table(("Python", "megatron-core", "Triton", "SGLang", "what ran"), versions.TESTED)}"""


def metrics() -> str:
    from megatron_rc.metrics import METRICS, SHARES
    from megatron_rc.moe.shift_metrics import EXPERT_SHIFT, EXPERT_SHIFT_LISTS

    formulas = {name: metric.formula for name, metric in METRICS.items()} | SHARES
    return f"""# Metrics

Printed by `megatron-rc metrics`. `old/` is the trainer before the update against the sampler,
`current/` the trainer during the update against the sampler, `current_old/` the former two.

l = log pi - log mu of a token, rho = e^l; rho(y) = exp sum_t l of a sequence; p = pi, q = mu; w: the final
weights.

{table(("metric", "formula"), [(f"`{name}`", formula) for name, formula in formulas.items()])}
## Expert shift

Of a model with experts, with `moe.record`. S, S': the experts of a token in a layer
by the two engines (a decision), k their number; a token is shifted when one of its decisions differs.

{table(("metric", "formula"), [(f"`{name}`", text) for name, text in (EXPERT_SHIFT | EXPERT_SHIFT_LISTS).items()])}"""
