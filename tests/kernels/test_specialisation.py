"""Launches: on the device of their tensors, and of kernels that are compiled already whatever the batch."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import aot
import pytest
import torch
from correction_cases import Case, case, correct
from kernel_calls import CALLS, EVERY_LEVEL, SMALL
from logprobs_truth import unchecked
from loss_batch import grouped
from tested_kernels import kernel_names
from torch import Tensor

from megatron_rc import Corrected, MetricSums, Rejection, RolloutCorrection, policy_loss, vocab_parallel_logprobs
from megatron_rc.batch import Support
from megatron_rc.kernels import device
from megatron_rc.logprobs import backends
from megatron_rc.logprobs.reference.rows import Rows
from speed import launches

OWN_GATE = RolloutCorrection(reject=(Rejection("own", "token", upper=0.0),))
VOCABULARY = 64


def sliced(values: Tensor, draw: random.Random) -> Tensor:
    """The values at a random address."""
    start = draw.randrange(1, 16)
    return torch.cat([values[:1].expand(start, *values.shape[1:]), values])[start:]


def logprobs(count: int, draw: random.Random) -> None:
    """With every argument that a row can have, and then over kept ids."""
    logits = torch.zeros(count + draw.randrange(4), VOCABULARY, dtype=torch.bfloat16)[-count:].requires_grad_()
    per_row = {"temperature": sliced(torch.ones(count), draw), "mask": sliced(torch.ones(count), draw)}
    targets = sliced(torch.zeros(count, dtype=torch.int64), draw)
    support = Support(sliced(torch.arange(8).repeat(count), draw), sliced(torch.arange(count + 1) * 8, draw))
    for options in ({}, {"support": support}):
        found = vocab_parallel_logprobs(logits, targets, with_entropy=True, backend="triton", **per_row, **options)
        torch.autograd.grad(found, logits, [sliced(torch.ones(count), draw) for _ in found])


def merged(count: int, draw: random.Random) -> None:
    targets, mask = sliced(torch.zeros(count, dtype=torch.int64), draw), sliced(torch.ones(count), draw)
    rows = Rows(targets, 1.0, mask, None, None, 0, VOCABULARY)
    gathered = torch.zeros(draw.choice([2, 3, 4, 8, 16]), 4, count)
    backends.computing("triton").merge_shards(gathered, rows, with_entropy=True)


def packed(count: int, draw: random.Random) -> Case:
    batch = case([draw.randrange(count + 1) for _ in range(draw.randrange(1, 9))] + [2])
    return replace(batch, **{name: sliced(getattr(batch, name), draw) for name in ("train", "rollout", "mask")})


def corrections(count: int, draw: random.Random) -> None:
    batch = packed(count, draw)
    correct(*batch.arguments, correction=EVERY_LEVEL, backend="triton", **batch.options)


def own_rows(count: int, draw: random.Random) -> None:
    """Statistics lie in a tuple, whose parts Triton always specialises on their alignment."""
    batch = packed(count, draw)
    batch.statistics["own"] = sliced(batch.train, draw)
    sampling = sliced(batch.rollout, draw)
    correct(*batch.arguments, correction=OWN_GATE, backend="triton", sampling_logprobs=sampling, **batch.options)


def losses(count: int, draw: random.Random) -> None:
    current, old, advantages, weights, reference, entropy, scale = (sliced(torch.zeros(count), draw) for _ in range(7))
    mask = sliced(torch.ones(count, dtype=torch.bool), draw)
    corrected = Corrected(weights, mask, torch.zeros(1, dtype=torch.bool), MetricSums(), RolloutCorrection())
    terms: dict[str, Any] = {"reference_logprobs": reference, "kl_coef": 0.1, "entropy": entropy, "entropy_coef": 0.1}
    current.requires_grad_()
    loss, _ = policy_loss(current, old, advantages, corrected, scale=scale, backend="triton", **grouped(**terms))
    loss.backward()


def kinds(step: Callable[[int, random.Random], None]) -> dict[str, set[str]]:
    """Kernel -> what Triton would compile it for, over batches of random sizes and addresses."""
    draw, found = random.Random(0), defaultdict(set)

    def calls() -> None:
        for _ in range(24):
            step(draw.choice([1, 16, draw.randrange(2, 400)]), draw)

    with unchecked():
        for launch in aot.captured(calls).launches:
            found[launch.name].add(aot.natural(launch, aot.ONE_TARGET).key)
    return found


@pytest.mark.parametrize("step", [logprobs, merged, corrections, own_rows, losses])
def test_no_length_and_no_address_of_a_batch_compiles_a_kernel_anew(step: Callable[[int, random.Random], None]) -> None:
    found = kinds(step)
    assert found and {name: len(keys) for name, keys in found.items() if len(keys) > 1} == {}


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, tuple):
            yield from tensors_in(value)
        elif isinstance(value, Tensor):
            yield value


def test_a_launch_is_guarded_by_the_device_of_a_tensor_that_kernels_touch(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[Tensor] = []
    guards: dict[str, list[Tensor]] = {}
    touched: list[Tensor] = []
    real = launches.Launch

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        current.append(tensor)
        yield
        current.pop()

    def launch(kernel: Any, *rest: Any) -> launches.Launch:
        one = real(kernel, *rest)
        guards.setdefault(one.name, []).extend(current[-1:] or [torch.empty(1)])
        touched.extend(tensors_in(one.arguments.values()))
        return one

    monkeypatch.setattr(device, "device_of", device_of)
    monkeypatch.setattr(launches, "Launch", launch)
    aot.captured(lambda: [call(SMALL, 0).run("triton") for call in CALLS.values()])
    assert set(guards) == set(kernel_names())
    memory = {tensor.untyped_storage().data_ptr() for tensor in touched}
    strangers = {n for n, given in guards.items() for one in given if one.untyped_storage().data_ptr() not in memory}
    assert strangers == set()
    assert not current
