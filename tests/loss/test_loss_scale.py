"""loss_scale against the words of each aggregation, and against data and context parallelism over gloo."""

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
