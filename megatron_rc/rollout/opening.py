"""From a row of `engine.ENGINES` to an engine: what the trainer gives, and the one call that opens it."""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_rc.engine import RolloutEngine
from megatron_rc.rollout.stale import StaleEngine
from megatron_rc.settings.rollout import RolloutSettings


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What an engine may know of the job that opens it, on one process of the trainer."""

    settings: RolloutSettings
    hf_config: dict[str, Any]
    """Content of the trained model's config.json."""
    device: torch.device
    output: Path
    """Folder of the job."""
    rank: int
    writer: bool
    """This process sends the weights; exactly one does."""
    returns_routes: bool
    """The trainer wants the experts of every token."""
    in_background: bool
    """Rollouts are sampled while the trainer computes."""
    agree: Callable[[str | None], None]
    """Every process calls it; it raises on all when one passes a sentence."""
    probe: Callable[[list[int]], list[float]] | None
    """The trainer's log-probs of a prompt; None: weights are changed on purpose, so that no comparison holds."""


def open_engine(opening: Opening, together: Callable[[Callable[[], RolloutEngine]], RolloutEngine]) -> RolloutEngine:
    """The engine that the settings name, behind by their lag.

    Args:
        together: calls a function on every process; a ValueError of one is raised by all.
    """
    kind, lag = opening.settings.kind, opening.settings.lag
    make: Callable[[Opening], RolloutEngine] = pkgutil.resolve_name(f"{__package__}.{kind.module}:open_engine")
    engine = together(lambda: make(opening))
    return StaleEngine(engine, lag) if lag and not kind.replays else engine
