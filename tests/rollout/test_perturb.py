"""Weights that are quantised, noisy, or lag behind the trainer's."""

from collections.abc import Iterable

import pytest
import torch
from scripted_engine import ScriptedEngine
from torch import Tensor

from megatron_rc.engine import RolloutEngine, SamplingParams
from megatron_rc.rollout.perturb import amplified, perturbed
from megatron_rc.rollout.quantize import is_quantizable, quantized
from megatron_rc.rollout.stale import StaleEngine
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
