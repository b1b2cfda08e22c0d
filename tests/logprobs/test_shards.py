"""vocab_parallel_logprobs over real groups, shards of unequal width against one; tests/kernels has this, too."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import Collectives, run_ranks
from logprobs_truth import INF, truth, unchecked
from refusals import refuses
from row_problems import ULP, Problem, Solution, assert_exact, small_blocks
from torch import Tensor

from megatron_rc.backend import set_debug_checks, use_triton
from megatron_rc.batch import Support
from megatron_rc.logprobs.logits import vocab_parallel_logprobs
from speed.launches import count_launches

ROWS = 7
WIDTHS = {1: (107,), 2: (40, 67), 3: (40, 36, 31)}
"""The same vocabulary, cut unequally."""
VOCABULARIES = ((9, 8), (8, 8), (9, 7))
"""Shards of three vocabularies over one group: a rank may have the same width in two of them."""


@dataclass(frozen=True)
class Case:
    widths: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    scale: float = 4.0
    vocab_size: int | None = None
    dead: tuple[int, int] | None = None
    """Columns whose logits are -inf in the first three rows. Row 4 is -inf everywhere then."""
    with_mask: bool = False
    with_support: bool = False
    temperature: Any = 1.0

    def problem(self) -> Problem:
        """The whole vocabulary, the same on every rank."""
        generator, total = torch.Generator().manual_seed(sum(self.widths)), sum(self.widths)
        logits = self.scale * torch.randn(ROWS, total, generator=generator)
        logits[torch.rand(ROWS, total, generator=generator) < 0.1] = -INF
        if self.dead is not None:
            logits[:3, slice(*self.dead)] = logits[4] = -INF
        targets = torch.randint(-1, total + 1, (ROWS,), generator=generator)
        # the last column of a shard, the first of the next, and both ends
        targets[:4] = torch.tensor([0, total - 1, 39 % total, 40 % total])
        options = {"vocab_size": self.vocab_size or total, "temperature": self.temperature}
        if self.with_mask:
            options["mask"] = torch.arange(ROWS) % 3 != 1
            logits[1] = torch.nan
        if self.with_support:
            ids = [torch.randperm(total, generator=generator)[: 5 * (row % 3)] for row in range(ROWS)]
            options["support"] = Support(torch.cat(ids), torch.tensor([0, *map(len, ids)]).cumsum(0))
        up, up_entropy = torch.randn(2, ROWS, generator=generator)
        return Problem(logits.to(self.dtype), targets, options, up, up_entropy)


def cases(world: int) -> list[Case]:
    widths, temperatures = WIDTHS[world], torch.linspace(0.5, 2, ROWS)
    found = [
        Case(widths, scale=40.0),
        Case(widths, torch.bfloat16, with_mask=True, temperature=0.7),
        Case(widths, torch.float16, temperature=temperatures),
        # padding over the whole last shards and part of one
        Case(widths, vocab_size=50),
        # the first shards, and the last
        Case(widths, dead=(0, 73)),
        Case(widths, dead=(76, 107)),
        Case(widths, with_support=True),
        Case(widths, torch.bfloat16, with_support=True, with_mask=True, temperature=1.3),
    ]
    if use_triton("auto", logits=torch.zeros(1)):
        return found
    wide = {1: (1065,), 2: (40, 1025), 3: (40, 1022, 3)}[world]
    return [*found, Case(wide), Case(widths, torch.float64, temperature=temperatures)]


def evaluate(case: Case, rank: int, group: dist.ProcessGroup | None) -> dict[str, Any]:
    whole, start = case.problem(), sum(case.widths[:rank])
    leaf = whole.logits[:, start : start + case.widths[rank]].clone().requires_grad_()
    results, gradients = list[Tensor](), list[Tensor]()

    def forward() -> None:
        results[:] = vocab_parallel_logprobs(leaf, whole.targets, tp_group=group, with_entropy=True, **whole.options)

    def backward() -> None:
        ups = [up.to(results[0].dtype) for up in (whole.up, whole.up_entropy)]
        gradients[:] = torch.autograd.grad(results, leaf, ups)

    with unchecked(), small_blocks():
        # the first call of a vocabulary exchanges the widths
        forward()
        with Collectives() as collectives:
            counts = count_launches(forward), count_launches(backward)
    found = Solution(results[0].detach(), results[1].detach(), gradients[0])
    return {"found": found, "counts": counts, "collectives": collectives.seen}


def refusal(rank: int, group: dist.ProcessGroup) -> str:
    set_debug_checks(True)
    rows = torch.zeros(3 + dist.get_rank(group), 4)
    return refuses("", vocab_parallel_logprobs, rows, rows[:, 0].long(), tp_group=group)


def every_case(rank: int) -> dict[str, Any]:
    """Tensor parallelism over all ranks where there are more than two, over the last two of them, and none."""
    world = dist.get_world_size()
    found: dict[str, Any] = {"1": [evaluate(case, 0, None) for case in cases(1) if rank == 0]}
    if world > 2:
        found[str(world)] = [evaluate(case, rank, dist.group.WORLD) for case in cases(world)]
    pair, place = dist.new_group([world - 2, world - 1]), rank + 2 - world
    if place >= 0:
        found["2"] = [evaluate(case, place, pair) for case in cases(2)]
        found["refusal"] = refusal(rank, pair)
        of_each = [Case(widths, vocab_size=sum(widths)) for widths in VOCABULARIES]
        found["vocabularies"] = [evaluate(case, place, pair)["found"].logprobs for case in of_each]
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(3, every_case)


@pytest.fixture(params=["two", "all"])
def results(request: pytest.FixtureRequest, ranks: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    world = 2 if request.param == "two" else len(ranks)
    return [list(case) for case in zip(*(rank[str(world)] for rank in ranks[-world:]), strict=True)]


def four_ulp(problem: Problem) -> Tensor:
    """[N] four ulp of max(|target logit|, |LSE|)."""
    temperature = problem.options["temperature"]
    z = problem.logits.double() / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    z = z[:, : problem.options["vocab_size"]]
    target = z.gather(1, problem.targets.clamp(0, z.shape[1] - 1)[:, None])[:, 0]
    size = torch.maximum(target.nan_to_num(0, 0, 0).abs(), z.logsumexp(1).nan_to_num(0, 0, 0).abs()).clamp(min=2**-20)
    return 4 * 2.0 ** (size.log2().floor() - (52 if problem.logits.dtype == torch.float64 else 23))


def test_all_ranks_hold_the_same_bits(results: list[list[dict[str, Any]]]) -> None:
    for case in results:
        for rank in case[1:]:
            assert all(torch.equal(a, b) for a, b in zip(rank["found"][:2], case[0]["found"][:2], strict=True))


def test_any_cut_equals_one_shard_within_four_ulp(results: list[list[dict[str, Any]]], ranks: list[Any]) -> None:
    for case, parts, one in zip(cases(1), results, ranks[0]["1"], strict=True):
        problem, expected = case.problem(), one["found"]
        bound = four_ulp(problem)
        for mine, whole in zip(parts[0]["found"][:2], expected[:2], strict=True):
            finite = whole != -INF
            assert torch.equal(mine == -INF, ~finite)
            assert ((mine.double() - whole.double())[finite].abs() <= bound[finite]).all()
        gradient = torch.cat([rank["found"].gradient for rank in parts], 1).double()
        true = expected.gradient.double()
        assert gradient.shape == true.shape and (gradient[true == 0] == 0).all()
        # log p may differ as much as the log-prob, in each of the two terms
        size = 1 + problem.logits.double().nan_to_num(0, 0, 0).abs().amax(1)
        allowed = bound * (problem.up.abs() + problem.up_entropy.abs() * size) / case.temperature
        if case.dtype in (torch.bfloat16, torch.float16):
            allowed = allowed + ULP[case.dtype] * true.abs().amax(1)
        assert ((gradient - true).abs() <= allowed[:, None]).all()


def test_one_shard_equals_the_fp64_truth() -> None:
    for case in cases(1):
        with small_blocks():
            assert_exact(case.problem())


def test_only_forward_gathers_four_numbers_a_token(results: list[list[dict[str, Any]]], ranks: list[Any]) -> None:
    for case, parts in zip(cases(1), results, strict=True):
        size = 8 if case.dtype == torch.float64 else 4
        for rank in parts:
            assert rank["collectives"] == [("_allgather_base_", len(parts) * 4 * ROWS * size)]
            assert rank["counts"][0].collectives and not rank["counts"][1].collectives
    assert not any(one["collectives"] for one in ranks[0]["1"])


def test_vocabularies_of_different_shards_share_a_group(ranks: list[dict[str, Any]]) -> None:
    for i, widths in enumerate(VOCABULARIES):
        problem = Case(widths, vocab_size=sum(widths)).problem()
        first, second = (rank["vocabularies"][i] for rank in ranks[-2:])
        assert torch.equal(first, second)
        expected = truth(problem.logits, problem.targets, **problem.options)[1]
        torch.testing.assert_close(first.double(), expected.detach(), atol=5e-6, rtol=0)


def test_ranks_with_unequal_rows_are_told(ranks: list[dict[str, Any]]) -> None:
    said = "the number of rows of logits must be equal on all ranks of tp_group, got [3, 4]"
    assert [rank["refusal"] for rank in ranks[-2:]] == [said] * 2
