"""Hidden states and a head, sharded over ranks, through functions of verl: what they answer, and the fp64 truth."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

TOKENS, HIDDEN, VOCABULARY, TEMPERATURE = 8, 128, 96, 0.7


class Case(NamedTuple):
    hidden: Tensor
    """[N, 1, H]."""
    weight: Tensor
    """[V, H]."""
    labels: Tensor
    """[1, N]."""
    upstream: Tensor
    """[2, N]: gradients by log-probs and entropy."""


class Answer(NamedTuple):
    log_probs: Tensor
    entropy: Tensor
    by_hidden: Tensor
    """For the rows of this rank."""
    by_weight: Tensor
    """For the shard of this rank."""


def case(dtype: torch.dtype = torch.float32) -> Case:
    random = torch.Generator().manual_seed(5)
    hidden, weight = torch.randn(TOKENS, 1, HIDDEN, generator=random), torch.randn(VOCABULARY, HIDDEN, generator=random)
    labels = torch.randint(VOCABULARY, (1, TOKENS), generator=random)
    labels[0, -1] = 0  # as verl pads
    return Case(hidden.to(dtype), (weight / 6).to(dtype), labels, torch.randn(2, TOKENS, generator=random))


def truth(given: Case) -> Answer:
    """In fp64, by all logits."""
    hidden, weight = given.hidden.double().requires_grad_(), given.weight.double().requires_grad_()
    log_softmax = (hidden.squeeze(1) @ weight.T / TEMPERATURE).log_softmax(-1)
    log_probs = log_softmax.gather(-1, given.labels.T).squeeze(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    by_hidden, by_weight = torch.autograd.grad((log_probs, entropy), (hidden, weight), tuple(given.upstream.double()))
    return Answer(log_probs.detach(), entropy.detach(), by_hidden, by_weight)


def recorded(answer: Answer) -> dict[str, list[float]]:
    """Numbers of one rank without shards: the gradients as their products with a vector, with the digits of fp32."""
    vector = torch.linspace(-1, 1, HIDDEN).to(answer.by_hidden.dtype)
    values = (answer.log_probs, answer.entropy, answer.by_hidden.squeeze(1) @ vector, answer.by_weight @ vector)
    named = zip(Answer._fields, values, strict=True)
    return {name: [float(f"{number:.8g}") for number in value.tolist()] for name, value in named}


def answers(functions: dict[str, Any], given: Case, rank: int, ranks: int, sequence_parallel: bool) -> list[Answer]:
    """Answers of the output processor, without and with a tied weight, and of the forward, likewise."""
    config = SimpleNamespace(sequence_parallel=sequence_parallel)
    out = []
    for name in ("fused_output_processor", "_fused_GPTModel_forward"):
        for tied in (False, True):
            mine = given.hidden.chunk(ranks)[rank] if sequence_parallel else given.hidden
            hidden = mine.clone().requires_grad_()
            weight = given.weight.chunk(ranks)[rank].clone().requires_grad_()
            layer = SimpleNamespace(weight=None if tied else weight)
            if name == "fused_output_processor":
                made = functions[name](
                    hidden_states=hidden, output_layer=layer, output_weight=weight if tied else None,
                    labels=given.labels, context=SimpleNamespace(temperature=TEMPERATURE), config=config,
                    input_ids=None,
                )  # fmt: skip
            else:
                model = SimpleNamespace(
                    config=config, output_layer=layer, post_process=True, decoder=lambda hidden_states, **_: hidden,  # noqa: B023
                    embedding=SimpleNamespace(word_embeddings=SimpleNamespace(weight=weight)),
                    _preprocess=lambda **_: (None,) * 5,
                )  # fmt: skip
                made = functions[name](model, None, None, None, labels=given.labels, temperature=TEMPERATURE)
            torch.autograd.backward((made.log_probs, made.entropy), tuple(given.upstream))
            out.append(Answer(made.log_probs.detach(), made.entropy.detach(), hidden.grad, weight.grad))
    return out
