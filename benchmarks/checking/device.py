"""What a device adds to the mathematics: the same bits again, graphs, streams, no waiting, other devices, compilers."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from checking import correction, head, loss
from checking.calls import CALLS, Make, Results
from checking.rows import problem
from checking.setting import Check, Comparison, Setting, Skip, poisoned
from megatron_rc import RolloutCorrection, correct, policy_loss, vocab_parallel_logprobs

_ROUNDS = 30


def checks(setting: Setting) -> Iterator[Check]:
    for name, make in CALLS.items():
        yield Check("repeated", f"{name}: the same bits twice", partial(_repeated, make))
        yield Check("graphs", f"{name}: captured once, replayed on other data", partial(_graph, make))
        yield Check("streams", f"{name}: on two streams at once", partial(_streams, make))
        yield Check("waits", f"{name}: never waits for the device", partial(_waits, make))
        yield Check("devices", f"{name}: on a device that is not the current one", partial(_other_device, make))
    yield Check("repeated", "a row alone has the bits that it has among others", _row_alone)
    yield Check("repeated", "a sequence has the same weight anywhere in a batch", _sequence_elsewhere)
    yield Check("autograd", "checkpointed: the same gradient", _checkpointed)
    yield Check("autograd", "under autocast: the same bits", _autocast)
    yield Check("torch.compile", "log-probs and their gradient", _compiled_rows)
    yield Check("torch.compile", "correction, loss and its gradient", _compiled_loss)
    for form in head.FORMS:
        yield Check("torch.compile", f"{form} and its gradients", partial(_compiled_head, form))
    yield Check("variants", "ragged batches of a correction compile nothing anew", _variants_of_correction)
    yield Check("variants", "slices of rows compile at most 8 variants of a kernel", _variants_of_rows)


def _same(comparison: Comparison, found: list[Tensor], expected: list[Tensor]) -> None:
    for index, (ours, true) in enumerate(zip(found, expected, strict=True)):
        comparison.equal(f"result {index}", ours, true)


def _repeated(make: Make, setting: Setting, comparison: Comparison) -> None:
    call = make(setting, 0)
    with poisoned():
        first = call.run().bits()
        _same(comparison, call.run().bits(), first)


def _graph(make: Make, setting: Setting, comparison: Comparison) -> None:
    setting.need_cuda()
    call = make(setting, 0)
    stream = torch.cuda.Stream(setting.device)
    stream.wait_stream(torch.cuda.current_stream(setting.device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            call.run()
    torch.cuda.synchronize(setting.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call.run()
    for seed in (1, 2):
        other = make(setting, seed)
        call.refill(other)
        graph.replay()
        found = results.bits()
        _same(comparison, found, other.run().bits())


def _streams(make: Make, setting: Setting, comparison: Comparison) -> None:
    setting.need_cuda()
    calls = [make(setting, seed) for seed in (1, 2)]
    expected = [call.run().bits() for call in calls]
    torch.cuda.synchronize(setting.device)
    streams = [torch.cuda.Stream(setting.device) for _ in calls]
    found: list[list[Results]] = [[], []]
    for _ in range(setting.size(10, 2)):
        for call, stream, results in zip(calls, streams, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(call.run())
    torch.cuda.synchronize(setting.device)
    for results, true in zip(found, expected, strict=True):
        _same(comparison, results[0].bits(), true)
        _same(comparison, results[-1].bits(), true)


def _waits(make: Make, setting: Setting, comparison: Comparison) -> None:
    setting.need_cuda()
    call = make(setting, 0)
    call.run()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call.run()
        comparison.true("no call that waits", True)
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _other_device(make: Make, setting: Setting, comparison: Comparison) -> None:
    setting.need_devices(2)
    if len({torch.cuda.get_device_name(index) for index in (0, 1)}) > 1:
        raise Skip("needs two devices of one kind")
    here, there = (torch.device("cuda", index) for index in (0, 1))
    with torch.cuda.device(here):
        expected = make(setting.on(here), 0).run().bits()
        found = make(setting.on(there), 0).run().bits()
    _same(comparison, [part.cpu() for part in found], [part.cpu() for part in expected])


def _row_alone(setting: Setting, comparison: Comparison) -> None:
    given = problem(setting, torch.bfloat16, setting.size(300, 6), setting.size(9500, 40), "alone")
    options: dict[str, Any] = {"with_entropy": True, "backend": "triton"}
    together = vocab_parallel_logprobs(given.logits, given.targets, **options)
    for span in (slice(0, 1), slice(3, 4), slice(1, 6)):
        alone = vocab_parallel_logprobs(given.logits[span], given.targets[span], **options)
        _same(comparison, list(alone), [part[span] for part in together])


def _sequence_elsewhere(setting: Setting, comparison: Comparison) -> None:
    lengths = setting.size([1700, 900, 2100], [9, 5])
    batch = correction.batch_of(setting, lengths, "elsewhere")
    chosen = RolloutCorrection.preset("seq-tis")
    together = batch.correct(chosen, "triton").weights
    for part, (first, behind) in zip(
        together.split(lengths), itertools.pairwise([0, *itertools.accumulate(lengths)]), strict=True
    ):
        here = slice(first, behind)
        cu_seqlens = torch.tensor([0, behind - first], dtype=torch.int32, device=setting.device)
        alone = correct(
            batch.train[here], batch.rollout[here], batch.mask[here], correction=chosen, cu_seqlens=cu_seqlens,
            backend="triton",
        )  # fmt: skip
        comparison.equal(f"tokens {first} to {behind}", alone.weights, part)


def _gradient(setting: Setting, wrap: Callable[..., Any]) -> list[Tensor]:
    given = problem(setting, torch.bfloat16, *setting.size((300, 9500), (2, 40)), "wrapped")
    leaf = given.logits.clone().requires_grad_()

    def head(logits: Tensor) -> Tensor:
        logprobs, entropy = vocab_parallel_logprobs(logits * 1, given.targets, with_entropy=True, backend="triton")
        return (logprobs + 0.1 * entropy).sum()

    value = wrap(head, leaf)
    value.backward()
    assert leaf.grad is not None
    return [value.detach(), leaf.grad]


def _plain(head: Callable[[Tensor], Tensor], leaf: Tensor) -> Tensor:
    return head(leaf)


def _checkpointed(setting: Setting, comparison: Comparison) -> None:
    expected = _gradient(setting, _plain)
    for reentrant in (False, True):
        found = _gradient(setting, lambda head, leaf, r=reentrant: checkpoint(head, leaf, use_reentrant=r))
        _same(comparison, found, expected)


def _autocast(setting: Setting, comparison: Comparison) -> None:
    def wrap(head: Callable[[Tensor], Tensor], leaf: Tensor) -> Tensor:
        with torch.autocast(setting.device.type, dtype=torch.bfloat16):
            return head(leaf)

    _same(comparison, _gradient(setting, wrap), _gradient(setting, _plain))


def _compiled_rows(setting: Setting, comparison: Comparison) -> None:
    setting.need_cuda()
    found = _gradient(setting, lambda head, leaf: torch.compile(head)(leaf))
    _nearly_the_same(comparison, found, _gradient(setting, _plain))


def _compiled_loss(setting: Setting, comparison: Comparison) -> None:
    """The correction and the loss in one compiled function, as a training step would have them."""
    setting.need_cuda()
    batch = loss.batch_of(setting, setting.size(30_000, 40), "compiled")
    t = batch.tensors
    old, rollout = t["old"], t["reference"]
    cu_seqlens = torch.tensor([0, 7, 7, len(old)], dtype=torch.int32, device=setting.device)
    chosen = RolloutCorrection.preset("seq-tis")

    def step(current: Tensor) -> Tensor:
        answer = correct(old, rollout, t["mask"], correction=chosen, cu_seqlens=cu_seqlens, backend="triton")
        return policy_loss(current, old, t["advantages"], answer, scale=t["scale"], backend="triton").loss

    def gradient(step: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaf = t["current"].clone().requires_grad_()
        value = step(leaf)
        value.backward()
        assert leaf.grad is not None
        return [value.detach(), leaf.grad]

    _nearly_the_same(comparison, gradient(torch.compile(step)), gradient(step))


def _compiled_head(form: str, setting: Setting, comparison: Comparison) -> None:
    """The head between operations of a compiled function, which goes back to Python around it."""
    setting.need_cuda()
    given = head.head_of(setting, torch.float32, "compiled")

    def step(hidden: Tensor, weight: Tensor) -> Tensor:
        return 2 * head.loss_of(given, form, 1.5 * hidden, weight)

    def gradients(step: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        leaves = [part.clone().requires_grad_() for part in (given.hidden, given.weight)]
        value = step(*leaves)
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    _nearly_the_same(comparison, gradients(torch.compile(step)), gradients(step))


def _nearly_the_same(comparison: Comparison, found: list[Tensor], expected: list[Tensor]) -> None:
    for index, (ours, true) in enumerate(zip(found, expected, strict=True)):
        # the operations around a kernel may be fused, and then round otherwise
        size = true.double().abs().max().item()
        comparison.close(f"result {index}", ours, true, true.double(), epsilon=1e-6 * size)


def _variants_of_correction(setting: Setting, comparison: Comparison) -> None:
    setting.need_cuda()
    chosen = RolloutCorrection.preset("geo-mask-token-tis")

    def run(round_: int) -> None:
        lengths = [7 * round_ + 1, 0, 300 + round_, 16 * round_]
        correction.batch_of(setting, lengths, round_).correct(chosen, "triton")
        loss.evaluate(loss.batch_of(setting, sum(lengths)), "triton")

    run(1)
    before = compiled_variants()
    for round_ in range(2, _ROUNDS):
        run(round_)
    after = compiled_variants()
    comparison.at_most("variants compiled anew", float(sum(after.values()) - sum(before.values())), 0)


def _variants_of_rows(setting: Setting, comparison: Comparison) -> None:
    setting.need_cuda()
    before = compiled_variants()
    given = problem(setting, torch.bfloat16, 400, 640, "variants")
    assert given.up is not None
    for first in range(_ROUNDS):
        span = slice(first, first + 37 + 3 * first)
        leaf = given.logits[span].clone().requires_grad_()
        temperature = torch.ones(400, device=setting.device)[span]
        logprobs = vocab_parallel_logprobs(leaf, given.targets[span], temperature=temperature, backend="triton")
        torch.autograd.grad(logprobs, leaf, given.up[span])
    grown = max(count - before.get(kernel, 0) for kernel, count in compiled_variants().items())
    comparison.at_most("variants of one kernel", float(grown), 8)


def compiled_variants() -> dict[str, int]:
    """How often each kernel was compiled in this process."""
    from triton.runtime.jit import JITFunction

    from megatron_rc.kernels import launch_table

    found = {}
    for path in sorted(Path(launch_table.__file__).parent.glob("*.py")):
        module = importlib.import_module(f"megatron_rc.kernels.{path.stem}")
        for name, kernel in vars(module).items():
            if isinstance(kernel, JITFunction) and name.endswith("_kernel"):
                found[name] = sum(len(caches[0]) for caches in kernel.device_caches.values())
    return found
