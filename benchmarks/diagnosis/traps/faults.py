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


def changed(change: Callable[[Tensor, Tensor], Tensor], *, shown: bool) -> Draw:
    """An engine that draws from changed logits [B, V], given how often each id came; its logs show it or do not."""
    sound, seen = engine.draw, torch.zeros(0)

    def draw(logits: Tensor, params: SamplingParams, uniforms: Tensor) -> engine.Drawn:
        nonlocal seen
        if seen.shape != logits.shape:
            # rows leave the batch when they end: their neighbours' history starts again, which a fault may
            seen = torch.zeros(logits.shape)
        drawn = sound(change(logits.float(), seen), params, uniforms)
        seen.scatter_add_(-1, drawn.ids[:, None], torch.ones(len(seen), 1))
        if shown:
            return drawn
        honest = (logits.float() / params.temperature).log_softmax(-1)
        return engine.Drawn(drawn.ids, honest.gather(-1, drawn.ids[:, None])[:, 0], None)

    return draw


def penalised(penalty: float) -> Draw:
    """A presence penalty that the logs do not show."""
    # rounded as the logits of the engine are
    return changed(lambda logits, seen: logits.bfloat16() - penalty * (seen > 0).bfloat16(), shown=False)


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
