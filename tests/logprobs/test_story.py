"""The stories at the top of the room and of the head, against what they tell of."""

from dataclasses import replace

import torch
from head_case import head_case
from story import story

from megatron_rc import logprobs as room
from megatron_rc.logprobs import linear
from megatron_rc.logprobs.inputs import HeadInputs
from megatron_rc.logprobs.logits import vocab_parallel_logprobs
from megatron_rc.loss.options import LossOptions
from megatron_rc.loss.policy_loss import policy_loss


def test_joined_shards_give_the_log_probs_of_the_whole_vocabulary() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = 30 * torch.randn(7, 11, generator=draw, dtype=torch.float64)
    targets = torch.randint(11, (7,), generator=draw)
    found = story(room)["simple_logprobs"](logits.split([4, 1, 6], 1), targets, temperature=0.7)
    torch.testing.assert_close(found, vocab_parallel_logprobs(logits, targets, temperature=0.7))


def test_chunks_give_the_loss_and_the_gradients_of_the_head() -> None:
    case = head_case()
    (old, advantages, corrected), options = case.of_loss()
    scale, chosen = options["scale"], LossOptions(dual_clip=3.0)

    def loss(logprobs: torch.Tensor, tokens: slice) -> torch.Tensor:
        part = replace(corrected, weights=corrected.weights[tokens], mask=corrected.mask[tokens])
        return policy_loss(logprobs, old[tokens], advantages[tokens], part, scale=scale[tokens], options=chosen).loss

    hidden, weight = case.leaves()
    found = story(linear)["simple_linear_policy_loss"](case.hidden, case.weight, case.targets, loss, 4)
    real = linear.linear_policy_loss(
        hidden, weight, case.targets, old, advantages, corrected, scale=scale, options=chosen, head=HeadInputs(chunk=4)
    ).loss
    real.backward()
    for value, true in zip(found, (real.detach(), hidden.grad, weight.grad), strict=True):
        torch.testing.assert_close(value, true)
