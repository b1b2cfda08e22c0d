"""Metrics of parts of a batch or of a ratio: by lag, and of the two factors of rho."""

from collections.abc import Callable

from megatron_rc.correction.metrics import Metric, Sums, ess, mean, quotient
from megatron_rc.correction.reference.lags import LAG_BINS

BY_LAG: dict[str, tuple[str, Callable[[Sums, str], float]]] = {
    "tokens": ("share of tokens of these lags", lambda s, b: quotient(s[f"lag_tokens:{b}"], s["tokens"])),
    "k3": ("k3 over them", lambda s, b: quotient(s[f"lag_k3:{b}"], s[f"lag_tokens:{b}"])),
    "ess_token": (
        "ess_token over them",
        lambda s, b: quotient(s[f"lag_rho:{b}"] ** 2, s[f"lag_tokens:{b}"] * s[f"lag_square:rho:{b}"]),
    ),
    "masked_token": (
        "share of them that no longer counts",
        lambda s, b: 1 - quotient(s[f"lag_kept:{b}"], s[f"lag_tokens:{b}"]),
    ),
}
"""`<name>_lag_<lags>`: formula and value over the tokens of one bin of lags, where lags are given."""
_FACTORS = {"mismatch": "sampling / rollout", "staleness": "train / sampling"}
OF_FACTORS: dict[str, Metric] = {}
for _name, _ratio in _FACTORS.items():
    OF_FACTORS |= {
        f"{_name}_mean": mean(f"{_name}_rho", over="tokens", formula=f"mean of {_ratio}, before its bound"),
        f"{_name}_ess": ess(f"{_name}_rho", over="tokens", formula=f"ess_token with {_ratio} in place of rho"),
        f"{_name}_k3": mean(f"{_name}_k3", over="tokens", formula=f"k3 of {_ratio}"),
    }
"""Metrics of the two factors, where log-probs by the version that sampled are given."""


def _of_bin(name: str, lags: str) -> Metric:
    formula, value = BY_LAG[name]
    return Metric(formula, lambda s: value(s, lags), needs=f"lag_tokens:{lags}")


PART_METRICS = OF_FACTORS | {f"{name}_lag_{b}": _of_bin(name, b) for name in BY_LAG for b in LAG_BINS}
