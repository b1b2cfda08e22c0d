"""The lines that tell what a correction is compute what the library computes, and the page of methods holds."""

import re
from pathlib import Path

import torch
from story import story

import megatron_rc.correction
from megatron_rc import correct, loss_scale, policy_loss

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"


def test_the_lines_in_the_docstring_are_the_preset_token_tis_and_its_loss() -> None:
    n, made = 50, torch.Generator().manual_seed(0)
    rollout, advantages = -4 - torch.rand(n, generator=made), torch.randn(n, generator=made)
    old, current = rollout + 0.8 * torch.randn(2, n, generator=made)
    loss_mask = torch.rand(n, generator=made) < 0.8
    given = {"rollout_logprobs": rollout, "old_logprobs": old, "current_logprobs": current.requires_grad_()}
    told = story(megatron_rc.correction, loss_mask=loss_mask, advantages=advantages, **given)
    (slope,) = torch.autograd.grad(told["loss"], current)

    cu_seqlens = torch.tensor([0, 20, n], dtype=torch.int32)
    found = correct(old, rollout, loss_mask, correction="token-tis", cu_seqlens=cu_seqlens)
    loss = policy_loss(current, old, advantages, found, scale=loss_scale(loss_mask, found.mask)).loss
    assert torch.equal(told["weights"], found.weights) and torch.equal(told["mask"], found.mask)
    assert 0 < (found.weights == 2).sum() < n
    torch.testing.assert_close(told["loss"], loss)
    torch.testing.assert_close(slope, torch.autograd.grad(loss, current)[0])


def test_the_examples_of_the_page_of_methods_hold() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    exec("\n".join(blocks), {})
