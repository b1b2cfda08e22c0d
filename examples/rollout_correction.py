"""Rollout correction in one file of pure PyTorch, to copy into a trainer: nothing else of megatron_rc is needed.

An engine samples tokens from a policy mu, and the trainer updates a policy pi. Their log-probs of the same tokens
differ (other kernels, other precision, older weights). This file measures that gap and corrects for it::

    settings = Settings(level="token", mode="truncate", upper=2.0)               # the common choice, "token-tis"
    corrected = correct(old_logprobs, rollout_logprobs, loss_mask, settings)     # once per batch, before the update
    loss = policy_gradient_loss(losses, corrected.weights, tokens=pooled)        # once per micro-batch
    log(metrics(corrected.sums))                                                 # after an all-reduce of `sums`

All tensors of tokens are [B, T], padded, with the whole sequence in one row. `python rollout_correction.py` shows it on
a batch of random numbers.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

POSITIVE_FROM = 1e-3
"""A log-prob above this is corrupt; up to it, it is rounding."""


@dataclass(frozen=True)
class Settings:
    """What the weight of a token is, and which sequences are dropped. All bounds are on pi / mu, and inclusive."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """The ratio rho of a token: its own exp(l), exp(sum of l) of its sequence, or exp(mean of l) of its sequence."""
    mode: Literal["none", "truncate", "clip", "mask"] = "truncate"
    """none: every weight is 1. truncate: min(rho, upper). clip: clamp(rho, lower, upper). mask: rho inside the bounds,
    and 0 outside."""
    lower: float | None = None
    upper: float | None = 2.0
    keep_lower: float | None = None
    """Sequences whose geometric mean of pi / mu is below this are dropped, whatever the weight is."""
    keep_upper: float | None = None
    log_ratio_bound: float = 20.0
    """Log-ratios of weights and metrics are clamped to +- this before exp."""

    def __post_init__(self) -> None:
        if self.level not in ("token", "sequence", "geometric"):
            raise ValueError(f"level must be 'token', 'sequence' or 'geometric', got {self.level!r}")
        if self.mode not in ("none", "truncate", "clip", "mask"):
            raise ValueError(f"mode must be 'none', 'truncate', 'clip' or 'mask', got {self.mode!r}")
        if self.mode == "truncate" and (self.lower is not None or self.upper is None):
            raise ValueError("mode 'truncate' needs an upper bound and no lower one")
        if {"clip": 2, "mask": 1}.get(self.mode, 0) > (self.lower is not None) + (self.upper is not None):
            raise ValueError(f"mode {self.mode!r} needs {'both bounds' if self.mode == 'clip' else 'a bound'}")
        for lower, upper in ((self.lower, self.upper), (self.keep_lower, self.keep_upper)):
            given = [bound for bound in (lower, upper) if bound is not None]
            if given != sorted(given) or not all(0 < bound < float("inf") for bound in given):
                raise ValueError(f"bounds must be 0 < lower <= upper, got {lower} and {upper}")

    @property
    def drops_whole_sequences(self) -> bool:
        weighs = self.mode != "none" and self.level != "token"
        return weighs or self.keep_lower is not None or self.keep_upper is not None


class Corrected(NamedTuple):
    weights: Tensor
    """[B, T] fp32, detached; 0 where `mask` is False."""
    mask: Tensor
    """[B, T] bool: the tokens that still count."""
    sums: Tensor
    """[len(SUMS)] fp64: add them up over data-parallel ranks and micro-batches, then give them to `metrics`."""


SUMS = (
    "loss_tokens", "tokens", "kept", "seq_count", "l", "dev", "dev_squared", "rho", "rho_squared", "seq_rho",
    "seq_rho_squared", "seq_dev_squared", "weight", "weight_squared",
)  # fmt: skip
"""Names of the sums: rho = exp(l), dev = rho - 1, seq_ those of a whole sequence, weight the final weight."""


@torch.no_grad()
def correct(old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, settings: Settings) -> Corrected:
    """Importance weights of tokens that mu sampled, for an update of pi, with l = log pi - log mu of a token.

    A token with a NaN or +inf log-prob, one above 0 by more than rounding, or -inf from the sampler, is corrupt: it is
    dropped, and its sequence with it if the settings judge whole sequences. Where only the trainer says -inf, rho is 0.

    Args:
        old_logprobs: [B, T], nats, of the trainer before the update.
        rollout_logprobs: [B, T], nats, as the engine returned them when it sampled.
        loss_mask: [B, T], not 0 for tokens of the response that count.
        settings: level, mode and bounds.
    """
    if not old_logprobs.shape == rollout_logprobs.shape == loss_mask.shape or loss_mask.dim() != 2:
        shapes = [list(given.shape) for given in (old_logprobs, rollout_logprobs, loss_mask)]
        raise ValueError(f"log-probs of trainer and sampler and the mask must be [B, T], got {shapes}")
    old, rollout, wanted = old_logprobs.float(), rollout_logprobs.float(), loss_mask.bool()
    valid = wanted & (torch.maximum(old, rollout) <= POSITIVE_FROM) & (rollout > -torch.inf)
    whole = ~(wanted & ~valid).any(-1, keepdim=True)
    ratios = torch.where(valid, old - rollout, 0)
    total = ratios.double().sum(-1, keepdim=True)
    mean = total / valid.sum(-1, keepdim=True).clamp(min=1)

    value = {"token": ratios, "sequence": total.float(), "geometric": mean.float()}[settings.level].expand_as(ratios)
    mask = valid & whole if settings.drops_whole_sequences else valid
    mask = mask & _within(mean.float(), settings.keep_lower, settings.keep_upper)
    if settings.mode == "mask":
        mask = mask & _within(value, settings.lower, settings.upper)
    rho = _ratio(value, settings.log_ratio_bound)
    if settings.mode in ("truncate", "clip"):
        rho = rho.clamp(settings.lower, settings.upper)
    weights = torch.where(mask, torch.ones_like(rho) if settings.mode == "none" else rho, 0)
    final = {"weight": weights.double(), "weight_squared": weights.double() ** 2}
    counts = {"loss_tokens": wanted, "tokens": valid, "kept": mask}
    sums = {**_sums(ratios, valid, "", settings), **_sums(total, whole & valid.any(-1, keepdim=True), "seq_", settings)}
    sums |= {name: values.sum().double() for name, values in (counts | final).items()}
    return Corrected(weights, mask, torch.stack([sums[name] for name in SUMS]))


def _within(log_value: Tensor, lower: float | None, upper: float | None) -> Tensor:
    """Compares logs, which no clamp has changed; both sides in the precision of the log-probs."""
    low = -torch.inf if not lower else torch.tensor(lower, dtype=torch.float64).log().item()
    high = torch.inf if upper is None else torch.tensor(upper, dtype=torch.float64).log().item()
    return log_value.clamp(low, high) == log_value


def _ratio(log_value: Tensor, bound: float) -> Tensor:
    return log_value.clamp(-bound, bound).exp() * (log_value > -torch.inf)


def _sums(log_ratio: Tensor, counted: Tensor, prefix: str, settings: Settings) -> dict[str, Tensor]:
    """fp64 sums over tokens or, with the prefix seq_, over whole sequences."""
    clamped = log_ratio.double().clamp(-settings.log_ratio_bound, settings.log_ratio_bound)
    # near l = 0, exp(l) - 1 would lose its digits
    dev = torch.where(log_ratio > -torch.inf, clamped.expm1(), -1.0)
    columns = {"count": torch.ones_like(dev), "l": clamped, "dev": dev, "dev_squared": dev**2}
    columns |= {"rho": dev + 1, "rho_squared": (dev + 1) ** 2}
    return {prefix + name: torch.where(counted, values, 0).sum() for name, values in columns.items()}


def metrics(sums: Tensor) -> dict[str, float]:
    """What to log, from sums that were added up over all ranks and micro-batches; NaN where nothing was counted.

    k1 and k3 estimate KL(mu || pi) per token, chi2 is that of pi against mu. ess is the effective sample size as a
    share: (sum rho)^2 / (n sum rho^2), and ess_token_final that of the final weights, which are 0 where dropped.
    """
    s = dict(zip(SUMS, sums.double().tolist(), strict=True))

    def quotient(value: float, count: float) -> float:
        return value / count if count > 0 else float("nan")

    return {
        "k1": quotient(-s["l"], s["tokens"]),
        "k3": quotient(max(0.0, s["dev"] - s["l"]), s["tokens"]),
        "chi2_token": quotient(s["dev_squared"], s["tokens"]),
        "chi2_seq": quotient(s["seq_dev_squared"], s["seq_count"]),
        "ess_token": quotient(s["rho"] ** 2, s["tokens"] * s["rho_squared"]),
        "ess_seq": quotient(s["seq_rho"] ** 2, s["seq_count"] * s["seq_rho_squared"]),
        "ess_token_final": quotient(s["weight"] ** 2, s["tokens"] * s["weight_squared"]),
        "weight_mean": quotient(s["weight"], s["kept"]),
        "masked_token": 1 - quotient(s["kept"], s["tokens"]),
        "nonfinite_count": s["loss_tokens"] - s["tokens"],
    }


def policy_gradient_loss(losses: Tensor, weights: Tensor, tokens: Tensor | float) -> Tensor:
    """0-d: the sum of weighted losses over ``tokens``, so that dropped tokens stay in the denominator.

    Args:
        losses: [B, T], the trainer's own loss per token, such as -min(r A, clip(r) A); it may hold anything where the
            weight is 0.
        weights: [B, T], from `correct`.
        tokens: loss tokens of the whole batch over all micro-batches and data-parallel ranks, counted before anything
            was dropped; what is divided by fewer tokens grows when more are dropped.
    """
    return torch.where(weights != 0, losses * weights, 0).sum() / tokens


if __name__ == "__main__":
    torch.manual_seed(0)
    mu = -torch.rand(4, 64) * 3
    pi, response = mu + 0.1 * torch.randn(4, 64), torch.ones(4, 64, dtype=torch.bool)
    found = correct(pi.clamp(max=0), mu, response, Settings())
    print({name: round(number, 4) for name, number in metrics(found.sums).items()})
    print("loss", round(policy_gradient_loss(-pi, found.weights, response.sum()).item(), 4))
