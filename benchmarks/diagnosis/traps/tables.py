"""Whole distributions of both sides in real contexts, from which honest dumps of any size are drawn at once."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from diagnosis.traps.lab import LENGTH, Lab
from megatron_rc.analyze.chunk import Chunk
from megatron_rc.engine import SamplingParams
from megatron_rc.rollout.embedded import engine

CONTEXTS = 12
"""Responses whose distributions are kept, LENGTH each."""
CHUNK = 2000
"""Sequences that are drawn at once."""


@dataclass(frozen=True)
class Tables:
    """Log-probs of the sampler (bf16) and the trainer (fp32) in the same contexts."""

    log_pi: np.ndarray
    """[CONTEXTS, LENGTH, V] fp32, nats."""
    log_mu: np.ndarray

    def sharper(self, factor: float) -> "Tables":
        """Both with their logits multiplied, as those of a model that is surer of itself."""
        return Tables(_log_softmax(factor * self.log_pi), _log_softmax(factor * self.log_mu))

    @cached_property
    def entropy(self) -> np.ndarray:
        """[CONTEXTS, LENGTH] of the trainer, nats."""
        return -(np.exp(self.log_pi) * self.log_pi).sum(axis=-1)

    @cached_property
    def _stacked(self) -> np.ndarray:
        """[CONTEXTS * LENGTH * V] one rising array for all contexts, so that one search draws for all of them."""
        cumulative = np.cumsum(np.exp(self.log_mu.astype(np.float64)), axis=-1).reshape(CONTEXTS * LENGTH, -1)
        return (cumulative / cumulative[:, -1:] + np.arange(CONTEXTS * LENGTH)[:, None]).reshape(-1)

    def honest(self, seed: int, tokens: int, *, ends_early: bool = False) -> Iterator[Chunk]:
        """Yield a fresh honest dump in pieces: each token is drawn from the sampler's distribution in its context.

        Args:
            ends_early: cut the responses at random lengths, decided before they are drawn.
        """
        random = np.random.default_rng(seed)
        vocabulary = self.log_mu.shape[-1]
        entropy = self.entropy.reshape(-1)
        mean_length = 0.75 * LENGTH if ends_early else LENGTH
        left = max(1, round(tokens / mean_length))
        while left > 0:
            count = min(CHUNK, left)
            left -= count
            lengths = random.integers(LENGTH // 2, LENGTH + 1, count) if ends_early else np.full(count, LENGTH)
            context = random.integers(CONTEXTS, size=count)
            index = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            row = np.repeat(context, lengths) * LENGTH + index
            ids = np.searchsorted(self._stacked, row + random.random(row.size), side="right") - row * vocabulary
            ids = np.clip(ids, 0, vocabulary - 1)
            steps = np.zeros(count, dtype=np.int64)
            yield Chunk(
                self.log_pi.reshape(-1, vocabulary)[row, ids].astype(np.float64),
                self.log_mu.reshape(-1, vocabulary)[row, ids].astype(np.float64),
                np.concatenate([[0], np.cumsum(lengths)]),
                {"entropy": entropy[row]},
                {"step": steps, "server": np.array(["a", "b", "c", "d"])[np.arange(count) % 4]},
            )


ROUNDINGS = ("none", "bf16", "float16", "4 decimals")
"""How the log-probs of both sides may be kept."""


def rounded(planted: Chunk, kind: str) -> Chunk:
    """The same dump with log-probs as a host may keep them."""

    def kept(values: np.ndarray) -> np.ndarray:
        if kind == "bf16":
            return torch.tensor(values, dtype=torch.bfloat16).double().numpy()
        if kind == "float16":
            return values.astype(np.float16).astype(np.float64)
        return np.round(values, 4) if kind == "4 decimals" else values

    return replace(planted, log_pi=kept(planted.log_pi), log_mu=kept(planted.log_mu))


def tables(folder: Path) -> Tables:
    """The distributions of the dense model, from ``folder`` where they have been made before."""
    file = folder / "tables.pt"
    if not file.exists():
        torch.save(_tables(Lab(folder, 7)), file)
    return Tables(*(tensor.numpy() for tensor in torch.load(file, weights_only=True)))


def _tables(lab: Lab) -> tuple[Tensor, Tensor]:
    """(log pi, log mu) [CONTEXTS, LENGTH, V]."""
    seen: list[Tensor] = []
    sound = engine.draw

    def draw(logits: Tensor, params: SamplingParams, uniforms: Tensor) -> engine.Drawn:
        # a short response stays in the batch: without its end, all have the same length
        logits = logits.clone()
        logits[:, 1] = -30
        seen.append(logits.float().log_softmax(-1))
        return sound(logits, params, uniforms)

    samples = lab.sample(prompts=lab.prompts[:CONTEXTS], draw=draw, n=1)
    log_pi = []
    with torch.inference_mode():
        for sample in samples:
            ids = torch.tensor([[*sample.prompt_ids, *sample.output_ids]])
            logits = lab.trainer(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1].float()
            logits[:, 1] = -30
            log_pi.append(logits.log_softmax(-1))
    return torch.stack(log_pi), torch.stack(seen, dim=1)


def _log_softmax(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).log_softmax(-1).numpy()
