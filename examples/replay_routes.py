"""Record, compare and replay the experts of a mixture in a loop of your own on Megatron-Core.

    python examples/replay_routes.py

The loop of examples/existing_loop.py with eight experts per layer. The sampler holds the weights in 5 bits, so its
routers choose other experts than the trainer's for some tokens. It is trained twice: with the trainer's own routes,
then with those of the sampler (R3). Every line gives the k3 KL without and with the replay: of one batch, which says
little (late in training a few tokens decide it), and at the end as the mean over all steps. Half a minute on a CPU.
"""

import existing_loop  # isort: skip - it starts the emulation of CUDA
import torch
from existing_loop import LENGTH, LR, build_model, logprobs_of, roll_out
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megatron_rc import Extras, Rejection, RolloutCorrection, Weight, correct, loss_scale, policy_loss
from megatron_rc.moe.replay import RoutedSchedule
from megatron_rc.moe.routers import routers_of
from megatron_rc.moe.shift import expert_shift
from megatron_rc.moe.tables import MoeShape, RouteTable

SHAPE = MoeShape(num_layers=2, layers=(0, 1), top_k=2, num_experts=8)
CORRECTION = RolloutCorrection(
    weight=Weight("token", "truncate", upper=2.0),
    reject=(Rejection("route_shift", "token", upper=0.5),),  # tokens with both layers moved
)


MIXTURE = {
    "num_moe_experts": SHAPE.num_experts,
    "moe_router_topk": SHAPE.top_k,
    "moe_router_load_balancing_type": "none",
    "moe_router_dtype": "fp32",
    "moe_token_dispatcher_type": "alltoall",
    "ffn_hidden_size": 32,
    "add_bias_linear": False,
}


@torch.no_grad()
def take_weights(sampler: GPTModel, model: GPTModel) -> None:
    """Copy the weights in 5 bits, with one scale per tensor."""
    for mine, theirs in zip(sampler.parameters(), model.parameters(), strict=True):
        scale = theirs.abs().max().clamp(min=1e-6) / 15
        mine.copy_((theirs / scale).round() * scale)


@torch.no_grad()
def routes_of(model: GPTModel, tokens: Tensor, reference: Tensor | None = None) -> tuple[Tensor, RouteTable]:
    """Log-probs [B, T] of a forward pass, and what its routers chose; rows are in Megatron's order [T, B]."""
    schedule = RoutedSchedule([routers_of(model)], SHAPE, forward_only=True, detail=True)
    with schedule, schedule.forward(0, reference=reference):
        logprobs = logprobs_of(model, tokens)
    return logprobs, schedule.table()


def train(replay: bool, steps: int = 40) -> None:
    torch.manual_seed(0)
    model, sampler = build_model(**MIXTURE), build_model(**MIXTURE)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    gaps = []  # per step: k3 without replay, k3 as trained
    for step in range(1, steps + 1):
        take_weights(sampler, model)
        tokens, rollout_logprobs, mask, rewards, advantages = roll_out(sampler)
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
                extras=Extras({"route_shift": route_shift}),
            )  # fmt: skip
            corrected.metrics.check()
            scale = loss_scale(mask, corrected.mask)
            loss, _ = policy_loss(logprobs, old, advantages, corrected, scale=scale)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        m = corrected.metrics.values()
        gaps.append((without.item(), m["k3"]))
        if step % 10 == 0 or step == 1:
            shifted = found.sums.values()["route_tokens_touched"]
            print(
                f"step {step}: reward {rewards.mean():.2f}, shifted tokens {shifted:.1%}, "
                f"k3 without replay {without:.5f}, as trained {m['k3']:.5f}, masked {m['masked_token']:.1%}"
            )
    own, trained = torch.tensor(gaps).mean(0).tolist()
    print(f"all {steps} steps: k3 without replay {own:.6f}, as trained {trained:.6f}")


def main() -> None:
    existing_loop.start()
    for replay in (False, True):
        print("with the sampler's routes (R3)" if replay else "with the trainer's own routes")
        train(replay)


if __name__ == "__main__":
    main()
