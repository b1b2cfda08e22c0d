"""Random input of the fused head, what it makes of it, and the fp64 truth."""

from typing import Any, NamedTuple

import torch
from logprobs_truth import truth
from loss_batch import corrected_of, grouped, random_batch
from torch import Tensor

from megatron_rc import RolloutCorrection, linear_logprobs, linear_policy_loss, policy_loss, vocab_parallel_logprobs

TERMS: dict[str, Any] = {"dual_clip": 3.0, "kl_coef": 0.2, "entropy_coef": 0.1}


class Case(NamedTuple):
    hidden: Tensor
    """[N, H]."""
    weight: Tensor
    """[V, H]."""
    targets: Tensor
    batch: dict[str, Tensor]
    """Per-token tensors of the loss, `scale` included."""

    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.hidden.detach().clone().requires_grad_(), self.weight.detach().clone().requires_grad_()

    def of_loss(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        batch = self.batch
        given = (batch["old"], batch["advantages"], corrected_of(batch, RolloutCorrection(old="recompute")))
        return given, {"scale": batch["scale"], "reference_logprobs": batch["reference"], **TERMS}


class Result(NamedTuple):
    loss: Tensor
    logprobs: Tensor
    entropy: Tensor
    by_hidden: Tensor
    by_weight: Tensor


def head_case(dtype: torch.dtype = torch.float64, tokens: int = 11, hidden: int = 6, vocabulary: int = 13) -> Case:
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    batch = random_batch([tokens], 1)
    del batch["cu_seqlens"]
    batch["scale"] = batch["loss_mask"] * (0.5 + torch.rand(tokens, generator=generator, dtype=torch.float64)) / tokens
    batch["advantages"][3] = 0
    states, weight = normal(tokens, hidden).to(dtype), normal(vocabulary, hidden).to(dtype)
    targets = torch.randint(0, vocabulary - 2, (tokens,), generator=generator)
    exact = torch.log_softmax(states.double() @ weight.double().T, 1).gather(1, targets[:, None])[:, 0]
    for name in ("old", "reference"):
        batch[name] = exact + (batch[name] - batch["current"])
    wanted = torch.promote_types(dtype, torch.float32)
    batch = {name: value.to(wanted) if value.is_floating_point() else value for name, value in batch.items()}
    return Case(states, weight, targets, batch)


def with_main_grad(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Leaves whose weight has what Megatron's DDP gives it, after a first micro-batch."""
    hidden, weight = case.leaves()
    weight.main_grad = torch.ones(weight.shape, dtype=dtype)  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    return hidden, weight


def exact(case: Case, factor: float = 1.0, **softmax: Any) -> Result:
    """The fp64 truth, by materialised logits and autograd through log_softmax."""
    hidden, weight = case.hidden.double(), case.weight.double()
    leaf, logprobs, entropy = truth(hidden @ weight.T, case.targets, **softmax)
    double = {name: value.double() if value.is_floating_point() else value for name, value in case.batch.items()}
    given, options = case._replace(batch=double).of_loss()
    loss = policy_loss(logprobs, *given, entropy=entropy, backend="torch", **grouped(**options)).loss
    (loss * factor).backward()
    return Result(loss.detach(), logprobs.detach(), entropy.detach(), leaf.grad @ weight, leaf.grad.T @ hidden)


def by_logits(case: Case, **softmax: Any) -> Result:
    """The path that keeps the logits in the dtype of the model."""
    hidden, weight = case.leaves()
    result = vocab_parallel_logprobs(hidden @ weight.T, case.targets, with_entropy=True, **softmax)
    given, options = case.of_loss()
    options = grouped(backend=softmax.get("backend", "auto"), **options)
    loss = policy_loss(result[0], *given, entropy=result[1], **options).loss
    loss.backward()
    return Result(loss.detach(), result[0].detach(), result[1].detach(), hidden.grad, weight.grad)


def by_head(case: Case, *, fused: bool, factor: float = 1.0, leaves: Any = None, **options: Any) -> Result:
    """linear_policy_loss, or linear_logprobs and policy_loss; backward starts from factor times the loss."""
    hidden, weight = leaves or case.leaves()
    given, of_loss = case.of_loss()
    if fused:
        loss, _, logprobs, entropy = linear_policy_loss(
            hidden, weight, case.targets, *given, with_entropy=True, **grouped(**of_loss, **options)
        )
    else:
        logprobs, entropy = linear_logprobs(hidden, weight, case.targets, with_entropy=True, **grouped(**options))
        of_loss = grouped(backend=options.get("backend", "auto"), **of_loss)
        loss = policy_loss(logprobs, *given, entropy=entropy, **of_loss).loss
    if loss.requires_grad:
        (loss * factor).backward()
    grads = (torch.zeros(0) if leaf.grad is None else leaf.grad for leaf in (hidden, weight))
    return Result(loss.detach(), logprobs.detach(), entropy.detach(), *grads)


def distance(found: Tensor, true: Tensor) -> float:
    """Relative, of the whole tensor."""
    assert found.shape == true.shape
    return float((found.double() - true).norm() / true.norm())
