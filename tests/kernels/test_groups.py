"""Real process groups, gloo where kernels are interpreted and NCCL on cards: statistics, collectives, the head."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from head_case import Result, by_head, distance, exact, head_case
from row_problems import small_blocks
from torch import Tensor

from megatron_rc.collectives import all_gather_into, reduce_scatter_into
from megatron_rc.logprobs import backends
from megatron_rc.logprobs.logits import gather_statistics, vocab_parallel_logprobs
from megatron_rc.logprobs.reference.rows import Rows

WAYS = list(itertools.product((True, False), (False, True)))
"""Forms of the head, without and with sequence parallelism."""
TOKENS, VOCABULARY = 12, 13


def shard(rank: int, world: int) -> slice:
    """Columns of one rank; with two, its shard is not as wide as that of the other."""
    edges = [0, VOCABULARY] if world == 1 else [0, 5, VOCABULARY]
    return slice(edges[rank], edges[rank + 1])


def everything(rank: int, world: int) -> dict[Any, Any]:
    group = dist.group.WORLD
    case = head_case(torch.float32, TOKENS, vocabulary=VOCABULARY)
    mine = (case.hidden @ case.weight.T)[:, shard(rank, world)].contiguous()
    rows = Rows(case.targets, 0.7, torch.arange(TOKENS) % 5 != 2, None, None, shard(rank, world).start, mine.shape[1])
    kernels = backends.computing("triton")
    found: dict[Any, Any] = {}
    with small_blocks():
        # a group of one does not gather by itself
        gathered = gather_statistics(kernels.shard_statistics(mine, rows, with_entropy=True), group)
        found["merged"] = list(kernels.merge_shards(gathered, rows, with_entropy=True)[:2])
        found["log-probs"] = vocab_parallel_logprobs(
            mine, case.targets, temperature=0.7, mask=rows.mask, with_entropy=True, tp_group=group, backend="triton"
        )
        for fused, split in WAYS:
            hidden = case.hidden.chunk(world)[rank] if split else case.hidden
            leaves = tuple(part.clone().requires_grad_() for part in (hidden, case.weight[shard(rank, world)]))
            options = {"chunk": 5, "tp_group": group, "sequence_parallel": split, "backend": "triton"}
            found[fused, split] = tuple(by_head(case, fused=fused, leaves=leaves, **options))
    all_rows, sums = torch.empty(world * 3, 4), torch.empty(3, 4)
    all_gather_into(all_rows, torch.full((3, 4), rank + 1.0), group)
    reduce_scatter_into(sums, torch.arange(world * 3.0).repeat_interleave(4).view(-1, 4), group)
    found["collectives"] = [all_rows, sums]
    return found


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("gloo", 2), marks=pytest.mark.interpreter, id="gloo, two ranks"),
        pytest.param(("nccl", 1), marks=pytest.mark.cuda, id="nccl, one rank"),
        pytest.param(("nccl", 2), marks=pytest.mark.cuda, id="nccl, two ranks"),
    ],
)
def ranks(request: pytest.FixtureRequest) -> list[dict[Any, Any]]:
    backend, world = request.param
    if backend == "nccl" and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices")
    return run_ranks(world, everything, world, backend=backend)


def test_statistics_that_are_gathered_and_merged_are_those_of_the_whole_vocabulary(ranks: list[Any]) -> None:
    case = head_case(torch.float32, TOKENS, vocabulary=VOCABULARY)
    true = exact(case, temperature=0.7, mask=torch.arange(TOKENS) % 5 != 2)
    for rank in ranks:
        for name in ("merged", "log-probs"):
            for found, first, expected in zip(rank[name], ranks[0][name], true[1:3], strict=True):
                assert torch.equal(found, first)
                assert distance(found, expected) <= 1e-6


def test_collectives_move_every_row_once(ranks: list[Any]) -> None:
    for rank, found in enumerate(ranks):
        all_rows, sums = found["collectives"]
        assert all_rows[:, 0].tolist() == [1.0 + owner for owner in range(len(ranks)) for _ in range(3)]
        assert sums[:, 3].tolist() == [len(ranks) * (3.0 * rank + row) for row in range(3)]


@pytest.mark.parametrize(("fused", "split"), WAYS)
def test_the_head_of_all_ranks_is_that_of_one(ranks: list[Any], fused: bool, split: bool) -> None:
    true = exact(head_case(torch.float32, TOKENS, vocabulary=VOCABULARY))
    answers = [Result(*rank[fused, split]) for rank in ranks]
    for one in answers:
        assert all(torch.equal(a, b) for a, b in zip(one[:3], answers[0][:3], strict=True))
        assert split or torch.equal(one.by_hidden, answers[0].by_hidden)
    by_hidden: Tensor = torch.cat([one.by_hidden for one in answers]) if split else answers[0].by_hidden
    by_weight = torch.cat([one.by_weight for one in answers])
    assert max(map(distance, answers[0]._replace(by_hidden=by_hidden, by_weight=by_weight), true)) <= 5e-6
