"""Triton: expert ids of two engines compared in one pass over both."""

from torch import Tensor

from megatron_rc.kernels.compare_routes import compare_routes_fwd
from megatron_rc.moe.reference import RouteComparison


def compare_routes(a: Tensor, b: Tensor, mask: Tensor | None = None) -> RouteComparison:
    """Where the expert sets of two engines differ, as reference.routes.compare_routes explains it."""
    return RouteComparison(*compare_routes_fwd(a, b, mask))
