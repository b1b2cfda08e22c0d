"""A stub of megatron.training on the real process groups and the real scheduler, patched for a few training steps.

A test file that imports `groups` and `training` has process groups of one process, and the stub as a fixture.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from megatron_rc import LengthDecayLR, RolloutCorrection
from megatron_rc.integrations import hosts, megatron_training
from megatron_rc.integrations.megatron_training import correct_micro_batch
from megatron_rc.settings.model import ParallelSettings
from megatron_rc.training.groups import initialized

HOST = "megatron-training"
NONE = RolloutCorrection()
TIS = RolloutCorrection.preset("token-tis")
LN2 = math.log(2)
STUB = Path(__file__).parent / "hosts/megatron_training"
Batch = dict[str, Any]


@contextmanager
def stub_host(folder: Path = STUB, version: str = "0.19.2") -> Iterator[Any]:
    """The module megatron.training.training of the stub, known to `patch` as megatron-core of that version."""
    host = replace(megatron_training.host(version), read_version=lambda: version)
    known = hosts.HOSTS.get(host.name)
    sys.path.insert(0, str(folder))
    hosts.HOSTS[host.name] = host
    try:
        yield import_module(megatron_training.MODULE)
    finally:
        sys.path.remove(str(folder))
        hosts.HOSTS.pop(host.name)
        if known is not None:
            hosts.HOSTS[host.name] = known
        for name in [name for name in sys.modules if name.startswith("megatron.training")]:
            del sys.modules[name]


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with initialized(ParallelSettings(), seed=0):
        yield


@pytest.fixture
def training() -> Iterator[Any]:
    with stub_host() as module:
        yield module


def decay(period: int = 1) -> LengthDecayLR:
    return LengthDecayLR(1e-3, decay_period=period)


class Optimizer(torch.optim.SGD):
    """Remembers the learning rate that every step was made with."""

    def __init__(self) -> None:
        super().__init__([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        self.used: list[float] = []

    def step(self) -> tuple[bool, None, None]:  # type: ignore[override]
        self.used.append(self.param_groups[0]["lr"])
        return True, None, None


def batch(*gaps: float, lengths: list[int] | None = None, new: bool = True, **more: Any) -> Batch:
    """A micro-batch of one sequence whose tokens have these log-ratios; ``lengths`` of all sampled responses."""
    return {"gaps": torch.tensor([gaps]), "lengths": lengths, "new": new, **more}


def forward_step(data: Iterator[Batch], model: Any) -> dict[str, torch.Tensor]:
    """The loss function that somebody who calls pretrain has written."""
    each = next(data)
    gaps, lengths = each["gaps"], each["lengths"]
    train = torch.full_like(gaps, -3.0)
    of_rollout = {"response_lengths": None if lengths is None else torch.tensor(lengths), "new_rollout": each["new"]}
    of_rollout["truncated"] = torch.tensor(each["truncated"]) if "truncated" in each else None
    corrected = correct_micro_batch(train, train - gaps, torch.ones_like(gaps, dtype=torch.bool), **of_rollout)
    return {"pg loss": torch.stack([(corrected.weights * corrected.mask).sum(), torch.tensor(float(gaps.numel()))])}


def train_one(training: Any, forward: Any, data: list[Batch], optimizer: Optimizer) -> None:
    """A single step, whose optimizer outlives a refusal."""
    arguments = (forward, data, [None], optimizer, training.get_optimizer_param_scheduler(optimizer))
    training.train_step(*arguments, SimpleNamespace(runs=1, exits=False), run_micro_batches)


def sft_step(data: Iterator[Batch], model: Any) -> dict[str, torch.Tensor]:
    """A loss function that knows nothing of rollouts."""
    next(data)
    return {"pg loss": torch.ones(2)}


def run_micro_batches(*, forward_step_func: Any, data_iterator: Any, model: Any, forward_only: bool) -> list[Any]:
    """Megatron's schedule: only the last pipeline stage has a loss."""
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return []
    data = iter(data_iterator)
    return [forward_step_func(data, model) for _ in data_iterator]


def train(
    training: Any, steps: list[list[Batch]], forward: Callable[..., Any] = forward_step,
    schedule: Callable[..., Any] = run_micro_batches, runs: int = 1, exits: bool = False,
) -> tuple[list[dict[str, float]], Optimizer, Any]:  # fmt: skip
    """What every step logged, the optimizer and the scheduler."""
    optimizer = Optimizer()
    scheduler = training.get_optimizer_param_scheduler(optimizer)
    config = SimpleNamespace(runs=runs, exits=exits)
    logs = []
    for number, data in enumerate(steps):
        found = training.train_step(forward, data, [None], optimizer, scheduler, config, schedule, iteration=number)
        assert len(found) == 8
        logs.append({name: float(value) for name, value in found[0].items()})
    return logs, optimizer, scheduler
