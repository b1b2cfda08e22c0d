"""The fused head on the kernels: the numbers of the torch backend, and what a chunk asks of the device."""

from functools import partial
from typing import Any

import pytest
import torch
from head_case import by_head, distance, exact, head_case
from logprobs_truth import random_support, unchecked
from loss_batch import grouped
from test_centered import test_a_row_that_does_not_count_has_no_term_and_no_gradient  # noqa: F401
from test_centering import test_single_precision_agrees_with_the_truth  # noqa: F401

from megatron_rc.logprobs.linear import linear_logprobs, linear_policy_loss
from speed.launches import count_launches

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("small_rows")]


@pytest.mark.parametrize("fused", [True, False], ids=["policy_loss", "logprobs"])
@pytest.mark.parametrize("option", ["one chunk", "padding", "fp32 logits", "strided"])
def test_every_option_equals_the_fp64_truth(option: str, fused: bool) -> None:
    case = head_case(torch.float32)
    softmax: dict[str, Any] = {"temperature": torch.linspace(0.6, 1.4, len(case.targets))}
    of_head: dict[str, Any] = {"chunk": None if option == "one chunk" else 4}
    if option == "padding":
        softmax["vocab_size"] = 12
    if option == "fp32 logits":
        of_head["logits_dtype"] = torch.float32
    leaves: Any = case.leaves()
    if option == "strided":
        # at addresses that are no multiple of 16 bytes
        wide = [torch.cat([leaf[:, :1], leaf, leaf[:, :2]], 1).detach() for leaf in leaves]
        leaves = [part[:, 1:-2].requires_grad_() for part in wide]
    true = exact(case, factor=0.7, **softmax)
    found = by_head(case, fused=fused, factor=0.7, leaves=leaves, backend="triton", **softmax, **of_head)
    assert max(map(distance, found, true)) <= 5e-6


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("form", "kept", "launches"),
    [
        ("policy_loss", False, 8),
        # kept ids: the gradient is parked, the logits are zeroed, and it is scattered
        ("policy_loss", True, 10),
        ("logprobs", False, 6),
        ("logprobs", True, 8),
    ],
)
def test_a_chunk_costs_few_launches_and_nothing_waits(form: str, kept: bool, launches: int) -> None:
    """Counted for one shard; merge_statistics is one launch more where there are several."""
    torch.use_deterministic_algorithms(False)
    case = head_case(torch.float32)
    given, of_loss = case.of_loss()
    leaves = case.leaves()
    options: dict[str, Any] = {"with_entropy": True, "backend": "triton"}
    if kept:
        options["support"] = random_support(case.targets, 13, torch.Generator().manual_seed(0))

    def step(chunk: int) -> None:
        if form == "policy_loss":
            of_chunk = grouped(chunk=chunk, **of_loss, **options)
            linear_policy_loss(*leaves, case.targets, *given, **of_chunk).loss.backward()
        else:
            logprobs, entropy = linear_logprobs(*leaves, case.targets, **grouped(chunk=chunk, **options))
            torch.autograd.backward([logprobs, entropy], [torch.ones_like(logprobs)] * 2)

    with unchecked():
        step(11)  # the gradients of leaves are there from here on
        one, three = (count_launches(partial(step, chunk)) for chunk in (11, 4))
    torch.use_deterministic_algorithms(True)
    assert not one.waits and not three.waits
    assert three.total - one.total == 2 * launches
