"""The alarm for policies too far apart: a bound on k3 that stops a job, and a warning where none is set."""

from __future__ import annotations

import logging

WARN_ABOVE = 0.1
"""nats; the largest |KL| that verl's documentation of its rollout correction calls healthy."""
_logger = logging.getLogger(__name__)
_warned: set[str] = set()


def check_k3(name: str, k3: float, max_k3: float | None) -> None:
    """Refuse a k3 above ``max_k3``; without such a bound, warn of one above `WARN_ABOVE`, once per process and name.

    Raises:
        ValueError: k3 > max_k3.
    """
    if max_k3 is None:
        if k3 > WARN_ABOVE and name not in _warned:
            _warned.add(name)
            _logger.warning(
                "%s is %.3g, above %.3g: trainer and sampler are far apart, and a correction may hide a bug; "
                "megatron-rc analyze says why, and max_k3 in the correction stops such a job",
                name,
                k3,
                WARN_ABOVE,
            )
    elif k3 > max_k3:
        raise ValueError(f"{name} must be <= max_k3, {max_k3!r}, got {k3:.3g}: trainer and sampler are too far apart")
