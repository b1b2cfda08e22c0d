"""Faults of an engine, each planted in the one line where it would really be."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from diagnosis.traps.models import Weights
from megatron_rc.analyze.chunk import Chunk
from megatron_rc.engine import SamplingParams
from megatron_rc.rollout.embedded import engine
from megatron_rc.rollout.quantize import quantized
from megatron_rc.settings.quantization import QUANTIZATIONS

Draw = Callable[[Tensor, SamplingParams, Tensor], engine.Drawn]


def drawing(draw: Draw | None) -> AbstractContextManager[Any]:
    """The embedded engine draws its tokens with ``draw``; None: as it should."""
    return mock.patch.object(engine, "draw", draw or engine.draw)


def penalised(penalty: float) -> Draw:
    """A presence penalty that the logs do not show."""
    sound, seen = engine.draw, torch.zeros(0)

    def draw(logits: Tensor, params: SamplingParams, uniforms: Tensor) -> engine.Drawn:
        nonlocal seen
        if seen.shape != logits.shape:
            # rows leave the batch when they end: their neighbours' history starts again, which a fault may
            seen = torch.zeros_like(logits)
        ids = sound(logits - penalty * seen, params, uniforms).ids
        seen.scatter_(-1, ids[:, None], 1.0)
        return engine.Drawn(ids, logits.float().log_softmax(-1).gather(-1, ids[:, None])[:, 0], None)

    return draw


def rounded(weights: Weights, kind: str) -> Weights:
    """Matrices in 8 bits with one scale per row: ``int8``, or ``fp8`` (e4m3)."""
    grid = QUANTIZATIONS[kind].weights
    assert grid is not None, f"{kind} rounds no weights"
    return {name: quantized(tensor, grid) if tensor.ndim == 2 else tensor for name, tensor in weights.items()}


def late_by_one(chunk: Chunk) -> Chunk:
    """The sampler's list of each response is late by one token."""
    log_mu = np.roll(chunk.log_mu, 1)
    log_mu[chunk.cu_seqlens[:-1]] = chunk.log_mu[chunk.cu_seqlens[:-1]]
    return replace(chunk, log_mu=log_mu)


def misconverted(weights: Weights) -> Weights:
    """The gate and up projections of the last layer are swapped, as in a wrong conversion."""
    layer = max(name.split(".")[2] for name in weights if name.startswith("model.layers."))
    gate, up = (f"model.layers.{layer}.mlp.{part}_proj.weight" for part in ("gate", "up"))
    return {**weights, gate: weights[up], up: weights[gate]}
