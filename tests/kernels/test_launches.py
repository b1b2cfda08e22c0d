"""How many times the package starts work on the device: kernels, fills, copies and collectives."""

import pytest
import torch
import torch.distributed as dist
from correction_book import case
from distributed import run_ranks
from extras import correct
from grouped import grouped
from kernel_calls import EVERY_LEVEL

from megatron_rc.backend import set_debug_checks
from megatron_rc.correction.correct import Corrected
from megatron_rc.correction.metrics import MetricSums
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.logprobs.logits import vocab_parallel_logprobs
from megatron_rc.loss.policy_loss import policy_loss
from speed.launches import Launches, count_launches

pytestmark = pytest.mark.interpreter


@pytest.fixture(autouse=True)
def _as_outside_of_tests(no_debug_checks: None) -> None:
    # filling torch.empty with NaN is for tests of values
    torch.use_deterministic_algorithms(False)


def test_the_number_of_launches_does_not_depend_on_the_data() -> None:
    asked = []
    for lengths in ([7, 5], [1] * 20, [50, 0, 2]):
        batch = case(lengths)
        call = {"correction": EVERY_LEVEL, "backend": "triton", **batch.options}
        asked.append(count_launches(lambda batch=batch, call=call: correct(*batch.arguments, **call)).kernels)
    assert asked[0] and asked[0] == asked[1] == asked[2]


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
