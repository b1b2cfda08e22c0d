"""The kernels of log-probs over real groups: TP = 2 and 4 with shards of unequal width against TP = 1."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from kernel_rows_data import ULP, Problem, small_blocks, solve, solve_exactly
from launches import count_launches
from logprobs_truth import INF, unchecked
from torch import Tensor

from megatron_rc.backend import set_debug_checks
from megatron_rc.logprobs import vocab_parallel_logprobs

ROWS = 6


@dataclass(frozen=True)
class Case:
    widths: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    scale: float = 4.0
    vocab_size: int | None = None
    dead: tuple[int, int] | None = None
    """Columns of which all logits are -inf in the first three rows; then one row is nothing else."""
    with_mask: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def problem(self) -> Problem:
        """The whole vocabulary, the same on every rank."""
        generator = torch.Generator().manual_seed(sum(self.widths))
        total = sum(self.widths)
        logits = self.scale * torch.randn(ROWS, total, generator=generator)
        logits[torch.rand(ROWS, total, generator=generator) < 0.1] = -INF
        if self.dead is not None:
            logits[:3, slice(*self.dead)] = logits[4] = -INF
        targets = torch.randint(-1, total + 1, (ROWS,), generator=generator)
        # the last column of a shard, the first of the next, and both ends
        targets[:4] = torch.tensor([0, total - 1, 39, 40])
        options = dict(self.options, vocab_size=self.vocab_size or total)
        if self.with_mask:
            options["mask"] = torch.arange(ROWS) % 3 != 1
            logits[1] = torch.nan
        up, up_entropy = torch.randn(2, ROWS, generator=generator)
        return Problem(logits.to(self.dtype), targets, options, up, up_entropy)


WIDTHS = {1: (107,), 2: (40, 67), 4: (40, 33, 3, 31)}
"""The same vocabulary, cut unequally."""


def cases(world: int) -> list[Case]:
    widths = WIDTHS[world]
    return [
        Case(widths, scale=40.0),
        Case(widths, torch.bfloat16, with_mask=True, options={"temperature": 0.7}),
        Case(widths, torch.float16, options={"temperature": torch.linspace(0.5, 2, ROWS)}),
        # padding over the whole last shards and part of one
        Case(widths, vocab_size=50),
        # the first shards, and the last
        Case(widths, dead=(0, 73)),
        Case(widths, dead=(76, 107)),
    ]


def evaluate(case: Case, rank: int, group: dist.ProcessGroup | None) -> dict[str, Any]:
    whole, start = case.problem(), sum(case.widths[:rank])
    leaf = whole.logits[:, start : start + case.widths[rank]].clone().requires_grad_()
    results, gradients = list[Tensor](), list[Tensor]()

    def forward() -> None:
        results[:] = vocab_parallel_logprobs(
            leaf, whole.targets, tp_group=group, with_entropy=True, backend="triton", **whole.options
        )

    def backward() -> None:
        gradients[:] = torch.autograd.grad(results, leaf, [whole.up, whole.up_entropy])

    with unchecked(), small_blocks():
        # the first call of a vocabulary exchanges the widths
        vocab_parallel_logprobs(
            leaf[:0], whole.targets[:0], tp_group=group, vocab_size=whole.options["vocab_size"], backend="triton"
        )
        counts = count_launches(forward), count_launches(backward)
    lp, entropy = (result.detach() for result in results)
    return {"lp": lp, "entropy": entropy, "gradient": gradients[0], "counts": counts}


def every_case(rank: int) -> dict[str, Any]:
    """Tensor parallelism over all four ranks where there are as many, over the first two of them, and none."""
    pair = dist.new_group([0, 1])
    found: dict[str, Any] = {"1": [evaluate(case, 0, None) for case in cases(1)]}
    if dist.get_world_size() == 4:
        found["4"] = [evaluate(case, rank, dist.group.WORLD) for case in cases(4)]
    if rank < 2:
        found["2"] = [evaluate(case, rank, pair) for case in cases(2)]
        found["refusal"] = refusal(rank, pair)
    return found


def refusal(rank: int, group: dist.ProcessGroup) -> str:
    """What ranks with unequal rows are told."""
    set_debug_checks(True)
    try:
        vocab_parallel_logprobs(
            torch.zeros(3 + rank, 4), torch.zeros(3 + rank, dtype=torch.int64), tp_group=group, backend="triton"
        )
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.fixture(
    scope="module",
    params=[pytest.param("gloo", marks=pytest.mark.interpreter), pytest.param("nccl", marks=pytest.mark.cuda)],
)
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    world = 4
    if request.param == "nccl":
        world = 4 if torch.cuda.device_count() >= 4 else 2
        if torch.cuda.device_count() < world:
            pytest.skip("needs two CUDA devices")
    return run_ranks(world, every_case, backend=request.param)


@pytest.fixture
def alone(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return ranks[0]["1"]


@pytest.fixture(params=[2, 4])
def results(request: pytest.FixtureRequest, ranks: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What each rank computed, per case."""
    world = request.param
    if world > len(ranks):
        pytest.skip(f"needs {world} CUDA devices")
    return [list(case) for case in zip(*(rank[str(world)] for rank in ranks[:world]), strict=True)]


