"""Quantised and noisy weights."""

import pytest
import torch
from torch import Tensor

from megatron_rc.rollout.perturb import amplified, perturbed
from megatron_rc.rollout.quantize import is_quantizable, quantized
from megatron_rc.settings.quantization import QUANTIZATIONS

LINEAR = [f"model.layers.0.{name}.weight" for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.experts.3.down_proj")]


def example_weight(out: int = 24, width: int = 40) -> Tensor:
    return torch.randn(out, width, generator=torch.Generator().manual_seed(5)) * torch.logspace(-3, 2, out)[:, None]


def example_stream() -> list[tuple[str, Tensor]]:
    weight = example_weight()
    others = ("input_layernorm.weight", "self_attn.q_proj.bias", "self_attn.q_norm.weight", "mlp.gate.weight")
    names = ["model.embed_tokens.weight", *(f"model.layers.0.{name}" for name in others), *LINEAR, "lm_head.weight"]
    return [(name, weight[0] if name.endswith(("norm.weight", "bias")) else weight) for name in names]


def test_only_linear_matrices_are_quantised() -> None:
    changed = {name for name, tensor in example_stream() if is_quantizable(name, tensor)}
    assert changed == {*LINEAR}
    for (name, before), (same_name, after) in zip(
        example_stream(), perturbed(example_stream(), quantize="int8", noise=1), strict=True
    ):
        assert name == same_name
        assert torch.equal(before, after) == (name not in changed), name


def test_noise_has_the_asked_standard_deviation_in_units_of_the_tensor() -> None:
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(1)) * 0.02 + 0.5
    noise = amplified(weight, 0.3, name="w", noise=1) - weight
    expected = 0.3 * weight.std().item()
    assert noise.std().item() == pytest.approx(expected, rel=0.02)
    assert abs(noise.mean().item()) < 5 * expected / weight.numel() ** 0.5
    norm = torch.ones(8)
    assert torch.equal(amplified(norm, 0.3, name="n", noise=1), norm)


def test_noise_depends_on_name_and_version_only() -> None:
    weight = example_weight()
    torch.manual_seed(0)
    first = amplified(weight, 0.1, name="a", noise=1)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert torch.equal(first, amplified(weight, 0.1, name="a", noise=1))
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(first, amplified(weight, 0.1, name="b", noise=1))
    assert not torch.equal(first, amplified(weight, 0.1, name="a", noise=2))


def test_noise_comes_before_quantisation_and_neither_leaves_the_weights_alone() -> None:
    for (name, got), (_, weight) in zip(
        perturbed(example_stream(), quantize="int8", amplify=0.2, noise=4), example_stream(), strict=True
    ):
        expected = amplified(weight, 0.2, name=name, noise=4)
        if is_quantizable(name, weight):
            expected = quantized(expected, QUANTIZATIONS["int8"].weights)
        assert torch.equal(got, expected), name
    for (_, got), (_, weight) in zip(perturbed(example_stream(), noise=4), example_stream(), strict=True):
        assert torch.equal(got, weight)
    with pytest.raises(ValueError, match=r"quantize must be one of 'none', 'int8', .*, got 'int4'"):
        list(perturbed(example_stream(), quantize="int4", noise=4))
