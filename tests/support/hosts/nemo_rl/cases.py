"""Corrections that NeMo-RL and we can both express, batches for them, and its loss without correction in fp64."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rc import RolloutCorrection

KL = 0.1
LOWERED = 2.0
"""nats; log-probs are below those of the recorded batch by this, so that none is above 0."""
_TIS = {"weight": {"level": "token", "mode": "truncate", "upper": 1.5}}
_GATE = {"statistic": "ratio", "level": "sequence", "reduce": "mean", "lower": 0.9, "upper": 1.1}
# theirs does not bound the weight
_GATED = {"weight": _TIS["weight"] | {"upper": 1e6}, "reject": [_GATE]}


def _theirs(kind: str, upper: float, lower: float | None = None) -> dict[str, Any]:
    bounds = {"truncated_importance_sampling_ratio": upper, "truncated_importance_sampling_ratio_min": lower}
    return {"truncated_importance_sampling_type": kind, **{name: b for name, b in bounds.items() if b is not None}}


_THEIR_TIS = _theirs("tis", 1.5)


class Case(NamedTuple):
    theirs: dict[str, Any]
    """Fields of ClippedPGLossConfig for its own correction."""
    ours: dict[str, Any]
    """Fields of RolloutCorrection."""
    plain: dict[str, Any] = {}  # noqa: RUF012 - a constant
    """Fields of ClippedPGLossConfig in both."""


CASES = {
    "tis": Case(_THEIR_TIS, _TIS),
    "icepop": Case(_theirs("icepop", 1.5, 0.7), {"weight": _TIS["weight"] | {"mode": "mask", "lower": 0.7}}),
    "seq-mask-tis": Case(_theirs("seq-mask-tis", 1.1, 0.9), _GATED),
    "sequence-level loss, tis": Case(_THEIR_TIS, _TIS, {"token_level_loss": False}),
    "cispo, tis": Case(_THEIR_TIS, _TIS, {"use_cispo": True}),
    "dual clip, tis": Case(_THEIR_TIS, _TIS, {"ratio_clip_c": 1.05}),
    "reinforce, tis": Case(_THEIR_TIS, _TIS, {"disable_ppo_ratio": True}),
}
"""Settings with equal loss and gradient."""


def correction(name: str) -> RolloutCorrection:
    """Our setting of a case."""
    return RolloutCorrection.from_dict(CASES[name].ours)


def rollout(seed: int = 0, rows: int = 6, columns: int = 14) -> tuple[dict[str, Tensor], Tensor]:
    """Data of Policy.train, and the log-probs [B, S - 1] of the policy in the update.

    Prompts of two tokens, whose rollout log-probs are 0; tool output in two rows; one sample that is masked out.
    """
    random = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(rows, columns, generator=random)

    lengths = torch.randint(6, columns + 1, (rows,), generator=random)
    mask = ((torch.arange(columns) < lengths[:, None]) & (torch.arange(columns) >= 2)).float()
    mask[:2, 4:6] = 0
    sample_mask = torch.ones(rows)
    sample_mask[-1] = 0
    prev = -normal().abs() - 0.1 - LOWERED
    sampled = torch.where(mask > 0, prev - torch.linspace(0.05, 0.6, rows)[:, None] * normal(), 0)
    data = {"prev_logprobs": prev, "generation_logprobs": sampled, "reference_policy_logprobs": prev + 0.1 * normal()}
    data |= {"token_mask": mask, "sample_mask": sample_mask}
    data["advantages"] = normal()[:, :1].expand(rows, columns).contiguous()
    return data, (prev + 0.2 * normal())[:, 1:]


def as_recorded(data: dict[str, Tensor], current: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The batch with the log-probs of the recording, on whose level the losses of CISPO and REINFORCE depend."""
    raised = {name: value + LOWERED for name, value in data.items() if name.endswith("_logprobs")}
    return {**data, **raised}, current + LOWERED


def plain_loss(name: str, data: dict[str, Tensor], current: Tensor) -> tuple[float, Tensor]:
    """The policy loss of NeMo-RL without importance weights, by hand in fp64: loss and gradient by ``current``."""
    fields = CASES[name].plain
    x = current.double().requires_grad_()
    old, reference, advantages, tokens = (
        data[key][:, 1:].double() for key in ("prev_logprobs", "reference_policy_logprobs", "advantages", "token_mask")
    )
    samples = data["sample_mask"].double()

    def mean(values: Tensor) -> Tensor:
        if fields.get("token_level_loss", True):
            mask = tokens * samples[:, None]
            return (values * mask).sum() / mask.sum()
        of_rows = (values * tokens).sum(1) / tokens.sum(1)
        return (of_rows * samples).sum() / samples.sum()

    ratio = x if fields.get("disable_ppo_ratio") else (x - old).exp()
    clipped = ratio if fields.get("disable_ppo_ratio") else ratio.clamp(0.8, 1.2)
    losses = torch.maximum(-advantages * ratio, -advantages * clipped)
    if fields.get("use_cispo"):
        losses = -advantages * clipped.detach() * x
    if "ratio_clip_c" in fields:
        losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * fields["ratio_clip_c"]), losses)
    gap = reference - x
    # the samples come from the policy, so the KL term has the gradient of their probability, too
    loss = mean(losses) + KL * mean((x - x.detach()).exp() * (gap.exp() - 1 - gap))
    loss.backward()
    return loss.item(), x.grad
