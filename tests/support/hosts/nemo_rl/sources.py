"""The loss of the real NeMo-RL, from the source tree that NEMO_RL_DIR names; its heavy imports are stubbed."""

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Optional
from unittest.mock import MagicMock

import pytest
import torch
from hosts.cut_out import run_definitions
from hosts.nemo_rl import cases
from torch import Tensor

HERE = Path(__file__).parent
STUB = HERE / "stub"
ROOT = Path(os.environ.get("NEMO_RL_DIR", "/nonexistent"))
_FUNCTIONS = ("calculate_kl", "masked_mean")
_UNUSED = ("algorithms.x_token.loss_utils", "distributed.model_utils", "models.dtensor.parallelize")
"""Modules of nemo_rl that the loss imports and does not call."""


class _Batch(dict):  # type: ignore[type-arg]
    """Stands for BatchedDataDict, which the loss reads like a dictionary."""

    def __class_getitem__(cls, item: Any) -> type:
        return cls


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """For a test file that imports it: no module of the host, real or not, and no worker of ours is loaded."""

    def forget() -> None:
        ours = "megatron_rc.integrations.nemo_rl.worker"
        for name in [name for name in sys.modules if name.split(".")[0] in ("nemo_rl", "ray") or name == ours]:
            del sys.modules[name]

    forget()
    yield
    forget()


def loss_module() -> Any:
    """nemo_rl.algorithms.loss.loss_functions of the tree; for a test with `fresh`."""
    for name in ("nemo_rl", "nemo_rl.algorithms", "nemo_rl.algorithms.loss"):
        package = ModuleType(name)
        package.__path__ = [str(ROOT / name.replace(".", "/"))]
        sys.modules[name] = package
    sys.modules |= {f"nemo_rl.{name}": MagicMock() for name in _UNUSED}
    batches = ModuleType("nemo_rl.distributed.batched_data_dict")
    batches.BatchedDataDict = _Batch  # type: ignore[attr-defined]
    utils = ModuleType("nemo_rl.algorithms.utils")
    utils.__dict__.update(torch=torch, Optional=Optional)
    run_definitions(ROOT / "nemo_rl/algorithms/utils.py", _FUNCTIONS, utils.__dict__)
    sys.modules |= {batches.__name__: batches, utils.__name__: utils}
    return importlib.import_module("nemo_rl.algorithms.loss.loss_functions")


def loss_of(module: Any, name: str, data: dict[str, Tensor], current: Tensor, corrects: bool) -> tuple[float, Tensor]:
    """Loss and gradient of the host's ClippedPGLossFn, with its own correction or without any."""
    case = cases.CASES[name]
    own = {"use_importance_sampling_correction": True, **case.theirs} if corrects else {}
    config = module.ClippedPGLossConfig(reference_policy_kl_penalty=cases.KL, **case.plain, **own)
    return loss_by(module.ClippedPGLossFn(config), data, current)


def loss_by(loss_fn: Any, data: dict[str, Tensor], current: Tensor) -> tuple[float, Tensor]:
    """Loss and gradient of a loss object of the host."""
    x = current.clone().requires_grad_()
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    batch = _Batch({**data, "input_ids": torch.zeros_like(data["token_mask"])})
    loss, _ = loss_fn(x, batch, data["sample_mask"].sum(), mask.sum())
    loss.backward()
    return loss.item(), x.grad
