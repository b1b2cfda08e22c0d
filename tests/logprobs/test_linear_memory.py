"""What the fused head holds beyond its inputs: measured peaks against the formula of the documents."""

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from head_case import Case, head_case, with_main_grad
from loss_batch import grouped

from megatron_rc.logprobs.linear import linear_logprobs, linear_policy_loss
from megatron_rc.logprobs.reference import rows as reference_rows

TOKENS, VOCABULARY = 64, 4096
TEMPORARIES = {torch.float32: 80 * 2**10, torch.bfloat16: 144 * 2**10}
"""Bytes of row statistics and products; on a CPU, PyTorch converts one row of logits at a time to fp32."""


def peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes that were allocated at a time, beyond those at the start.

    Without oneDNN, whose products of bf16 take scratch memory that differs from CPU to CPU: on one with AMX more than a
    chunk of logits. What was garbage before is collected first: freed during the call, it would count as the call's.
    """
    gc.collect()
    with (
        warnings.catch_warnings(action="ignore"),
        torch.backends.mkldnn.flags(enabled=False),  # type: ignore[no-untyped-call]
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile,
    ):
        call()
    live = highest = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        highest = max(highest, live)
    return highest


def step(case: Case, leaves: Any, form: str, **options: Any) -> Callable[[], None]:
    given, of_loss = case.of_loss()

    def run() -> None:
        if form == "logprobs":
            logprobs = linear_logprobs(*leaves, case.targets, backend="torch", **grouped(**options))
            logprobs.backward(torch.ones_like(logprobs))  # type: ignore[union-attr]
        else:
            known = {"upstream": 1.0} if form == "policy_loss, upstream" else {}
            terms = {"with_entropy": True, "backend": "torch", **known, **grouped(**of_loss, **options)}
            linear_policy_loss(*leaves, case.targets, *given, **terms).loss.backward()

    return run


@pytest.mark.parametrize("home", ["main_grad", "main_grad, rows", "own"])
# the larger of the two: a chunk of logits, or the gradient that Megatron's DDP wants to see
@pytest.mark.parametrize(("rows", "width"), [(32, 20), (24, 64)], ids=["chunk is larger", "weight is larger"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("form", ["logprobs", "policy_loss", "policy_loss, upstream"])
def test_the_peak_is_a_chunk_or_a_gradient_of_the_weight_and_not_both(
    form: str, dtype: torch.dtype, rows: int, width: int, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_rows, "_CHUNK_ELEMENTS", VOCABULARY)
    monkeypatch.setattr("megatron_rc.logprobs.gradient._BLOCK_ELEMENTS", VOCABULARY)
    case, size = head_case(dtype, TOKENS, width, VOCABULARY), dtype.itemsize
    leaves = case.leaves() if home == "own" else with_main_grad(case, torch.float32)
    options = {"rows": case.batch["loss_mask"].nonzero()[:, 0]} if home == "main_grad, rows" else {}
    found = peak_bytes(step(case, leaves, form, chunk=rows, **options))

    weight = VOCABULARY * width
    summed = 4 * weight if home == "own" or form == "policy_loss" else 0
    chunk = rows * VOCABULARY * size + summed
    if home == "own":
        # what autograd gets is the sum, or made of it in the dtype of the weight
        gradient = summed + size * weight if dtype == torch.bfloat16 else 0
    else:
        # nothing is in it, but DDP asserts that it is there
        gradient = size * weight
    states = (TOKENS + (len(options["rows"]) if options else 0)) * width * size
    assert 0 <= found - max(chunk, gradient) <= states + 64 * TOKENS + TEMPORARIES[dtype]
