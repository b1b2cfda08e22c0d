"""Refusing what a host cannot do: plain functions that raise ValueError, one per host for settings, one for flags.

Each host has `refuse_settings` for our settings, whatever its own configuration, and rules or a `refuse` for that.
"""

from collections.abc import Callable
from typing import Any

from megatron_rc.correction.settings import STATISTICS, RolloutCorrection


def refuse_correction(
    correction: RolloutCorrection,
    where: str,
    statistics: tuple[str, ...] = tuple(STATISTICS),
    *,
    knows_lags: bool = False,
) -> None:
    """Refuse a correction that needs what no host gives us, or what this one does not.

    Args:
        where: names the host in the sentence.
        statistics: those by which a rejection may judge.
        knows_lags: whether the host says which version of the weights sampled a token.
    """
    correction.check_keeps_upper(where)
    correction.check_surrogate_of(where)
    if knows_lags:
        correction.check_without_sampling_logprobs(where)
    else:
        correction.check_without_versions(where)
    unknown = [gate.statistic for gate in correction.reject if gate.statistic not in statistics]
    if unknown:
        raise ValueError(f"statistic {unknown[0]!r} is not known to {where}, use one of {', '.join(statistics)}")


def refused(check: Callable[..., object], *args: Any) -> str:
    """The sentence of the ValueError that ``check(*args)`` raises; "" where it raises none."""
    try:
        check(*args)
    except ValueError as error:
        return str(error)
    return ""


def value_at(config: Any, path: str) -> Any:
    """The value under a dotted path of mappings and objects; None where a part is missing or null."""
    for name in path.split("."):
        config = config.get(name) if hasattr(config, "get") else getattr(config, name, None)
    return config
