"""The expectations behind the honesty panel, summed over every sequence of small policies."""

import numpy as np
import pytest
import torch
from enumeration import World
from torch import Tensor

from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.statistics.sums import FIELDS, sequence_sums

LENGTH = 3
WORLD = World(LENGTH, stops=False, gap=2.0)


def expected(trainer: Tensor, drawn_from: Tensor, logged: Tensor, name: str) -> float:
    """Expectation of a sum over a response, when ``drawn_from`` draws it and ``logged`` is what the dump says.

    All three are log-probs by context and token.
    """
    chances = WORLD.probability(drawn_from).numpy()
    drawn = [y for y, chance in zip(WORLD.sequences, chances, strict=True) if chance > 0]
    steps = [step for y in drawn for step in WORLD.steps(y)]
    pi, mu = (np.array([table[step].item() for step in steps]) for table in (trainer, logged))
    entropy = torch.special.entr(trainer.exp()).sum(1)[[context for context, _ in steps]].numpy()
    rows = sequence_sums(Chunk(pi, mu, np.arange(len(drawn) + 1) * LENGTH, {"entropy": entropy}))
    return float(chances[chances > 0] @ rows[:, FIELDS.index(name)])


@pytest.mark.parametrize("noise", [0.01, 0.3, 2.0])
def test_honest_logs_give_zero_expectations_at_any_size_of_mismatch(noise: float) -> None:
    world = World(LENGTH, stops=False, gap=noise)
    trainer, sampler = world.log_pi, world.mu.log()
    assert abs(expected(trainer, sampler, sampler, "excess")) < 1e-12
    assert abs(expected(trainer, sampler, sampler, "surprise")) < 1e-12
    assert expected(trainer, sampler, sampler, "log_ratio") < 0


def test_truncated_logs_lower_the_mean_ratio_by_the_mass_that_was_cut() -> None:
    trainer = WORLD.log_pi
    cut = torch.where(trainer >= trainer.max(1, keepdim=True).values, 0.0, -torch.inf)
    lost, prefix = 0.0, ()
    for _ in range(LENGTH):
        row = trainer[WORLD.contexts[prefix]]
        lost, prefix = lost + 1 - row.max().exp().item(), (*prefix, int(row.argmax()))
    assert expected(trainer, cut, cut, "excess") == pytest.approx(-lost)


def test_a_hidden_temperature_shows_in_the_surprise_alone() -> None:
    trainer = WORLD.log_pi
    colder = (trainer / 0.7).log_softmax(1)
    assert abs(expected(trainer, colder, trainer, "excess")) < 1e-12
    assert expected(trainer, colder, trainer, "surprise") < -0.1


def test_raw_logs_raise_the_mean_log_ratio_above_zero() -> None:
    raw = WORLD.log_pi
    tempered = (raw / 0.7).log_softmax(1)
    assert expected(tempered, tempered, raw, "log_ratio") > 0.05
    assert expected(tempered, tempered, raw, "excess") > 0.05
