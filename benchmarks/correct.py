"""What correct() costs: operations, waits for the device, memory and time, beside a padded implementation.

    python benchmarks/correct.py [--sequences 1000] [--length 1000] [--repeats 15] [--threads 2] [--ragged]

One million packed tokens in a thousand sequences, a sequence-level masked importance weight, a geometric gate, all
metrics. The padded implementation computes the same on [sequences, length] the way a training framework is usually
written: one masked mean a metric, one `.item()` a metric. Both are timed alternately in one run, after their answers
have been compared.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import checkout  # noqa: F401
import torch
from operations import OperationCount
from timing.recipe import CORRECTION, padded_correction
from torch import Tensor

from megatron_rc import Corrected, correct


def time_alternately(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of every repeat; one repeat of each, then the next."""
    for call in calls.values():
        call()
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            taken[name].append(1e3 * (time.perf_counter() - start))
    return taken


def lengths_of(arguments: argparse.Namespace) -> list[int]:
    if not arguments.ragged:
        return [arguments.length] * arguments.sequences
    cuts = torch.rand(arguments.sequences, generator=torch.Generator().manual_seed(1))
    lengths = (cuts / cuts.sum() * arguments.sequences * arguments.length).int().tolist()
    return [*lengths[:-1], arguments.sequences * arguments.length - sum(lengths[:-1])]


def check_same(found: Corrected, padded: tuple[Tensor, Tensor, dict[str, float]], inside: Tensor) -> None:
    weights, kept, metrics = padded
    torch.testing.assert_close(found.weights, weights[inside], rtol=1e-4, atol=1e-6)
    assert torch.equal(found.mask, kept[inside])
    values = found.metrics.values()
    for name, value in metrics.items():
        assert math.isclose(values[name], value, rel_tol=2e-3, abs_tol=1e-6), (name, values[name], value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=1000)
    parser.add_argument("--length", type=int, default=1000, help="tokens per sequence (on average with --ragged)")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ragged", action="store_true", help="random lengths: the padded side carries its padding")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    lengths = lengths_of(arguments)
    n = sum(lengths)
    generator = torch.Generator().manual_seed(0)
    rollout = -2 * torch.rand(n, generator=generator)
    train = rollout + 0.01 * torch.randn(n, generator=generator)
    mask = torch.rand(n, generator=generator) < 0.8
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    inside = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    grid = [torch.zeros(inside.shape, dtype=x.dtype).masked_scatter(inside, x) for x in (train, rollout, mask)]

    def packed() -> Corrected:
        return correct(train, rollout, mask, correction=CORRECTION, cu_seqlens=cu_seqlens)

    def packed_to_floats() -> dict[str, float]:
        return packed().metrics.values()

    def padded() -> tuple[Tensor, Tensor, dict[str, float]]:
        return padded_correction(*grid)

    check_same(packed(), padded(), inside)
    taken = time_alternately(
        {"packed": packed, "packed + values()": packed_to_floats, "padded": padded}, arguments.repeats
    )
    print(f"{n:,} tokens, {len(lengths):,} sequences, padded {list(inside.shape)}, {arguments.threads} threads")
    print(f"{'':20} {'operations':>10} {'with views':>10} {'waits':>6} {'median ms':>10} {'best ms':>8}")
    for name, call in (("packed", packed), ("packed + values()", packed_to_floats), ("padded", padded)):
        with OperationCount() as count:
            call()
        operations, views = sum(count.operations.values()), sum(count.views.values())
        # values() is one copy to the host, which a CPU tensor does not show as an operation
        waits = sum(count.waits.values()) + (name == "packed + values()")
        times = taken[name]
        print(
            f"{name:20} {operations:10} {operations + views:10} {waits:6} "
            f"{statistics.median(times):10.1f} {min(times):8.1f}"
        )
    pairs = zip(taken["padded"], taken["packed"], strict=True)
    print(f"padded / packed, median of {arguments.repeats} pairs: {statistics.median(a / b for a, b in pairs):.2f}")


if __name__ == "__main__":
    main()