def four_ulp(problem: Problem) -> Tensor:
    """[N] four fp32 ulp of max(|target logit|, |LSE|)."""
    temperature = problem.options.get("temperature", 1.0)
    z = problem.logits.double() / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    z = z[:, : problem.options["vocab_size"]]
    target = z.gather(1, problem.targets.clamp(0, z.shape[1] - 1)[:, None])[:, 0]
    size = torch.maximum(target.nan_to_num(0, 0, 0).abs(), z.logsumexp(1).nan_to_num(0, 0, 0).abs()).clamp(min=2**-20)
    return 4 * 2.0 ** (size.log2().floor() - 23)


def test_all_ranks_hold_the_same_bits(results: list[list[dict[str, Any]]]) -> None:
    for case in results:
        for rank in case[1:]:
            assert torch.equal(rank["lp"], case[0]["lp"]) and torch.equal(rank["entropy"], case[0]["entropy"])


def test_any_cut_equals_one_shard_within_four_ulp(
    results: list[list[dict[str, Any]]], alone: list[dict[str, Any]]
) -> None:
    for case, ranks, one in zip(cases(1), results, alone, strict=True):
        problem = case.problem()
        bound = four_ulp(problem)
        for name in ("lp", "entropy"):
            mine, expected = ranks[0][name].double(), one[name].double()
            finite = expected != -INF
            assert torch.equal(mine == -INF, ~finite)
            assert ((mine - expected)[finite].abs() <= bound[finite]).all()
        gradient = torch.cat([rank["gradient"] for rank in ranks], 1).double()
        expected = one["gradient"].double()
        assert gradient.shape == expected.shape and (gradient[expected == 0] == 0).all()
        # log p may differ as much as the log-prob, in each of the two terms
        size = 1 + problem.logits.double().nan_to_num(0, 0, 0).abs().amax(1)
        allowed = bound * (problem.up.abs() + problem.up_entropy.abs() * size) / temperatures(case)
        if case.dtype != torch.float32:
            allowed = allowed + ULP[case.dtype] * expected.abs().amax(1)
        assert ((gradient - expected).abs() <= allowed[:, None]).all()


def temperatures(case: Case) -> Any:
    return case.options.get("temperature", 1.0)


def test_forward_and_backward_equal_the_fp64_truth(results: list[list[dict[str, Any]]]) -> None:
    for case, ranks in zip(cases(1), results, strict=True):
        problem = case.problem()
        exact = solve_exactly(problem)
        with unchecked():
            pytorch = solve(problem, "torch")
        for mine, theirs, true in (
            (ranks[0]["lp"].double(), pytorch.logprobs, exact.logprobs),
            (ranks[0]["entropy"].double(), pytorch.entropy, exact.entropy),
        ):
            finite = true != -INF
            error = (mine - true)[finite].abs().max().item()
            assert error <= 2 * (theirs - true)[finite].abs().max().item() + four_ulp(problem).max().item()
        gradient = torch.cat([rank["gradient"] for rank in ranks], 1).double()
        rounding = 4 * 2**-23 if case.dtype == torch.float32 else ULP[case.dtype]
        torch.testing.assert_close(gradient, exact.gradient, atol=2e-5, rtol=rounding)


def test_two_launches_and_one_all_gather_forward_one_launch_backward(
    results: list[list[dict[str, Any]]], alone: list[dict[str, Any]]
) -> None:
    for case in results:
        for rank in case:
            forward, backward = rank["counts"]
            assert forward.kernels == ["row_statistics_fwd_kernel", "merge_statistics_fwd_kernel"]
            assert dict(forward.collectives) == {"_allgather_base_": 1}
            assert backward.kernels == ["row_gradient_bwd_kernel"] and not backward.collectives
            for counted in (forward, backward):
                assert not counted.operations and not counted.waits
    for one in alone:
        forward, backward = one["counts"]
        assert forward.kernels == ["row_statistics_fwd_kernel"] and not forward.collectives
        assert backward.kernels == ["row_gradient_bwd_kernel"]


def test_ranks_with_unequal_rows_are_told(ranks: list[dict[str, Any]]) -> None:
    assert [rank["refusal"] for rank in ranks[:2]] == [
        "the number of rows of logits must be equal on all ranks of tp_group, got [3, 4]"
    ] * 2
