"""Which backend computes where the kernels cannot run, which products a GPU has, and what the docstrings tell of."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import triton
from head_case import head_case
from story import story

from megatron_rc import HeadInputs, LossOptions, backend, linear_logprobs, policy_loss, vocab_parallel_logprobs
from megatron_rc import logprobs as room
from megatron_rc.logprobs import inputs as head_inputs
from megatron_rc.logprobs import linear
from megatron_rc.logprobs.gradient import check_wide_products

ROWS = torch.zeros(3)
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize("version", ["3.4.0", "3.3.1+git1234", "2.3.1", None, "3.5.0", "3.5.1+gitabc", "4.0.0"])
def test_auto_takes_torch_where_triton_is_absent_or_old(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "interpreted", lambda: True)
    said = rf"the kernels need triton 3.5 or newer, found {version and version[:5]}"
    if version is None:
        monkeypatch.setattr(backend, "find_spec", lambda name: None)
        said = "triton is not installed"
    else:
        monkeypatch.setattr(triton, "__version__", version)
    new = version is not None and version >= "3.5"
    assert backend.use_triton("auto", rows=ROWS) is new
    with nullcontext() if new else pytest.raises(ValueError, match=said):
        assert backend.use_triton("triton", rows=ROWS)


@pytest.mark.parametrize("version", ["2.7.1+cu128", "2.8.0a0+34c6371d24.nv25.08", "2.8.0", "2.13.0+cpu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_older_torch_on_a_gpu_is_refused(dtype: torch.dtype, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    said = rf"torch 2\.8 or newer for {dtype} on a GPU, found 2\.7\.1\+cu128"
    with pytest.raises(ValueError, match=said) if version.startswith("2.7") else nullcontext():
        check_wide_products(dtype, GPU)
    # a CPU widens the factors, and fp32 is not widened
    check_wide_products(dtype, CPU)
    check_wide_products(torch.float32, GPU)


def test_the_head_asks_before_it_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[torch.dtype, torch.device]] = []
    monkeypatch.setattr(head_inputs, "check_wide_products", lambda *given: asked.append(given))
    linear_logprobs(torch.zeros(3, 4), torch.zeros(7, 4), torch.zeros(3, dtype=torch.int64))
    assert asked == [(torch.float32, CPU)]


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
