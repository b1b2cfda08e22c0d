"""A small RL loop on Megatron-Core as somebody may have it: nothing in here knows how to correct a rollout.

    python examples/existing_loop.py

A GPTModel learns to repeat its prompt, in an asynchronous loop: the engine samples with weights that are 16 updates
old, and the loop does nothing about it. examples/patch_existing_loop.py patches this file as it is.
"""

# ruff: noqa: E402 - on a machine without CUDA the emulation comes first, before Megatron-Core defines its fusions

from megatron_rc.training import emulation

emulation.emulate_cuda_on_cpu()

import copy
from collections import deque
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

VOCABULARY, END, LENGTH = 8, 7, 5
PROMPTS, SAMPLES = 14, 8
LR = 1e-2
LAG = 16
"""Updates that the weights of the engine are old."""


def build_model(**mixture: Any) -> GPTModel:
    """Two layers; ``mixture``: the fields of Megatron's TransformerConfig that give them experts."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=not torch.cuda.is_available(),
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        **mixture,
    )
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    return GPTModel(config, spec, VOCABULARY, LENGTH + 1, position_embedding_type="rope").to(emulation.device())


def make_scheduler(optimizer: torch.optim.Optimizer) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=LR,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=1000,
        lr_decay_style="constant",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def grpo_loss(
    current_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """All [B, T]. The loop has the sampler's log-probs at hand, and does nothing with them."""
    ratio = (current_logprobs - old_logprobs).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    return -(gain * mask).sum() / mask.sum()


def next_logits(model: GPTModel, tokens: torch.Tensor) -> torch.Tensor:
    """[B, T] -> [B, T, V]."""
    rows = tokens.shape[1]
    future = torch.ones(1, 1, rows, rows, dtype=torch.bool, device=tokens.device).triu(1)
    return model(tokens, torch.arange(rows, device=tokens.device).expand_as(tokens), future).float()


def logprobs_of(model: GPTModel, tokens: torch.Tensor) -> torch.Tensor:
    """[B, T + 1] -> [B, T]."""
    logits, targets = next_logits(model, tokens[:, :-1]), tokens[:, 1:]
    return -F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


@torch.no_grad()
def sample(sampler: GPTModel, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [B, T + 1] with the prompt in front, log-probs of the sampled ones [B, T], and which of them count."""
    tokens, logprobs = prompts[:, None], []
    for _ in range(LENGTH):
        step = next_logits(sampler, tokens)[:, -1].log_softmax(-1)
        chosen = torch.multinomial(step.exp(), 1)
        tokens, logprobs = torch.cat([tokens, chosen], 1), [*logprobs, step.gather(1, chosen)]
    ended = (tokens[:, 1:] == END).cumsum(1)
    return tokens, torch.cat(logprobs, 1), ended - (tokens[:, 1:] == END).long() == 0


class Rollouts(NamedTuple):
    """SAMPLES answers to each of PROMPTS prompts, B in all."""

    tokens: torch.Tensor
    """[B, T + 1], the prompt in front."""
    logprobs: torch.Tensor
    """[B, T], of the sampled ones, by the sampler."""
    mask: torch.Tensor
    """[B, T], which of them count."""
    rewards: torch.Tensor
    """[B]."""
    advantages: torch.Tensor
    """[B], normalised over the answers to one prompt."""


def roll_out(sampler: GPTModel) -> Rollouts:
    prompts = torch.randint(0, END, (PROMPTS,), device=emulation.device()).repeat_interleave(SAMPLES)
    tokens, logprobs, mask = sample(sampler, prompts)
    rewards = ((tokens[:, 1:] == prompts[:, None]) & mask).float().mean(1)
    groups = rewards.view(PROMPTS, SAMPLES)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten()
    return Rollouts(tokens, logprobs, mask, rewards, advantages)


def train(steps: int = 80) -> None:
    torch.manual_seed(0)
    model, sampler = build_model(), build_model()
    versions: deque[dict[str, Any]] = deque(maxlen=LAG + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    scheduler = make_scheduler(optimizer)
    for step in range(1, steps + 1):
        versions.append(copy.deepcopy(model.state_dict()))
        sampler.load_state_dict(versions[0])
        tokens, rollout_logprobs, mask, rewards, advantages = roll_out(sampler)
        logprobs = logprobs_of(model, tokens)
        loss = grpo_loss(logprobs, logprobs.detach(), rollout_logprobs, advantages[:, None].expand_as(logprobs), mask)
        optimizer.zero_grad()
        loss.backward()
        lr = optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step(1)
        if step % 10 == 0 or step == 1:
            print(f"step {step}: reward {rewards.mean():.2f}, loss {loss:+.4f}, LR {lr:.1e}")


def start() -> None:
    """What a launcher does once per process."""
    torch.set_num_threads(1)  # tensors this small are not worth a second one
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(0)


if __name__ == "__main__":
    start()
    train()
