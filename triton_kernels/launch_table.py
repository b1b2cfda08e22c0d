"""The launch shape of every kernel, in one table."""

from typing import NamedTuple


class Launch(NamedTuple):
    """How one kernel is launched."""

    block: int
    """Elements that a program handles at a time, a power of two."""
    num_warps: int

    @property
    def options(self) -> dict[str, int | bool]:
        """What the compiler is told, by Triton's names; its stages change nothing in loops without a matrix product."""
        # later versions of Triton fuse multiplications with additions only where they are asked to
        return {"num_warps": self.num_warps, "enable_fp_fusion": True}


NARROW = 32_768
"""Columns of a row up to which more and smaller programs hide the time between two rows."""


def entry_of_row(name: str, width: int) -> str:
    """The entry of a kernel with one program per row, for rows of this many columns."""
    return f"{name}_narrow" if width <= NARROW else name


def of_row(name: str, width: int) -> Launch:
    """The launch shape of that entry."""
    return LAUNCH[entry_of_row(name, width)]


LAUNCH: dict[str, Launch] = {
    "row_statistics": Launch(block=4096, num_warps=8),
    "row_statistics_narrow": Launch(block=2048, num_warps=4),
    "merge_statistics": Launch(block=256, num_warps=4),
    "row_gradient": Launch(block=4096, num_warps=8),
    "row_gradient_narrow": Launch(block=4096, num_warps=4),
    "support_statistics": Launch(block=128, num_warps=1),
    "support_gradient": Launch(block=128, num_warps=1),
    # unit_sums and correction cut a batch into the same chunks: one block
    "unit_sums": Launch(block=1024, num_warps=4),
    "unit_combine": Launch(block=32, num_warps=4),
    "correction": Launch(block=1024, num_warps=4),
    "metric_sums": Launch(block=1024, num_warps=4),
    "normalize": Launch(block=1024, num_warps=4),
    "policy_loss": Launch(block=1024, num_warps=4),
    "compare_routes": Launch(block=256, num_warps=8),
}
"""The row kernels: the fastest on an H200, or within 3 % of it (benchmarks/speed/gpu-nvidia-h200.json); the others were
not varied. All compile without register spills for sm_80, sm_90 and sm_100."""
