"""Matrices, inputs and caches rounded to a grid of levels."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import KINDS, transformers_model
from torch import Tensor

from megatron_rc.engine import Sample, SamplingParams
from megatron_rc.rollout.embedded.engine import EmbeddedEngine
from megatron_rc.rollout.embedded.rounding import multiply_in_fp32
from megatron_rc.rollout.quantize import quantized
from megatron_rc.settings.quantization import QUANTIZATIONS, Grid
from megatron_rc.settings.rollout import RolloutSettings

E4M3_LEVELS = sorted(
    {m / 8 * 2.0**-6 for m in range(8)} | {(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)} - {480.0}
)
"""Every non-negative number of the format, from its definition: 4 exponent bits, bias 7, 3 mantissa bits, no inf."""


GRIDS = [grid for row in QUANTIZATIONS.values() for grid in (row.weights, row.inputs) if grid]
INT8, FP8 = (QUANTIZATIONS[name].weights for name in ("int8", "fp8"))


def example_weight(out: int = 24, width: int = 40) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    channels = torch.logspace(-3, 2, out)[:, None]
    return torch.randn(out, width, generator=generator) * channels


def test_int8_error_is_at_most_half_a_step_of_its_own_channel() -> None:
    weight = example_weight()
    step = weight.abs().amax(1, keepdim=True).double() / 127
    result = quantized(weight, INT8).double()
    levels = result / step
    assert (levels - levels.round()).abs().max() < 1e-4
    assert levels.abs().max() <= 127 + 1e-4
    assert ((result - weight.double()).abs() <= step / 2 * (1 + 1e-5)).all()
    # rounding really happened, to more than a handful of levels
    assert 50 < len(levels.round().unique()) <= 255


def test_fp8_rounds_to_the_nearest_e4m3_number_of_its_own_channel() -> None:
    weight = example_weight()
    scale = weight.abs().amax(1, keepdim=True) / 448
    levels = torch.tensor(E4M3_LEVELS, dtype=torch.float64)
    scaled = (weight / scale).double()
    nearest = levels[(scaled.abs()[..., None] - levels).abs().argmin(-1)]
    error = (quantized(weight, FP8) / scale).double().abs() - scaled.abs()
    assert torch.allclose(error.abs(), (nearest - scaled.abs()).abs(), atol=1e-4)
    assert (error.abs() <= torch.maximum(scaled.abs() / 16, torch.tensor(1 / 1024)) * (1 + 1e-5)).all()
    assert error.abs().max() > 1


@pytest.mark.parametrize("grid", GRIDS)
def test_quantising_twice_changes_nothing_and_zero_channels_stay_zero(grid: Grid) -> None:
    weight = example_weight()
    weight[3] = 0
    once = quantized(weight, grid)
    assert torch.allclose(quantized(once, grid), once, rtol=1e-6, atol=0)
    assert torch.equal(once[3], weight[3])
    assert quantized(weight.bfloat16(), grid).dtype == torch.bfloat16


@pytest.mark.parametrize("grid", GRIDS)
def test_every_block_has_the_scale_of_its_own_largest_number(grid: Grid) -> None:
    weight = example_weight(300, 200)
    result = quantized(weight, grid)
    height, width = grid.rows or 300, grid.columns or 200
    for row in range(0, 300, height):
        for column in range(0, 200, width):
            block = (slice(row, row + height), slice(column, column + width))
            scale = weight[block].abs().max() / grid.largest
            error = (result[block] - weight[block]).abs()
            relative = weight[block].abs() / 16 if grid.rounded_by != "int8" else torch.zeros(())
            assert (error <= torch.maximum(relative, scale / 2) * (1 + 1e-5)).all()
            assert (result[block].abs() <= weight[block].abs().max() * (1 + 1e-6)).all() and error.max() > 0


def round_by_hand(model: Any, kind: str, patch: pytest.MonkeyPatch) -> None:
    """Round, token by token, the inputs of the reference model's matrices, or its keys and values."""
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    grid, plain = QUANTIZATIONS[kind].inputs, qwen3.apply_rotary_pos_emb

    def e4m3(states: Tensor) -> Tensor:
        return states.clamp(-448, 448).to(torch.float8_e4m3fn).float()

    def product(module: Any, features: Tensor) -> Tensor:
        tokens = [quantized(token[None], grid) if grid else token[None] for token in features[0]]
        states = F.linear(torch.cat(tokens)[None], module.weight)
        return states if grid or module not in values else e4m3(states)

    def rotate(*arguments: Any) -> tuple[Tensor, Tensor]:
        query, key = plain(*arguments)
        return query, key if grid else e4m3(key)

    values = [layer.self_attn.v_proj for layer in model.model.layers]
    patch.setattr(qwen3, "apply_rotary_pos_emb", rotate)
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            patch.setattr(module, "forward", partial(product, module))


@torch.no_grad()
def errors(model: Any, samples: Sequence[Sample]) -> Tensor:
    """Distance of the log-probs from those of a forward of each whole sequence by itself."""
    found = []
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.output_ids])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(sample.output_ids)[:, None])[:, 0]
        found.append((torch.tensor(sample.logprobs) - expected).abs())
    return torch.cat(found)


@pytest.mark.parametrize("kind", ["fp8-block", "fp8-cache"])
def test_decoding_rounds_what_a_full_forward_with_rounded_numbers_rounds(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = transformers_model(KINDS["dense"]).eval()
    engine = EmbeddedEngine(KINDS["dense"], dtype="fp32", device="cpu", quantize=kind)
    engine.update_weights(model.state_dict().items(), 1)
    prompts = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5]]
    samples = engine.generate(prompts, SamplingParams(max_new_tokens=9), n=8, seeds=range(24))
    assert errors(model, samples).median() > 1e-3
    round_by_hand(model, kind, monkeypatch)
    # a number in the middle between two levels may go either way
    assert errors(model, samples).quantile(0.8) < 1e-5


def test_an_engine_that_cannot_round_inputs_is_refused() -> None:
    assert RolloutSettings(engine="sglang", quantize="int4-32").quantize == "int4-32"
    for kind in ("fp8-tensor", "fp8-block", "fp8-cache"):
        with pytest.raises(ValueError, match=f"quantize must not be '{kind}': it rounds more than weights, which eng"):
            RolloutSettings(engine="sglang", quantize=kind)
    with pytest.raises(ValueError, match="quantize must not round the inputs of matrices in a model with experts"):
        EmbeddedEngine(KINDS["moe"], dtype="fp32", device="cpu", quantize="fp8-block")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_in_fp32_round_once_as_units_for_16_bits_do_and_follow_the_weights(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(96, 40, dtype=dtype)
    features, exact = torch.randn(30, 96, dtype=dtype), torch.nn.Linear(96, 40, dtype=torch.float64)
    multiply_in_fp32(layer)
    for _ in range(2):
        exact.load_state_dict(layer.state_dict())
        true, found = exact(features.double()), layer(features)
        assert found.dtype == dtype
        # half a unit in the last place of the result, and the rounding of fp32 sums
        allowed = true.abs() * torch.finfo(dtype).eps / 2 + 1e-5
        assert ((found.double() - true).abs() <= allowed).all()
        with torch.no_grad():
            layer.weight.copy_(torch.randn(40, 96))
