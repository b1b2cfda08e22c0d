"""Which torch can multiply narrow factors into fp32 on a GPU."""

import pytest
import torch

from megatron_rc.logprobs import inputs as head_inputs
from megatron_rc.logprobs.gradient import check_wide_products
from megatron_rc.logprobs.linear import linear_logprobs

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_older_torch_on_a_gpu_is_refused(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.7.1+cu128")
    with pytest.raises(ValueError, match=rf"torch 2\.8 or newer for {dtype} on a GPU, found 2\.7\.1\+cu128"):
        check_wide_products(dtype, GPU)
    # a CPU widens the factors, and fp32 is not widened
    check_wide_products(dtype, CPU)
    check_wide_products(torch.float32, GPU)


def test_the_head_asks_before_it_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[torch.dtype, torch.device]] = []
    monkeypatch.setattr(head_inputs, "check_wide_products", lambda *given: asked.append(given))
    linear_logprobs(torch.zeros(3, 4), torch.zeros(7, 4), torch.zeros(3, dtype=torch.int64))
    assert asked == [(torch.float32, CPU)]


@pytest.mark.parametrize("version", ["2.8.0a0+34c6371d24.nv25.08", "2.8.0", "2.13.0+cpu"])
def test_newer_releases_and_builds_before_them_are_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    check_wide_products(torch.bfloat16, GPU)
