"""A small Qwen3-MoE in Megatron and in the embedded engine, and what a rollout step of it gives."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch
from tiny_models import MOE, transformers_model
from torch import Tensor

from megatron_rc.batch import TokenBatch
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.engine import Sample, SamplingParams

MODEL = MOE | {"num_hidden_layers": 4, "mlp_only_layers": [1], "initializer_range": 0.3}
"""Layers 0, 2 and 3 have 8 experts, of which a token gets 3."""
SAMPLING = SamplingParams(max_new_tokens=6, stop_token_ids=(1,))
PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10], [11, 12], [13, 14, 15, 16]]
SAMPLES_PER_PROMPT = 2


def save_model(folder: Any) -> str:
    transformers_model(MODEL, seed=5).save_pretrained(folder)
    return str(folder)


@contextmanager
def world(path: str, **layout: int) -> Iterator[Any]:
    """The Policy of this process, ready for plain gradient descent."""
    from megatron_rc.settings.model import ModelSettings, ParallelSettings
    from megatron_rc.settings.train import TrainSettings
    from megatron_rc.training import groups
    from megatron_rc.training.policy import Policy

    train = TrainSettings(optimizer="sgd", lr=0.5, clip_grad=0.0, micro_batches=2)
    place = groups.initialize(ParallelSettings(**layout), seed=1)
    with closing(Policy(ModelSettings(hf_path=path), ParallelSettings(**layout), train, place)) as policy:
        start(policy)
        yield policy


def start(policy: Any) -> None:
    policy.start_phase(lr=0.5, min_lr=0.5, warmup_steps=0, total_steps=10, decay_style="constant")


def sampled(policy: Any, *, flipped: bool, dtype: str = "fp32") -> list[Sample]:
    """Responses of the embedded engine with the policy's weights.

    Args:
        flipped: for about half of its decisions, the engine takes its (k + 1)-th expert instead of its k-th.
    """
    from megatron_rc.rollout.embedded.engine import EmbeddedEngine
    from megatron_rc.training import emulation

    engine = EmbeddedEngine(MODEL, dtype=dtype, device="cpu", return_routes=True)  # type: ignore[arg-type]
    engine.update_weights(policy.export(), 0)
    if flipped:
        for layer in engine._model.model.layers:
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_hook(_flip, prepend=True)
    seeds = range(len(PROMPTS) * SAMPLES_PER_PROMPT)
    with emulation.suspended():
        return engine.generate(PROMPTS, SAMPLING, n=SAMPLES_PER_PROMPT, seeds=seeds)


def _flip(router: Any, inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    logits = outputs[0]
    ids = logits.topk(router.top_k + 1).indices
    chosen = torch.where((logits[:, :1] > 0), ids[:, [0, 1, 3]], ids[:, [0, 1, 2]])
    return logits, logits.gather(1, chosen).softmax(-1), chosen


def batch_of(samples: Sequence[Sample]) -> TokenBatch:
    count = len(samples)
    groups = [i // SAMPLES_PER_PROMPT for i in range(count)]
    return TokenBatch.from_samples(samples, SAMPLING, rewards=[float(i % 2) for i in range(count)], groups=groups)


def routing_of(policy: Any, correction: RolloutCorrection | None = None, **moe: Any) -> Any:
    from megatron_rc.settings.model import MoeSettings
    from megatron_rc.training.step.routing import Routing

    return Routing(MoeSettings(**moe), correction or RolloutCorrection(), policy)


def step(
    policy: Any, samples: Sequence[Sample], *, correction: RolloutCorrection | None = None, mini: int = 1, **moe: Any
) -> Any:
    """One rollout step from the weights of the policy; StepResult."""
    from megatron_rc.settings.loss import LossSettings
    from megatron_rc.training.step.reinforce import StepSettings, StepState, reinforce_step

    chosen, batch = correction or RolloutCorrection(), batch_of(samples)
    routing = routing_of(policy, chosen, **moe) if moe else None
    if routing:
        routing.check(samples, batch)
    settings = StepSettings(
        correction=chosen, loss=LossSettings(surrogate="reinforce"),
        train=dataclasses.replace(policy.train, mini_batches_per_rollout=mini), max_nonfinite_share=0.0,
    )  # fmt: skip
    return reinforce_step(policy, batch, settings, StepState(routing=routing))


def weights(policy: Any) -> list[Tensor]:
    return [p.detach().clone() for p in policy._parameters()]


def restore(policy: Any, values: Sequence[Tensor]) -> None:
    policy._overwrite(values)
    start(policy)
