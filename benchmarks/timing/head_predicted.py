"""The section of docs/performance.md about the head: predicted until a committed run has measured it; its targets."""

from __future__ import annotations

from megatron_rc.cluster.step_time import Ceilings
from timing.head_forms import FORMS, MOST_MB, MOST_MS, WIDE_CHUNK, Form, timed
from timing.markdown import table
from timing.plan import FULL, HeadShape
from timing.predicted import ceilings_of, time_cell
from timing.targets import Run, figure, head_us, rows_of

HEAD = f"""\
## What the head should take and hold

From {FULL.heads[0].hidden:,} features to the loss and both gradients, or to log-probs alone, at the rates of the table
above; memory is beyond hidden states, weight and main_grad. N rows count, V columns are here. Times are matrix products
(counted in N H V), one pass over the logits per direction, and the weight's gradient: fp32, read and written once per
chunk by the fused head, written once where logits are kept. The default chunk is {WIDE_CHUNK:,} tokens, halved while
its logits take more than 640 MiB: 2,048 of a whole vocabulary. With it, 32,768 tokens have no target of time: the
weight's gradient is read and written twice as often as with {WIDE_CHUNK:,}. Targets of memory are the larger one of a
chunk's logits and the weight's gradient, and the gradient of the states.

"""


def head_section(gpu: Run | None) -> str:
    head = ["", "call", "products", "time", "target", "memory", "target"]
    return HEAD + table(head, head_rows(gpu))


def head_rows(gpu: Run | None) -> list[list[str]]:
    """Per shape and call: operations, time, memory, and the most that either may be."""
    rates = ceilings_of(gpu)
    return [_cells(gpu, form, head, rates) for head in FULL.heads for form in FORMS if timed(form, head)]


def _cells(gpu: Run | None, form: Form, head: HeadShape, rates: Ceilings) -> list[str]:
    found = rows_of(gpu, form.kind, **head._asdict()) if gpu else []
    held, peak = figure(found[0], form.provider, "extra_bytes") if found else None, form.peak(head)
    memory = "" if peak is None else f"*predicted* {peak / 1e6:,.0f} MB"
    milliseconds, megabytes = MOST_MS.get((head, form)), MOST_MB.get((head, form))
    return [
        *(head.size, form.name, f"{form.operations} N H V"),
        time_cell(form.seconds(head, rates), head_us(found[0], form) if found else None),
        "" if milliseconds is None else f"≤ {milliseconds:g} ms",
        memory if held is None else f"{held / 1e6:,.0f} MB",
        "" if megabytes is None else f"≤ {megabytes:,g} MB",
    ]
