"""Weights and inputs that are rounded to a grid of levels, noisy, or that lag behind the trainer's."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scripted_engine import ScriptedEngine
from tiny_models import KINDS, errors, transformers_model
from torch import Tensor

from megatron_rc.engine import RolloutEngine, SamplingParams
from megatron_rc.rollout.embedded.engine import EmbeddedEngine
from megatron_rc.rollout.embedded.rounding import multiply_in_fp32
from megatron_rc.rollout.perturb import amplified, perturbed
from megatron_rc.rollout.quantize import is_quantizable, quantized
from megatron_rc.rollout.stale import StaleEngine
from megatron_rc.settings.quantization import QUANTIZATIONS, Grid
from megatron_rc.settings.rollout import RolloutSettings

LINEAR = [f"model.layers.0.{name}.weight" for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.experts.3.down_proj")]
E4M3_LEVELS = sorted(
    {m / 8 * 2.0**-6 for m in range(8)} | {(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)} - {480.0}
)
"""Every non-negative number of the format, from its definition: 4 exponent bits, bias 7, 3 mantissa bits, no inf."""
GRIDS = [grid for row in QUANTIZATIONS.values() for grid in (row.weights, row.inputs) if grid]
INT8, FP8 = (QUANTIZATIONS[name].weights for name in ("int8", "fp8"))


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
    rounded = perturbed(example_stream(), quantize="int8", noise=1)
    for (name, before), (same_name, after) in zip(example_stream(), rounded, strict=True):
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
    noisy = perturbed(example_stream(), quantize="int8", amplify=0.2, noise=4)
    for (name, got), (_, weight) in zip(noisy, example_stream(), strict=True):
        expected = amplified(weight, 0.2, name=name, noise=4)
        if is_quantizable(name, weight):
            expected = quantized(expected, QUANTIZATIONS["int8"].weights)
        assert torch.equal(got, expected), name
    for (_, got), (_, weight) in zip(perturbed(example_stream(), noise=4), example_stream(), strict=True):
        assert torch.equal(got, weight)
    with pytest.raises(ValueError, match=r"quantize must be one of 'none', 'int8', .*, got 'int4'"):
        list(perturbed(example_stream(), quantize="int4", noise=4))


class RecordingEngine(ScriptedEngine):
    """Answers with the value of its one weight, so that a test sees which weights sampled; has a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.closed, self.loaded = False, dict[str, Tensor]()

    def state_tensors(self) -> dict[str, Tensor]:
        return {"own": torch.tensor([3.0])}

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        self.loaded = tensors

    def close(self) -> None:
        self.closed = True


def served(engine: StaleEngine) -> tuple[int, float]:
    [sample] = engine.generate([[1]], SamplingParams(), n=1, seeds=[0])
    assert sample.weight_versions == [(engine.weight_version, 0, 1)]
    return engine.weight_version, sample.logprobs[0]


def updates(engine: StaleEngine, versions: Iterable[int]) -> list[tuple[int, float]]:
    """Update from one parameter that is overwritten in place, as a trainer's is; the weight of version v is 10 v."""
    parameter = torch.zeros(())
    seen = []
    for version in versions:
        parameter.fill_(10 * version)
        engine.update_weights([("model.w", parameter)], version)
        seen.append(served(engine))
    return seen


@pytest.mark.parametrize(("lag", "expected"), [(0, [0, 1, 2, 3, 4]), (1, [0, 0, 1, 2, 3]), (3, [0, 0, 0, 0, 1])])
def test_stale_weights_are_that_many_updates_old(lag: int, expected: list[int]) -> None:
    engine = StaleEngine(RecordingEngine(), lag)
    assert isinstance(engine, RolloutEngine)
    assert updates(engine, range(5)) == [(version, 10.0 * version) for version in expected]


def test_the_queue_survives_a_checkpoint() -> None:
    running = StaleEngine(RecordingEngine(), 2)
    updates(running, [8, 9, 10])
    # names hold dots and slashes; more than ten versions must not sort as text
    state = {key: tensor.clone() for key, tensor in running.state_tensors().items()}
    assert set(state) == {"engine/own", "queue/8/model.w", "queue/9/model.w", "queue/10/model.w"}
    inner = RecordingEngine()
    resumed = StaleEngine(inner, 2)
    resumed.load_state_tensors(state)
    assert inner.loaded == {"own": torch.tensor([3.0])}
    assert served(resumed) == served(running) == (8, 80.0)
    assert updates(resumed, [11, 12, 13]) == updates(running, [11, 12, 13]) == [(9, 90.0), (10, 100.0), (11, 110.0)]
    assert resumed.state_tensors() == running.state_tensors()


def test_the_newest_version_given_again_replaces_itself() -> None:
    assert updates(StaleEngine(RecordingEngine(), 1), [0, 1, 1, 2]) == [(0, 0.0), (0, 0.0), (0, 0.0), (1, 10.0)]
    first = StaleEngine(RecordingEngine(), 1)
    first.update_weights([("model.w", torch.tensor(1.0))], 0)
    first.update_weights([("model.w", torch.tensor(2.0))], 0)
    assert served(first) == (0, 2.0)


def test_lag_must_not_be_negative_and_close_reaches_the_wrapped_engine() -> None:
    with pytest.raises(ValueError, match="lag must be >= 0, got -1"):
        StaleEngine(RecordingEngine(), -1)
    inner = RecordingEngine()
    StaleEngine(inner, 1).close()
    assert inner.closed


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


@pytest.mark.parametrize("kind", ["fp8-block", "fp8-cache"])
def test_decoding_rounds_what_a_full_rounded_forward_rounds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformers_model(KINDS["dense"]).eval()
    engine = EmbeddedEngine(KINDS["dense"], dtype="fp32", device="cpu", quantize=kind)
    engine.update_weights(model.state_dict().items(), 1)
    prompts = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5]]
    samples = engine.generate(prompts, SamplingParams(max_new_tokens=9), n=8, seeds=range(24))
    assert errors(model, samples).abs().median() > 1e-3
    round_by_hand(model, kind, monkeypatch)
    # a number in the middle between two levels may go either way
    assert errors(model, samples).abs().quantile(0.8) < 1e-5


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
        assert ((found.double() - true).abs() <= true.abs() * torch.finfo(dtype).eps / 2 + 1e-5).all()
        with torch.no_grad():
            layer.weight.copy_(torch.randn(40, 96))
