"""The launch shape of every kernel, in one table."""

from __future__ import annotations

from typing import NamedTuple


class Launch(NamedTuple):
    """How one kernel is launched."""

    block: int
    """Elements that a program handles at a time, a power of two."""
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        """What the compiler is told, by Triton's names."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


LAUNCH: dict[str, Launch] = {
    "row_statistics": Launch(block=4096, num_warps=8, num_stages=1),
    "merge_statistics": Launch(block=256, num_warps=4, num_stages=1),
    "row_gradient": Launch(block=4096, num_warps=8, num_stages=1),
    "support_statistics": Launch(block=128, num_warps=1, num_stages=2),
    "support_gradient": Launch(block=128, num_warps=1, num_stages=2),
    # unit_sums and correction cut a batch into the same chunks: one block
    "unit_sums": Launch(block=1024, num_warps=4, num_stages=1),
    "unit_combine": Launch(block=32, num_warps=4, num_stages=1),
    "correction": Launch(block=1024, num_warps=4, num_stages=1),
    "metric_sums": Launch(block=1024, num_warps=4, num_stages=1),
    "normalize": Launch(block=1024, num_warps=4, num_stages=1),
    "policy_loss": Launch(block=1024, num_warps=4, num_stages=1),
    "compare_routes": Launch(block=256, num_warps=8, num_stages=1),
}
"""Not measured on a GPU yet: defaults that compile without register spills for sm_80, sm_90 and sm_100."""
