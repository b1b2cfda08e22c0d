"""Launch shapes that make several blocks from few elements."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_TOY_BLOCKS = {
    **dict.fromkeys(("row_statistics", "row_statistics_narrow", "row_gradient", "row_gradient_narrow"), 32),
    "merge_statistics": 32,
    **dict.fromkeys(("support_statistics", "support_gradient", "policy_loss"), 16),
    **dict.fromkeys(("unit_sums", "correction", "metric_sums", "normalize"), 16),
    "unit_combine": 2,
    "compare_routes": 4,
}


@contextmanager
def toy_blocks() -> Iterator[None]:
    """Launch shapes for toy sizes; afterwards those of the table again."""
    from megatron_rc.kernels.launch_table import LAUNCH

    before = dict(LAUNCH)
    LAUNCH.update({name: LAUNCH[name]._replace(block=block) for name, block in _TOY_BLOCKS.items()})
    try:
        yield
    finally:
        LAUNCH.update(before)
