"""Small models that know the synthetic language, with their weights after a few more updates; trained once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diagnosis.traps.language import END, TOPICS, VOCABULARY, Language
from megatron_rc.rollout.embedded.model import build_model

DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rope_theta": 1e4,
    "max_position_embeddings": 512,
    "eos_token_id": END,
    "pad_token_id": 0,
}
MOE = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
}
CONFIGS = {"dense": DENSE, "moe": MOE}
VERSIONS = 5
"""Weights that are kept: those of the warmed model, and those after each of the updates."""
WARM_STEPS = {"dense": 400, "moe": 250}
_ROWS, _LENGTH = 12, 192
_RATE, _UPDATE_RATE, _UPDATE_STEPS = 3e-3, 3e-4, 3

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Trained:
    """A model as fp32 weights by version."""

    config: dict[str, Any]
    versions: list[Weights]


def trained(kind: str, folder: Path) -> Trained:
    """The model of ``CONFIGS[kind]``, from ``folder`` where it has been trained before."""
    file = folder / f"{kind}.pt"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(_train(kind), file)
    return Trained(CONFIGS[kind], torch.load(file, weights_only=True))


def build(config: dict[str, Any], weights: Weights | None = None) -> Any:
    """The transformers model of a configuration, fp32, with random weights if none are given."""
    torch.manual_seed(0)
    model = build_model(config, torch.float32, torch.device("cpu")).requires_grad_()
    if weights is not None:
        model.load_state_dict(weights)
    return model


def _train(kind: str) -> list[Weights]:
    """The weights of every version."""
    language, model, steps = Language(), build(CONFIGS[kind]).train(), WARM_STEPS[kind]
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        rate = _RATE * min(1.0, (step + 1) / 20) * (1 - 0.95 * step / steps)
        loss = _update(model, optimizer, language.batch(step, _ROWS, _LENGTH), rate)
        if step % 20 == 0:
            print(f"{kind} model, step {step} of {steps}: loss {loss:.3f}", flush=True)
    versions = [_copy(model)]
    for version in range(1, VERSIONS):
        for step in range(_UPDATE_STEPS):
            # the updates prefer a quarter of the topics, as a reward would
            ids = language.batch(10_000 + 100 * version + step, _ROWS, _LENGTH, range(TOPICS // 4))
            _update(model, optimizer, ids, _UPDATE_RATE)
        versions.append(_copy(model))
    return versions


def _update(model: Any, optimizer: torch.optim.Optimizer, ids: Any, rate: float) -> float:
    for group in optimizer.param_groups:
        group["lr"] = rate
    batch = torch.as_tensor(ids)
    loss = model(input_ids=batch, labels=batch).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def _copy(model: Any) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
