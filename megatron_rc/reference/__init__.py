"""The mathematics in plain PyTorch: what every kernel is tested against, and the backend of machines without a GPU."""

from megatron_rc.reference.log_ratio import (
    LogRatio,
    bounded_ratio,
    gate_reduce,
    gate_statistic,
    log_ratio,
    log_ratio_sums,
    outside,
)
from megatron_rc.reference.policy import policy_loss
from megatron_rc.reference.routes import RouteComparison, compare_routes
from megatron_rc.reference.segments import segment_reduce, unit_sums
from megatron_rc.reference.softmax import (
    MergedStatistics,
    Upstream,
    compute_dtype,
    merge_statistics,
    row_gradient,
    row_statistics,
    support_gradient,
    support_statistics,
)

__all__ = [
    "LogRatio",
    "MergedStatistics",
    "RouteComparison",
    "Upstream",
    "bounded_ratio",
    "compare_routes",
    "compute_dtype",
    "gate_reduce",
    "gate_statistic",
    "log_ratio",
    "log_ratio_sums",
    "merge_statistics",
    "outside",
    "policy_loss",
    "row_gradient",
    "row_statistics",
    "segment_reduce",
    "support_gradient",
    "support_statistics",
    "unit_sums",
]
