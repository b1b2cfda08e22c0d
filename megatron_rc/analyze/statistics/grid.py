"""Are logged values, or the sampler's logits, rounded to a grid, and how much of the gap is that?

A rounding to steps of d adds a variance of d^2 / 12. Log-probs that are kept in 16 bits have steps that grow with them.
Logits that are kept so have them, too, and the differences of the top log-probs of a token show these steps exactly:
log q_i - log q_j is the difference of two logits over the temperature.
"""

from typing import NamedTuple

import numpy as np

from megatron_rc.analyze.chunk import Chunk, Floats
from megatron_rc.analyze.statistics.noise import temperatures

DECIMALS = (1, 2, 3)
"""Decimals of logs whose rounding can be as large as the gap of a 16-bit sampler."""
ON_GRID = 0.999
"""Share of the logged values that lie on the grid."""
LOGITS_ON_GRID = 0.9
"""Share of the tokens; a logit near 0 has finer steps than are looked for. bf16 had 99.7 % on a real model."""
VALUES = 20
"""Different values of the grid that are needed: a filler has one."""
BITS = {"bf16": 8, "fp16": 11}
"""Significant bits of a number."""
STEPS = 2.0 ** -np.arange(10)
"""Steps of logits that are looked for: those of bf16 are 1/8 from 16 on, of fp16 1/512 from 2 on."""
FEWEST_STEPS = 4
"""Different logits of a token that are needed."""
_EXACT = 1e-5  # nats: log-softmax in fp32


class Grid(NamedTuple):
    name: str
    """Such as "2 decimals", or the type that holds the values."""
    decimals: int
    """0 for a type of 16 bits."""
    share: float
    """Share of mean l^2 that the rounding makes; at most 1."""


def grid(chunk: Chunk) -> Grid | None:
    """The coarsest grid on which log mu lies, of decimals before those of 16 bits; None without one."""
    log_mu = chunk.log_mu[np.isfinite(chunk.log_mu)]
    for decimals in DECIMALS:
        scaled = log_mu * 10**decimals
        whole = np.round(scaled)
        if (np.abs(scaled - whole) < 1e-3).mean() >= ON_GRID and np.unique(whole).size >= VALUES:
            return Grid(f"{decimals} decimal{'s' * (decimals > 1)}", decimals, _share(chunk, 10.0**-decimals))
    fraction = np.frexp(log_mu)[0]
    for name, bits in BITS.items():
        whole = np.ldexp(fraction, bits)
        if (whole == np.round(whole)).mean() >= ON_GRID and np.unique(log_mu).size >= VALUES:
            return Grid(name, 0, _share(chunk, np.ldexp(1.0, np.frexp(chunk.log_mu)[1] - bits)))
    return None


def logit_steps(top: Floats, temperature: Floats | None = None) -> Floats:
    """[N] the largest of STEPS on which the differences of a token's logits lie; 0 without one, -1 with too few logits.

    Args:
        top: [N, k] nats, log-probs of the most probable ids, NaN or -inf where fewer.
        temperature: [N] what the logits were divided by; None: 1.
    """
    scaled = np.nan_to_num(top, nan=-np.inf) * (1.0 if temperature is None else temperature[:, None])
    away = np.where(np.isfinite(scaled), scaled.max(axis=1, keepdims=True, initial=-1e3) - scaled, 0.0)
    enough = (np.diff(np.sort(away, axis=1), axis=1) > _EXACT).sum(axis=1) >= FEWEST_STEPS
    found = np.where(enough, 0.0, -1.0)
    for step in STEPS[::-1]:
        # what lies on a step lies on its halves
        on = (np.abs(away - step * np.round(away / step)) < _EXACT).all(axis=1)
        found[on & enough] = step
    return found


def logit_grid(chunk: Chunk) -> Grid | None:
    """The grid of the sampler's logits, where nearly all tokens with enough different ones have one.

    The share is a lower end: the rounding of the drawn token's logit alone.
    """
    if "logit_step" not in chunk.tokens:
        return None
    step = chunk.tokens["logit_step"]
    known = step[step >= 0]
    if not known.size or (known > 0).mean() < LOGITS_ON_GRID:
        return None
    rounded = np.where(step > 0, step, 0.0) / temperatures(chunk) * np.expm1(chunk.log_pi)
    return Grid(f"1/{1 / float(np.median(known)):g}", 0, _share(chunk, rounded))


def _share(chunk: Chunk, step: Floats | float) -> float:
    variance = float(np.mean(np.square(step))) / 12
    return min(1.0, variance / max(float(np.square(chunk.log_ratio).mean()), 1e-300))
