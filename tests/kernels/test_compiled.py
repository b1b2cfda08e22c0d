"""torch.compile over what calls the kernels: the same values and gradients as without."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from on_device import CARD
from torch import Tensor
from torch.overrides import _pop_mode_temporarily

from megatron_rc import HeadInputs, correct, linear_logprobs, policy_loss, vocab_parallel_logprobs
from megatron_rc.correction.settings import PRESETS

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("no_debug_checks")]

# a CPU shows that a step can be traced; compiling it would need a C++ compiler
COMPILER = "inductor" if CARD else "eager"


def rows_step(logits: Tensor) -> Tensor:
    targets = torch.arange(len(logits), device=logits.device)
    logprobs, entropy = vocab_parallel_logprobs(1.5 * logits, targets, with_entropy=True, backend="triton")
    return (logprobs + 0.1 * entropy).sum()


def correction_step(logprobs: Tensor) -> Tensor:
    """The correction and the loss in one compiled function, as a training step would have them."""
    current = logprobs[:, 0] - 1
    old, mask, whole = current.detach() * 0.9, current < 9, torch.tensor([0, 7, 7, len(current)], device=current.device)
    chosen = PRESETS["seq-tis"].correction
    corrected = correct(old, old - 0.1, mask, correction=chosen, cu_seqlens=whole, backend="triton")
    return policy_loss(2 * current, old, -old, corrected, scale=mask / len(old), backend="triton").loss


def head_step(hidden: Tensor) -> Tensor:
    targets = torch.arange(len(hidden), device=hidden.device)
    found = linear_logprobs(2 * hidden, hidden.detach() * 3, targets, head=HeadInputs(chunk=100), backend="triton")
    return found.mean()


@pytest.mark.parametrize("step", [pytest.param(rows_step, marks=pytest.mark.cuda), correction_step, head_step])
def test_torch_compile_takes_a_step_with_kernels(step: Callable[[Tensor], Tensor]) -> None:
    values = torch.randn(256, 64 if step is head_step else 512, generator=torch.Generator().manual_seed(0))
    leaves = [values.clone().requires_grad_() for _ in range(2)]
    # what is compiled is the step alone, not the mode that makes the tensors of tests
    with _pop_mode_temporarily() if CARD else nullcontext():
        losses = [torch.compile(step, backend=COMPILER)(leaves[0]), step(leaves[1])]
        for loss in losses:
            loss.backward()
    assert leaves[0].grad is not None and leaves[1].grad is not None and leaves[1].grad.any()
    # the operations around a kernel may be fused, and then round otherwise
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=1e-5, atol=1e-6)
