"""Weights that lag behind the trainer's."""

from collections.abc import Iterable

import pytest
import torch
from scripted_engine import ScriptedEngine
from torch import Tensor

from megatron_rc.engine import RolloutEngine, SamplingParams
from megatron_rc.rollout.stale import StaleEngine


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
