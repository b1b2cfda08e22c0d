"""A loop as a user types it: mypy and pyright check this file against the package, and nothing runs it."""

from typing import assert_type

from torch import Tensor

from megatron_rc import Corrected, correct, linear_logprobs, loss_scale, patch, policy_loss, vocab_parallel_logprobs


def step(logits: Tensor, targets: Tensor, old: Tensor, rollout: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    assert_type(vocab_parallel_logprobs(logits, targets, mask=mask), Tensor)
    logprobs, entropy = vocab_parallel_logprobs(logits, targets, with_entropy=True)
    assert_type(logprobs, Tensor)
    corrected = correct(old, rollout, mask, correction="token-tis")
    assert_type(corrected, Corrected)
    scale = loss_scale(mask, corrected.mask)
    return policy_loss(logprobs, old, advantages, corrected, scale=scale, entropy=entropy).loss


def of_the_head(hidden: Tensor, weight: Tensor, targets: Tensor, wanted: bool) -> Tensor:
    assert_type(linear_logprobs(hidden, weight, targets, with_entropy=True), tuple[Tensor, Tensor])
    assert_type(linear_logprobs(hidden, weight, targets, with_entropy=wanted), Tensor | tuple[Tensor, Tensor])
    with patch("slime", correction="token-tis"):
        return linear_logprobs(hidden, weight, targets)
