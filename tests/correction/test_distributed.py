"""Over real process groups, correct() and its metrics are those of one process that holds everything."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from context_slice import context_slice, numbered_batch
from correction_cases import Case, case, correct
from distributed import run_ranks
from route_sets import random_routes
from torch import Tensor

from megatron_rc import MetricSums, Rejection, RolloutCorrection, Weight, loss_scale, vocab_parallel_logprobs
from megatron_rc.batch import TokenBatch
from megatron_rc.correction.correct import pair_metrics
from megatron_rc.moe.shift import expert_shift
from megatron_rc.moe.tables import MoeShape, RouteTable

LENGTHS = (7, 0, 30, 5, 1, 16, 9)
# uneven; of three data-parallel ranks one holds nothing
CUTS = {2: (0, 2, 7), 3: (0, 3, 3, 7)}
GATES = (
    Rejection("k2", "token", upper=0.8),
    Rejection("ratio", "sequence", "min", lower=0.3),
    Rejection("surprise", "segment", "max", upper=1.6, when="negative_advantage"),
    Rejection("k3", "segment", "mean", upper=0.3),
)
CORRECTIONS = [
    RolloutCorrection(Weight("token", "truncate", upper=1.3), normalize="batch"),
    RolloutCorrection(Weight("sequence", "mask", 0.2, 4.0), GATES[:1], "batch"),
    RolloutCorrection(Weight("sequence", "mask", 0.2, 4.0), GATES[1:2], "batch"),
    RolloutCorrection(Weight("geometric", "clip", 0.9, 1.2), GATES),
    RolloutCorrection(Weight("sequence", upper="measured"), GATES[:1]),
    RolloutCorrection(Weight("segment", "mask", 0.6, 1.6), GATES[2:], "batch"),
    RolloutCorrection(Weight(upper="measured"), (Rejection("standardized", "sequence", upper=1.5),)),
    RolloutCorrection(reject=(Rejection("standardized", "segment", upper=1.5), GATES[1])),
    RolloutCorrection(
        Weight("sequence", "clip", 0.9, 1.2, growth="sqrt_lag"), (Rejection("lag", "segment", "mean", upper=4.0),)
    ),
    RolloutCorrection(Weight("prefix", "clip", 0.3, 3.0), normalize="batch"),
    RolloutCorrection(Weight("prefix", "mask", 0.7, 1.5, growth="sqrt_position"), GATES[2:]),
    RolloutCorrection(Weight("segment", "mask", 0.8, 1.6, upper_by_lag=((0, 1.5), (6, 1.1))), normalize="batch"),
    RolloutCorrection(
        reject=(
            Rejection("abs_log_ratio", "segment", "min", upper=0.25),
            Rejection("surprise", "sequence", "mean", upper=0.3, when="negative_advantage"),
            Rejection("prob_diff", "sequence", "max", upper=0.4),
        )
    ),
]

GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
"""The name without a warning in this release of torch."""
EVERY = range(len(CORRECTIONS))
OF_OWN_TOKENS = RolloutCorrection(Weight("segment", "mask", 0.5, 2.0), (Rejection("k3", upper=0.5),), normalize="batch")


class Answer(NamedTuple):
    rows: Tensor
    """Which rows of the whole batch, [n]."""
    sequences: list[int]
    weights: Tensor
    mask: Tensor
    bad: Tensor
    metrics: dict[str, float]


def whole_batch() -> Case:
    batch = case([*LENGTHS], seed=3, density=0.75, gap=0.3)
    batch.train[batch.mask.nonzero()[[4, 30]]] = torch.nan
    batch.lags = torch.arange(sum(LENGTHS)) * 7 % 11
    return batch


def as_token_batch(batch: Case) -> TokenBatch:
    return numbered_batch(batch.mask, batch.cu_seqlens, batch.rollout)


def answer(
    local: TokenBatch, sequences: list[int], index: int, dp_group: Any = None, cp_group: Any = None, **options: Any
) -> Answer:
    batch, rows = whole_batch(), local.tokens
    corrected = correct(
        batch.train[rows], local.rollout_logprobs, local.loss_mask, correction=CORRECTIONS[index],
        cu_seqlens=local.cu_seqlens, segment_ids=local.segment_ids, num_segments=local.num_segments,
        advantages=batch.advantages[sequences], measured_upper=1.3, positions=local.positions, lags=batch.lags[rows],
        statistics={"surprise": batch.statistics["surprise"][rows]}, dp_group=dp_group, cp_group=cp_group,
        **options,
    )  # fmt: skip
    for group in (cp_group, dp_group):
        if group is not None:
            corrected.metrics.all_reduce(group)
    metrics = corrected.metrics.values()
    return Answer(rows, sequences, corrected.weights, corrected.mask, corrected.bad_sequences, metrics)


def assert_together_equal_one_process(parts: list[Answer], index: int, *, rel: float, **options: Any) -> None:
    batch = whole_batch()
    whole = answer(as_token_batch(batch), list(range(len(LENGTHS))), index, **options)
    assert 0 < whole.mask.sum() < batch.mask.sum()
    assert sorted(torch.cat([part.rows for part in parts]).tolist()) == list(range(len(batch.mask)))
    for part in parts:
        torch.testing.assert_close(part.weights, whole.weights[part.rows], rtol=1e-6, atol=0)
        assert torch.equal(part.mask, whole.mask[part.rows])
        assert torch.equal(part.bad, whole.bad[part.sequences])
        assert part.metrics == pytest.approx(whole.metrics, rel=rel, abs=1e-12)
        assert part.metrics == parts[0].metrics


def data_parallel(rank: int, size: int, indices: Sequence[int] = EVERY) -> list[Answer]:
    sequences = list(range(*CUTS[size][rank : rank + 2]))
    local = as_token_batch(whole_batch()).select(sequences)
    return [answer(local, sequences, i, dist.group.WORLD, None) for i in indices]


def context_parallel(rank: int, cp: int, dp: int, indices: Sequence[int] = EVERY) -> list[Answer]:
    """Neighbouring ranks share sequences; every data-parallel rank holds every dp-th sequence."""
    cp_groups = [dist.new_group(list(range(d * cp, (d + 1) * cp))) for d in range(dp)]
    dp_groups = [dist.new_group(list(range(c, dp * cp, cp))) for c in range(cp)]
    sequences = list(range(rank // cp, len(LENGTHS), dp))
    local = context_slice(as_token_batch(whole_batch()).select(sequences), cp, rank % cp)
    return [answer(local, sequences, i, dp_groups[rank % cp], cp_groups[rank // cp]) for i in indices]


def pair_over_context_parallel(rank: int, size: int) -> dict[str, float]:
    batch = whole_batch()
    local = context_slice(as_token_batch(batch), size, rank)
    arguments = batch.train[local.tokens], local.rollout_logprobs, local.loss_mask
    pair = pair_metrics(*arguments, cu_seqlens=local.cu_seqlens, cp_group=dist.group.WORLD)
    return pair.all_reduce(dist.group.WORLD).values()


def collectives_of_context_parallelism(rank: int, size: int) -> list[str]:
    """Names of the collectives called; a bar between calls."""
    called: list[str] = []
    batch = whole_batch()
    local = context_slice(as_token_batch(batch), size, rank)
    arguments = batch.train[local.tokens], local.rollout_logprobs, local.loss_mask
    options: dict[str, Any] = {"cu_seqlens": local.cu_seqlens, "cp_group": dist.group.WORLD}
    with pytest.MonkeyPatch.context() as patched:
        for name in (GATHER, "all_reduce"):
            original: Any = getattr(dist, name)
            patched.setattr(dist, name, lambda *a, _n=name, _f=original, **k: called.append(_n) or _f(*a, **k))
        pair_metrics(*arguments, **options)
        called.append("|")
        correct(*arguments, correction=RolloutCorrection.preset("geo-mask-token-tis"), **options)
        called.append("|")
        standardized = RolloutCorrection.preset("standardized")
        correct(*arguments, correction=standardized, **options)
        called.append("|")
        correct(*arguments, correction=standardized, cu_seqlens=local.cu_seqlens, dp_group=dist.group.WORLD)
        called.append("|")
        gate = RolloutCorrection(reject=(Rejection("k2", "segment", upper=1.0),))
        with pytest.raises(ValueError, match="segment_ids and num_segments must be given with context parallelism"):
            correct(*arguments, correction=gate, **options)
        prefix = RolloutCorrection(Weight("prefix"))
        with pytest.raises(ValueError, match="positions must be given for level 'prefix' with context parallelism"):
            correct(*arguments, correction=prefix, **options)
        correct(*arguments, correction=prefix, positions=local.positions, **options)
    return called


def everything(rank: int, size: int) -> dict[str, Any]:
    """One start of the processes for all of it."""
    if size == 4:
        return {"CP 2 x DP 2": context_parallel(rank, 2, 2)}
    return {
        f"DP {size}": data_parallel(rank, size),
        f"CP {size}": context_parallel(rank, size, 1),
        "pair": pair_over_context_parallel(rank, size),
        "collectives": collectives_of_context_parallelism(rank, size),
    }


@pytest.fixture(scope="module")
def ranks() -> dict[int, list[dict[str, Any]]]:
    return {size: run_ranks(size, everything, size) for size in (2, 3, 4)}


@pytest.mark.parametrize("index", EVERY)
@pytest.mark.parametrize("layout", ["DP 2", "DP 3", "CP 2", "CP 3", "CP 2 x DP 2"])
def test_ranks_together_equal_one_process(ranks: dict[int, list[dict[str, Any]]], layout: str, index: int) -> None:
    size = 4 if "x" in layout else int(layout[-1])
    assert_together_equal_one_process([rank[layout][index] for rank in ranks[size]], index, rel=1e-12)


@pytest.mark.parametrize("size", [2, 3])
def test_pair_metrics_over_cp_ranks_equal_one_process(ranks: dict[int, list[dict[str, Any]]], size: int) -> None:
    batch = whole_batch()
    whole = pair_metrics(*batch.arguments, cu_seqlens=batch.cu_seqlens).values()
    for rank in ranks[size]:
        assert rank["pair"] == pytest.approx(whole, rel=1e-12, abs=1e-12)


def test_context_parallelism_costs_one_collective_for_decisions_one_for_metrics_one_for_prefixes_and_dp_one_for_k3(
    ranks: dict[int, list[dict[str, Any]]],
) -> None:
    expected = [GATHER, "|", GATHER, GATHER, "|", GATHER, GATHER, "|", "all_reduce", "|", *[GATHER] * 3]
    for rank in ranks[2]:
        assert rank["collectives"] == expected


def without_groups(rank: int) -> dict[str, Any]:
    """What a rank gets from its own tokens: a group of None means no communication."""
    batch = case([9, 0, 12], seed=rank)
    corrected = correct(*batch.arguments, correction=OF_OWN_TOKENS, dp_group=None, cp_group=None, **batch.options)
    means = MetricSums.of_means({"entropy": (torch.tensor(rank + 1.0), torch.tensor(2.0))})
    chosen, sampled = random_routes((21, 2, 2), seed=rank)
    shape = MoeShape(num_layers=2, layers=(0, 1), top_k=2, num_experts=int(max(chosen.max(), sampled.max())) + 1)
    shift = expert_shift(RouteTable(shape, chosen), RouteTable(shape, sampled), batch.mask)
    scale = loss_scale(
        batch.mask, corrected.mask, aggregation="seq-mean-token-mean", cu_seqlens=batch.cu_seqlens,
        dp_group=None, cp_group=None,
    )  # fmt: skip
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(rank))
    return {
        "weights": corrected.weights.tolist(),
        "correct": corrected.metrics.all_reduce(None).values(),
        "pair": pair_metrics(*batch.arguments, cu_seqlens=batch.cu_seqlens, cp_group=None).all_reduce(None).values(),
        "means": means.all_reduce(None).values(),
        "shift": {n: v for n, v in shift.sums.all_reduce(None).values().items() if isinstance(v, float)},
        "scale": scale.tolist(),
        "logprobs": vocab_parallel_logprobs(logits, torch.arange(4), tp_group=None).tolist(),
    }


def test_without_groups_ranks_of_one_world_get_their_own_answers() -> None:
    found = run_ranks(2, without_groups)
    for name in found[0]:
        for rank in (0, 1):
            assert found[rank][name] == pytest.approx(without_groups(rank)[name], nan_ok=True), name
        assert found[0][name] != found[1][name], name
