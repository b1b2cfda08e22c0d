"""The trainer's side: log-probs, entropies and expert choices of sampled responses, in fp32."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rc.analyze.chunk import Chunk
from megatron_rc.engine import Sample

_BATCH = 16


@dataclass(frozen=True)
class Scores:
    """What a model says about the output tokens of some samples, packed."""

    log_probs: np.ndarray
    """[N] nats."""
    entropy: np.ndarray
    """[N] nats."""
    routes: np.ndarray | None
    """[N, layers, k] experts that predicted each output token; None without experts."""


def score(
    model: Any,
    samples: Sequence[Sample],
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    temperature: float = 1.0,
    padding: int = 0,
) -> Scores:
    """Score samples in batches of rows padded on the right.

    Args:
        prompts: prompts to put before the outputs instead of the samples' own.
        temperature: what divides the logits.
        padding: logits of 0 that join the softmax.
    """
    rows = [[*p, *s.output_ids] for p, s in zip(prompts or [s.prompt_ids for s in samples], samples, strict=True)]
    log_probs, entropies, routes = [], [], []
    chosen = _experts(model)
    with torch.inference_mode():
        for start in range(0, len(rows), _BATCH):
            part = rows[start : start + _BATCH]
            width = max(map(len, part))
            # without a mask: attention is causal, so padding behind a row changes nothing in it
            logits = model(input_ids=torch.tensor([row + [0] * (width - len(row)) for row in part])).logits.float()
            layers = torch.stack(list(chosen.values()), dim=1) if chosen else None
            for index, row in enumerate(part):
                outputs = samples[start + index].output_ids
                predicting = slice(len(row) - len(outputs) - 1, len(row) - 1)
                table = torch.nn.functional.pad(logits[index, predicting] / temperature, (0, padding)).log_softmax(-1)
                log_probs.append(table.gather(-1, torch.tensor(outputs)[:, None])[:, 0])
                entropies.append(-(table.exp() * table).sum(-1))
                if layers is not None:
                    routes.append(layers.view(len(part), width, *layers.shape[1:])[index, predicting])
    return Scores(_flat(log_probs), _flat(entropies), _flat(routes) if routes else None)


def dump_of(samples: Sequence[Sample], scores: Scores, **sequences: np.ndarray) -> Chunk:
    """The dump of samples, with these columns of sequences besides what every sample knows."""
    tokens = {"entropy": scores.entropy, "token_id": np.concatenate([s.output_ids for s in samples])}
    log_mu = np.concatenate([np.asarray(s.logprobs, np.float32) for s in samples])
    sequences["prompt_length"] = np.array([len(s.prompt_ids) for s in samples])
    return Chunk(scores.log_probs, log_mu, np.cumsum([0, *(len(s.output_ids) for s in samples)]), tokens, sequences)


def shifted_experts(ours: np.ndarray, samples: Sequence[Sample]) -> np.ndarray:
    """[N] share of the layers whose set of experts differs between trainer and sampler."""
    theirs = torch.cat([s.routes[len(s.prompt_ids) - 1 :] for s in samples if s.routes is not None]).numpy()
    return (np.sort(ours, axis=-1) != np.sort(theirs, axis=-1)).any(axis=-1).mean(axis=-1).astype(np.float32)


def _experts(model: Any) -> dict[int, Tensor]:
    """The experts that each router chose last, by layer, filled in by every forward pass."""
    chosen: dict[int, Tensor] = {}
    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(
                lambda _module, _inputs, outputs, number=number: chosen.update({number: outputs[-1]})
            )
    return chosen


def _flat(parts: Sequence[Tensor]) -> np.ndarray:
    return torch.cat(list(parts)).numpy()
