"""Which metrics of a correction join the log of a host, and under which names."""

from __future__ import annotations

from collections.abc import Mapping

LOG_PREFIX = "rc/"
_NAMES = {
    *("k1", "k3", "chi2_token", "chi2_seq", "ess_token", "ess_seq", "ess_token_final", "rho_max", "f2"),
    *("log_ppl_abs_diff", "weight_mean", "masked_token", "masked_seq", "nonfinite_share", "response_length"),
}
_BEGINNINGS = ("truncated_", "clipped_", "outside_", "rejected_")


def logged(values: Mapping[str, float]) -> dict[str, float]:
    """Those of `MetricSums.values` that are worth a place in a log line, which prints every name it is given."""
    return {name: value for name, value in values.items() if name in _NAMES or name.startswith(_BEGINNINGS)}
