"""Record, compare and replay the experts of a mixture in a loop of your own on Megatron-Core.

    python examples/replay_routes.py

The loop of examples/existing_loop.py with eight experts a layer. The sampler holds the weights in 5 bits, so its
routers choose other experts than the trainer's for some tokens. It is trained twice: with the trainer's own routes,
then with those of the sampler (R3). Every line says what the gap is with and without them. Half a minute on a CPU.
"""

from __future__ import annotations

import existing_loop  # isort: skip - it starts the emulation of CUDA
import torch
from existing_loop import END, LENGTH, PROMPTS, SAMPLES, next_logits, sample, take_weights
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rc import Rejection, RolloutCorrection, Weight, correct, loss_scale, policy_loss
from megatron_rc.moe.replay import RoutedSchedule
from megatron_rc.moe.routers import routers_of
from megatron_rc.moe.shift import expert_shift
from megatron_rc.moe.tables import MoeShape, RouteTable
from megatron_rc.training import emulation

SHAPE = MoeShape(num_layers=2, layers=(0, 1), top_k=2, num_experts=8)
CORRECTION = RolloutCorrection(
    weight=Weight("token", "truncate", upper=2.0),
    reject=(Rejection("route_shift", "token", upper=0.5),),  # tokens with both layers moved
)


def build_model() -> GPTModel:
    config = TransformerConfig(
        num_layers=SHAPE.num_layers,
        hidden_size=32,
        ffn_hidden_size=32,
        num_attention_heads=4,
        num_moe_experts=SHAPE.num_experts,
        moe_router_topk=SHAPE.top_k,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=not torch.cuda.is_available(),
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_layer_local_spec(num_experts=SHAPE.num_experts, moe_grouped_gemm=False)
    return GPTModel(config, spec, existing_loop.VOCABULARY, LENGTH + 1, position_embedding_type="rope").to(
        emulation.device()
    )


def logprobs_of(model: GPTModel, tokens: Tensor) -> Tensor:
    """[B, T + 1] -> [B, T]."""
    return next_logits(model, tokens[:, :-1]).log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)


@torch.no_grad()
def routes_of(model: GPTModel, tokens: Tensor, reference: Tensor | None = None) -> tuple[Tensor, RouteTable]:
    """Log-probs [B, T] of a forward pass, and what its routers chose; rows lie [T, B], as Megatron has them."""
    schedule = RoutedSchedule([routers_of(model)], SHAPE, forward_only=True, detail=True)
    with schedule, schedule.forward(0, reference=reference):
        logprobs = logprobs_of(model, tokens)
    return logprobs, schedule.table()


def train(replay: bool, steps: int = 40) -> None:
    torch.manual_seed(0)
    model, sampler = build_model(), build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=existing_loop.LR)
    for step in range(1, steps + 1):
        take_weights(sampler, model)
        prompts = torch.randint(0, END, (PROMPTS,), device=emulation.device()).repeat_interleave(SAMPLES)
        tokens, rollout_logprobs, mask = sample(sampler, prompts)
        rewards = ((tokens[:, 1:] == prompts[:, None]) & mask).float().mean(1)
        groups = rewards.view(PROMPTS, SAMPLES)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten()

        # an engine returns these with its samples: moe.slicing cuts them for each process of a larger job
        theirs = routes_of(sampler, tokens)[1]
        own_logprobs, mine = routes_of(model, tokens, reference=theirs.ids)
        log_ratio = own_logprobs - rollout_logprobs
        found = expert_shift(mine, theirs, mask.T.flatten(), log_ratio=log_ratio.T.flatten())
        without = (log_ratio.exp() - 1 - log_ratio)[mask].mean()

        with RoutedSchedule([routers_of(model)], SHAPE, forward_only=False) as schedule:
            with schedule.forward(0, target=theirs.ids if replay else None):
                logprobs = logprobs_of(model, tokens)
            route_shift = torch.zeros_like(logprobs) if replay else found.route_shift.view(LENGTH, -1).T
            old = logprobs.detach()
            corrected = correct(
                old, rollout_logprobs, mask, correction=CORRECTION, advantages=advantages,
                statistics={"route_shift": route_shift},
            )  # fmt: skip
            corrected.metrics.check()
            scale = loss_scale(mask, corrected.mask)
            loss, _ = policy_loss(logprobs, old, advantages, corrected, scale=scale)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == 1:
            m, shifted = corrected.metrics.values(), found.sums.values()["route_tokens_touched"]
            print(
                f"step {step}: reward {rewards.mean():.2f}, shifted tokens {shifted:.1%}, "
                f"k3 without replay {without:.5f}, as trained {m['k3']:.5f}, masked {m['masked_token']:.1%}"
            )


def main() -> None:
    existing_loop.start()
    for replay in (False, True):
        print("with the sampler's routes (R3)" if replay else "with the trainer's own routes")
        train(replay)


if __name__ == "__main__":
    main()
