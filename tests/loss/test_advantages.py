"""Group baselines against slow fp64 loops."""

import math
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_rc.loss.advantages import equal_reward_groups, expand_to_tokens, grpo_advantages, rloo_advantages

INF, NAN = float("inf"), float("nan")

rewards_and_groups = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0, 0.1, -2.5, 0.3, NAN, INF, -INF]), st.integers(-2, 3)), max_size=24
)


def members(samples: list[tuple[float, int]]) -> dict[int, list[float]]:
    """Finite rewards of every group, as fp32 holds them."""
    found = defaultdict(list)
    for reward, group in samples:
        found[group] += [torch.tensor(reward).double().item()] if math.isfinite(reward) else []
    return found


def tensors(samples: list[tuple[float, int]]) -> tuple[Tensor, Tensor]:
    return torch.tensor([r for r, _ in samples]), torch.tensor([g for _, g in samples], dtype=torch.int64)


@given(rewards_and_groups)
def test_rloo_is_the_reward_minus_the_mean_of_the_others(samples: list[tuple[float, int]]) -> None:
    expected = []
    for reward, group in samples:
        finite = members(samples)[group]
        others = (sum(finite) - reward) / (len(finite) - 1) if len(finite) > 1 else reward
        expected.append(reward - others if math.isfinite(reward) else 0.0)
    found = rloo_advantages(*tensors(samples))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.tolist(), expected, atol=1e-6, rtol=1e-6)


@given(rewards_and_groups, st.booleans())
def test_grpo_is_the_standardised_reward(samples: list[tuple[float, int]], divide_by_std: bool) -> None:
    expected = []
    for reward, group in samples:
        finite, reward = members(samples)[group], torch.tensor(reward).double().item()
        advantage = 0.0
        if math.isfinite(reward) and len(finite) > 1:
            mean = sum(finite) / len(finite)
            std = math.sqrt(sum((r - mean) ** 2 for r in finite) / (len(finite) - 1))
            advantage = (reward - mean) / (std + 1e-6 if divide_by_std else 1)
        expected.append(advantage)
    found = grpo_advantages(*tensors(samples), divide_by_std=divide_by_std)
    torch.testing.assert_close(found.tolist(), expected, atol=1e-5, rtol=1e-5)


@given(rewards_and_groups)
def test_groups_of_equal_rewards_are_named(samples: list[tuple[float, int]]) -> None:
    expected = [len(set(members(samples)[group])) <= 1 for _, group in samples]
    assert equal_reward_groups(*tensors(samples)).tolist() == expected


@pytest.mark.parametrize("size", [1, 3, 7, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -0.7])
def test_a_group_of_equal_rewards_has_advantages_of_exactly_0(reward: float, dtype: torch.dtype, size: int) -> None:
    rewards = torch.tensor([reward] * size + [2.0, 3.0], dtype=dtype)
    groups = torch.tensor([0] * size + [1, 1])
    of_grpo = [grpo_advantages(rewards, groups, divide_by_std=divide) for divide in (True, False)]
    for advantages in (rloo_advantages(rewards, groups), *of_grpo):
        assert advantages[:size].tolist() == [0] * size and advantages[size] < 0 < advantages[size + 1]


def test_rewards_and_groups_of_different_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rewards and groups must both be \[S\], got \(3,\), \(2,\)"):
        rloo_advantages(torch.zeros(3), torch.zeros(2, dtype=torch.int64))


def test_expand_to_tokens_gives_the_value_of_its_sequence_and_0_to_rows_that_no_sequence_covers() -> None:
    offsets = torch.tensor([1, 3, 3, 4], dtype=torch.int32)
    assert expand_to_tokens(torch.tensor([1.0, 2.0, 3.0]), offsets, 6).tolist() == [0, 1, 1, 3, 0, 0]
    assert expand_to_tokens(torch.tensor([True, True, True]), offsets, 4).tolist() == [False, True, True, True]
