"""Group baselines against slow fp64 loops, and the scale of every token."""

import math
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from loss_batch import evaluate, padded, random_batch
from refusals import refusal
from torch import Tensor

from megatron_rc.loss.advantages import equal_reward_groups, expand_to_tokens, grpo_advantages, rloo_advantages
from megatron_rc.loss.scale import loss_scale

MAX_LENGTH = 7
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def aggregate(
    losses: list[list[float]], loss_mask: list[list[bool]], kept: list[list[bool]], aggregation: str, denominator: str
) -> float:
    """The aggregation by its words: rejected tokens have loss 0, and count or not."""
    totals, counts = [], []
    for values, in_loss, is_kept in zip(losses, loss_mask, kept, strict=True):
        totals.append(sum(v for v, m, k in zip(values, in_loss, is_kept, strict=True) if m and k))
        counts.append(sum(in_loss) if denominator == "original" else sum(map(all, zip(in_loss, is_kept, strict=True))))
    if aggregation == "token-mean":
        return sum(totals) / sum(counts) if sum(counts) else 0.0
    sequences = [(total, count) for total, count in zip(totals, counts, strict=True) if count]
    divisor = {"seq-mean-token-mean": None, "seq-mean-token-sum": 1, "seq-mean-token-sum-norm": MAX_LENGTH}[aggregation]
    return sum(total / (divisor or count) for total, count in sequences) / len(sequences) if sequences else 0.0


def split(values: Tensor, lengths: list[int]) -> list[list[Any]]:
    return [part.tolist() for part in values.split(lengths)]


@pytest.mark.parametrize("denominator", ["original", "kept"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_scaled_losses_are_the_aggregation(aggregation: Any, denominator: Any, lengths: list[int], seed: int) -> None:
    batch = random_batch(lengths, seed)
    loss_mask, mask, losses = batch["loss_mask"], batch["mask"], batch["current"]
    arguments: dict[str, Any] = dict(aggregation=aggregation, denominator=denominator, max_length=MAX_LENGTH)
    expected = aggregate(*(split(each, lengths) for each in (losses, loss_mask, mask)), aggregation, denominator)
    scale = loss_scale(loss_mask, mask, cu_seqlens=batch["cu_seqlens"], **arguments)
    assert scale.dtype == torch.float32 and (scale[~loss_mask] == 0).all()
    assert (scale * losses * mask).sum().item() == pytest.approx(expected, rel=1e-6, abs=1e-7)
    in_rows = loss_scale(padded(loss_mask, lengths), padded(mask, lengths), **arguments)
    assert torch.equal(in_rows, padded(scale, lengths))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"aggregation": "mean"}, "aggregation must be one of 'token-mean', "),
        ({"denominator": "all"}, "denominator must be one of 'original', 'kept', got 'all'"),
        ({"aggregation": "seq-mean-token-sum"}, "cu_seqlens must be given"),
        ({"aggregation": "seq-mean-token-sum-norm", "cu_seqlens": torch.tensor([0, 3])}, "max_length must be >= 1"),
        ({"kept_mask": torch.ones(2, dtype=torch.bool)}, "kept_mask must have the shape (3,) of loss_mask, got (2,)"),
    ],
)
def test_bad_scale_arguments_are_named(arguments: dict[str, Any], sentence: str) -> None:
    mask = torch.ones(3, dtype=torch.bool)
    assert refusal(loss_scale, **{"loss_mask": mask, "kept_mask": mask, **arguments}).startswith(sentence)


def parallel_loss(rank: int, aggregation: Any, denominator: Any) -> tuple[Tensor, Tensor, dict[str, float], Tensor]:
    """DP = 2 x CP = 2: (summed loss, rows, pooled metrics, gradient)."""
    lengths = [4, 7, 1, 6, 0, 3]
    batch = random_batch(lengths, 5)
    cp_groups, dp_groups = [[dist.new_group(r) for r in pair] for pair in (((0, 1), (2, 3)), ((0, 2), (1, 3)))]
    data, context = divmod(rank, 2)
    starts = batch["cu_seqlens"].tolist()
    rows, local = [], [0]
    for i in [[0, 3, 4], [1, 2, 5]][data]:
        middle = starts[i] + (lengths[i] + 1) // 2
        part = range(starts[i], middle) if context == 0 else range(middle, starts[i + 1])
        rows += part
        local.append(local[-1] + len(part))
    mine = {name: value[rows] for name, value in batch.items() if name != "cu_seqlens"}
    scale = loss_scale(
        mine["loss_mask"], mine["mask"], aggregation=aggregation, denominator=denominator, max_length=MAX_LENGTH,
        cu_seqlens=torch.tensor(local, dtype=torch.int32), dp_group=dp_groups[context], cp_group=cp_groups[data],
    )  # fmt: skip
    loss, gradient, metrics = evaluate(mine, scale)
    dist.all_reduce(loss)
    return loss, torch.tensor(rows), metrics.all_reduce(dist.group.WORLD).values(), gradient


def every_aggregation(rank: int) -> list[tuple[Tensor, Tensor, dict[str, float], Tensor]]:
    return [parallel_loss(rank, a, d) for a in AGGREGATIONS for d in ("original", "kept")]


def test_loss_gradient_and_metrics_do_not_depend_on_data_or_context_parallelism() -> None:
    ranks = run_ranks(4, every_aggregation)
    batch = random_batch([4, 7, 1, 6, 0, 3], 5)
    for i, (aggregation, denominator) in enumerate((a, d) for a in AGGREGATIONS for d in ("original", "kept")):
        options: dict[str, Any] = {"aggregation": aggregation, "denominator": denominator, "max_length": MAX_LENGTH}
        scale = loss_scale(batch["loss_mask"], batch["mask"], cu_seqlens=batch["cu_seqlens"], **options)
        loss, gradient, metrics = evaluate(batch, scale)
        gathered = torch.empty_like(gradient)
        for rank in ranks:
            torch.testing.assert_close(rank[i][0], loss, atol=1e-14, rtol=1e-12)
            assert rank[i][2] == pytest.approx(metrics.values(), rel=1e-9, nan_ok=True)
            gathered[rank[i][1]] = rank[i][3]
        assert torch.equal(gathered, gradient)


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
