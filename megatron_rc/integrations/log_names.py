"""What a correction says in the log of a host: which metrics are logged, under which names, and the warnings."""

import logging
from collections.abc import Mapping
from math import isnan
from typing import Any, TypeVar

from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.correction.warnings import LostBatchWarning

Value = TypeVar("Value")
_logger = logging.getLogger(__name__)

PREFIX = "rc/"
_NAMES = {
    *("k1", "k3", "chi2_token", "chi2_seq", "ess_token", "ess_seq", "ess_token_final", "rho_max", "f2"),
    *("log_ppl_abs_diff", "weight_mean", "masked_token", "masked_seq", "nonfinite_share", "response_length"),
}
_BEGINNINGS = ("truncated_", "clipped_", "outside_", "rejected_", "tokens_lag_", "k3_lag_")


def worth_logging(values: Mapping[str, float]) -> dict[str, float]:
    """The metrics worth a place in a host's log, which prints every name it is given."""
    return {name: value for name, value in values.items() if name in _NAMES or name.startswith(_BEGINNINGS)}


def measured(values: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are numbers: not NaN, and no list."""
    return {name: float(each) for name, each in values.items() if isinstance(each, int | float) and not isnan(each)}


def prefixed(values: Mapping[str, Value]) -> dict[str, Value]:
    """The same values under their names in a host's log."""
    return {PREFIX + name: value for name, value in values.items()}


def warn(sentence: str | None, *groups: Any) -> None:
    """Log a warning, if there is one, on the process that is the first of every group."""
    import torch.distributed as dist  # doctor reads the tables of hosts without torch

    if sentence is not None and (not dist.is_initialized() or all(dist.get_rank(group) == 0 for group in groups)):
        _logger.warning(sentence)


def checked(
    sums: Any, correction: RolloutCorrection, lost_batch: LostBatchWarning, *groups: Any, **limits: float
) -> dict[str, Any]:
    """The values of pooled `MetricSums`; warns where little is left, and raises as its `check` with these limits."""
    sums.check(**limits, max_k3=correction.max_k3)
    values: dict[str, Any] = sums.values()
    warn(lost_batch.see(values, correction), *groups)
    return values
