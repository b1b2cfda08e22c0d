"""What log-probs and an update ask of the device: launches, their shape, nothing besides them, and memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from loss_batch import grouped
from row_problems import small_blocks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rc import Corrected, MetricSums, RolloutCorrection, policy_loss, vocab_parallel_logprobs
from megatron_rc.backend import set_debug_checks
from megatron_rc.kernels import row_gradient, row_statistics
from speed.launches import Launches, count_launches, recorded_launches

pytestmark = pytest.mark.interpreter

FORWARD, BACKWARD = "row_statistics_fwd_kernel", "row_gradient_bwd_kernel"


@pytest.fixture(autouse=True)
def _unfilled_and_unchecked(no_debug_checks: None, small_rows: None) -> None:
    """Filling new memory and checking values are help of the tests' own."""
    torch.use_deterministic_algorithms(False)


def everything(rows: tuple[int, ...]) -> dict[str, Any]:
    """Temperature, mask and padding; tensors of two dimensions that no view makes flat."""
    temperature = torch.rand(rows[::-1]).mT + 0.5
    return {"temperature": temperature, "mask": torch.ones(rows[::-1]).mT, "vocab_size": 60, "with_entropy": True}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    ("rows", "options"), [((5,), lambda rows: {}), ((4, 3), everything)], ids=["one number", "every option, turned"]
)
def test_forward_is_one_launch_and_backward_another(
    rows: tuple[int, ...], options: Callable[[tuple[int, ...]], dict[str, Any]], inplace: bool
) -> None:
    leaf = torch.randn(*rows[::-1], 70).transpose(0, -2).bfloat16().requires_grad_()
    logits = leaf.view_as(leaf)
    targets = torch.zeros(rows[::-1], dtype=torch.int64).mT if len(rows) == 2 else torch.zeros(rows, dtype=torch.int64)
    given, results, ups = options(rows), list[Tensor](), list[Tensor]()

    def forward() -> None:
        found = vocab_parallel_logprobs(logits, targets, backend="triton", inplace_backward=inplace, **given)
        results.extend(found if isinstance(found, tuple) else [found])

    counted = count_launches(forward)
    assert counted.kernels == [FORWARD]
    assert not counted.operations and not counted.collectives and not counted.waits
    # of a mean, and of a sum over the first axis: one number each for several rows
    ups += [torch.tensor(0.25).expand(rows), torch.randn(rows[-1]).expand(rows)][: len(results)]
    counted = count_launches(lambda: torch.autograd.grad(results, logits, ups))
    assert counted.kernels == [BACKWARD]
    assert not counted.operations and not counted.collectives and not counted.waits


class NewMemory(TorchDispatchMode):
    """Bytes of every storage that first appears while active: none is given back before the end."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.storages[result.untyped_storage().data_ptr()] = result.untyped_storage()
        return result

    def total(self, *given: Tensor) -> int:
        known = {tensor.untyped_storage().data_ptr() for tensor in given}
        return sum(storage.nbytes() for place, storage in self.storages.items() if place not in known)


def test_log_probs_entropy_and_gradient_take_32_bytes_a_token_beyond_the_logits() -> None:
    rows = 16
    leaf = torch.randn(rows, 70).bfloat16().requires_grad_()
    logits = leaf.view_as(leaf)
    targets = torch.zeros(rows, dtype=torch.int64)
    options: Any = {"with_entropy": True, "inplace_backward": True, "backend": "triton"}
    with NewMemory() as memory:
        lp, entropy = vocab_parallel_logprobs(logits, targets, **options)
        forward = memory.total(logits, targets)
        # upstream gradients are two more numbers per token
        (gradient,) = torch.autograd.grad([lp, entropy], logits, [torch.ones_like(lp), torch.ones_like(entropy)])
    assert gradient.data_ptr() == logits.data_ptr()
    assert forward == 16 * rows
    assert memory.total(logits, targets) == 24 * rows


def test_rows_lie_on_the_first_axis_of_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    grids = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda **_: None

    monkeypatch.setattr(row_statistics, "row_statistics_fwd_kernel", Kernel())
    monkeypatch.setattr(row_gradient, "row_gradient_bwd_kernel", Kernel())
    logits = torch.zeros(70_000, 2, requires_grad=True)
    vocab_parallel_logprobs(logits, torch.zeros(70_000, dtype=torch.int64), backend="triton").sum().backward()
    # the second and the third axis end at 65,535
    assert grids == [(70_000,)] * 2


def test_a_launch_table_entry_is_read_when_a_kernel_is_launched() -> None:
    logits = torch.randn(1, 300, requires_grad=True)
    with small_blocks(64), recorded_launches() as launches:
        vocab_parallel_logprobs(logits, torch.zeros(1, dtype=torch.int64), backend="triton").sum().backward()
    forward, backward = (launch.arguments for launch in launches)
    assert forward["LANES"] * forward["VECTOR"] == backward["BLOCK"] == 64


def update(tp_group: dist.ProcessGroup | None, width: int) -> Launches:
    """The update pass of one micro-batch, after the group is warm: from logits to their gradient."""
    n = 6
    logits, scale, ones = torch.randn(n, width, requires_grad=True), torch.full((n,), 1 / n), torch.ones(n)
    targets, advantages, old = torch.arange(n) * 5, torch.linspace(-1, 1, n), torch.full((n,), -3.0)
    corrected = Corrected(ones, ones.bool(), torch.zeros(1, dtype=torch.bool), MetricSums(), RolloutCorrection())
    upstream = torch.tensor(0.5)

    def step() -> None:
        options = {"tp_group": tp_group, "with_entropy": True, "backend": "triton"}
        logprobs, entropy = vocab_parallel_logprobs(logits, targets, temperature=0.9, mask=ones, **options)
        terms = {"reference_logprobs": old, "kl_coef": 0.1, "entropy": entropy, "entropy_coef": 0.01}
        loss, _ = policy_loss(logprobs, old, advantages, corrected, scale=scale, backend="triton", **grouped(**terms))
        torch.autograd.grad(loss, logits, upstream)

    step()
    return count_launches(step)


def update_of_a_rank(rank: int) -> Launches:
    set_debug_checks(False)
    return update(dist.group.WORLD, 30 - 10 * rank)


def test_the_update_path_with_tensor_parallelism_is_one_more_launch_and_one_collective() -> None:
    for asked in run_ranks(2, update_of_a_rank):
        assert asked.total == 6 and not asked.operations, asked
        assert asked.collectives.total() == 1 and not asked.waits


def test_fills_and_copies_are_launches_and_allocations_are_not() -> None:
    def call() -> None:
        torch.zeros(3, 4).t().contiguous().view(-1).detach().copy_(torch.empty(12))

    assert count_launches(call).operations == {"zeros": 1, "clone": 1, "copy_": 1}
    assert count_launches(lambda: torch.ones(3).sum().item()).waits
