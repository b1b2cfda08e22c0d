"""The Markdown pages of docs/ that the command line prints."""

from collections.abc import Mapping

from megatron_rc import versions as known
from megatron_rc.jobs.describe import changed, sections, table

_METRICS = """\
# Metrics

Printed by `megatron-rc metrics`. Every step is one JSON object in `OUTPUT/metrics.jsonl` with the keys `phase`
(`warmup` or `rl`), `step`, and the metrics of this page that the settings of the job produce; a metric that
cannot be computed is null. [dashboards.md](dashboards.md) sends the same names to other services. Step 0 of the phase
rl holds the accuracy before the first update.
"""
_PAIRS = """
## Trainer against sampler

These names have a prefix: `old/` compares the trainer before the update with the sampler, `current/` the trainer during
the update with the sampler, and `current_old/` the trainer during the update with the trainer before it. The metrics of
the correction (weights, masks, shares) belong to `old/` when `correction.old` is `recompute`; with the other two values
there is no `old/`, and they belong to `current/`.

l = log pi - log mu of a token, rho = e^l; rho(y) = exp sum_t l of a sequence; p = pi, q = mu; w: the final weights. In
`current_old/`, mu is the trainer before the update.
"""
_SHARES = """
Each of these is two metrics: with the ending `_token` the share of tokens, with `_seq` the share of sequences that have
such a token. A gate is named by its statistic, level and, above the level token, reduction: `k3_segment_mean`.
"""
_LAGS = """
A metric of this table exists once for every bin of lags that has tokens. The bins are {bins}.
The metrics need the lags of tokens. A training job passes lags to the correction if the weights that sampled a token
are older than those that it trains, or if the correction depends on lags.
"""
_TWO_FACTORS = """
rho = mismatch · staleness: mismatch = sampling / rollout compares the trainer at the version that sampled with the
sampler, and staleness = train / sampling compares the trainer with itself at that version. Both factors have these
metrics with `train.keep_sampling_weights`, or if the weight has `staleness_upper`; `truncated_token` then counts the
mismatch. They are left out of a step with samples of a version that is not kept, as after a resume with a larger
`rollout.lag`.
"""
_ROUTES = """
## Expert shift

Models with experts have these metrics when `moe.record` is on, with the same prefixes. S and S' are the experts that
the two engines choose for a token in a layer (a decision), and k is their number; a token is shifted when one of its
decisions differs.
"""


def settings() -> str:
    from megatron_rc.settings.job import JobSettings

    return f"# Settings of `megatron-rc train`\n\nPrinted by `megatron-rc settings`.\n\n{sections(JobSettings)}"


def presets() -> str:
    from megatron_rc.correction.settings import PRESETS, STATISTICS

    rows = [
        (
            f"`{name}`",
            changed(each.correction) + "".join(f", `loss.{k}: {v}`" for k, v in each.loss.items()),
            each.source,
        )
        for name, each in PRESETS.items()
    ]
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

    parts = [_METRICS]
    for section, members in JOB_METRICS.items():
        rows = [(f"`{name}`", metric.unit, metric.meaning) for name, metric in members.items()]
        parts += [f"\n## {section}\n\n", table(("metric", "unit", "meaning"), rows)]
    parts += [_PAIRS, _formulas({name: metric.formula for name, metric in METRICS.items()}), _SHARES, _formulas(SHARES)]
    parts += [
        _LAGS.format(bins=", ".join(LAG_BINS)),
        _formulas({f"{name}_lag_<lags>": formula for name, (formula, _) in BY_LAG.items()}),
    ]
    parts += [_TWO_FACTORS, _formulas({name: metric.formula for name, metric in OF_FACTORS.items()})]
    return "".join([*parts, _ROUTES, _formulas(EXPERT_SHIFT | EXPERT_SHIFT_LISTS)])


def _formulas(formulas: Mapping[str, str]) -> str:
    return "\n" + table(("metric", "formula"), [(f"`{name}`", text) for name, text in formulas.items()])
