"""The metrics of a correction in the log of a host: which of them are logged, and under which names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")

PREFIX = "rc/"
_NAMES = {
    *("k1", "k3", "chi2_token", "chi2_seq", "ess_token", "ess_seq", "ess_token_final", "rho_max", "f2"),
    *("log_ppl_abs_diff", "weight_mean", "masked_token", "masked_seq", "nonfinite_share", "response_length"),
}
_BEGINNINGS = ("truncated_", "clipped_", "outside_", "rejected_")


def worth_logging(values: Mapping[str, float]) -> dict[str, float]:
    """The values of `MetricSums.values` that a log line has room for: a host prints every name that it is given."""
    return {name: value for name, value in values.items() if name in _NAMES or name.startswith(_BEGINNINGS)}


def prefixed(values: Mapping[str, Value]) -> dict[str, Value]:
    """The same values under their names in a host's log."""
    return {PREFIX + name: value for name, value in values.items()}
