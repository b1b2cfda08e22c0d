"""A packed batch through prime-rl's own compute_loss, with its default loss and with the file of the page."""

import json
from typing import Any

import torch
from hosts.verl import cases
from prime_rl.configs.trainer import CustomLossConfig, DefaultLossConfig
from prime_rl.trainer.rl.loss import compute_loss, setup_rl_loss_fn

ROWS = range(4)  # whose ratios are all below 2, so that no weight is truncated


def answer(config: Any) -> dict[str, Any]:
    batch = cases.rollout(0)
    current = [batch.current[row].clone().requires_grad_() for row in ROWS]
    # a stream of weights, with a token that leaves the component
    weights = [torch.linspace(0, 1, 12) if row == 1 else None for row in ROWS]
    loss, metrics = compute_loss(
        trainer_logprobs=current, inference_logprobs=[batch.rollout[row] for row in ROWS], ref_logprobs=None,
        advantages=[batch.advantages[row] for row in ROWS], loss_mask=[batch.mask[row].bool() for row in ROWS],
        rl_weights=weights, ce_weights=None, ref_kl_weights=None, rl_loss_fn=setup_rl_loss_fn(config),
        rl_scale=40, ce_scale=1, ref_kl_scale=1,
    )  # fmt: skip
    loss.backward()
    gradients = [row.grad.tolist() for row in current if row.grad is not None]
    return {"loss": loss.item(), "gradient": gradients, **{name: value.tolist() for name, value in metrics.items()}}


def main() -> None:
    whole = DefaultLossConfig(dppo_mask_low=1, dppo_mask_high=1, kl_tau=0)
    names = ("none", "token-tis", "seq-tis")
    ours = {name: CustomLossConfig(import_path="rc_loss.corrected", kwargs={"correction": name}) for name in names}
    print("ANSWER", json.dumps({name: answer(config) for name, config in {"own": whole, **ours}.items()}))


if __name__ == "__main__":
    main()
