"""Rows about logits: log-probs, with or without entropy, and their gradient, ours beside every peer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from kernel_bench import OURS, Bench, Errors, Row, attempted, checked
from kernel_peers import Peer
from kernel_plan import Shape
from kernel_timing import Work
from torch import Tensor

_TRUTH_ELEMENTS = 2**27
"""Logits turned to fp64 at a time: 1 GiB a temporary."""
_LEAVES_ROUNDING = 1.5
"""A bf16 gradient may be this many times as far from fp64 as the rounded fp64 gradient is."""


class Rotation:
    """Two equal buffers of logits, used by turns; one that was overwritten is restored from the other."""

    def __init__(self, shape: Shape, bench: Bench) -> None:
        logits = torch.empty(shape.tokens, shape.columns, dtype=torch.bfloat16, device=bench.device)
        logits.normal_(0, 3, generator=bench.generator(shape.tokens))
        self._buffers, self._overwritten, self._last = (logits, logits.clone()), -1, 0

    def take(self, overwritten: bool) -> Tensor:
        """A leaf that requires a gradient, the buffer that was not taken last."""
        if self._overwritten >= 0:
            self._buffers[self._overwritten].copy_(self._buffers[1 - self._overwritten])
        self._last = 1 - self._last
        self._overwritten = self._last if overwritten else -1
        return self._buffers[self._last].detach().requires_grad_()

    @property
    def untouched(self) -> Tensor:
        """The same logits, whatever became of those taken last."""
        return self._buffers[1 - self._last]


class Upstream(NamedTuple):
    targets: Tensor
    grad_logprobs: Tensor
    grad_entropy: Tensor

    @classmethod
    def of(cls, shape: Shape, bench: Bench) -> Upstream:
        generator = bench.generator(shape.tokens + 1)
        targets = torch.randint(shape.columns, (shape.tokens,), device=bench.device, generator=generator)
        gradients = torch.randn(2, shape.tokens, device=bench.device, generator=generator)
        return cls(targets, *gradients)


@dataclass
class LogitsCall:
    """Forward and backward of one peer on rotating logits."""

    peer: Peer
    rotation: Rotation
    upstream: Upstream
    with_entropy: bool

    def prepare(self) -> None:
        self.logits: Tensor | None = self.rotation.take(self.peer.in_place)
        self.outputs: tuple[Tensor, Tensor | None] | None = None

    def forward(self) -> None:
        assert self.logits is not None
        self.outputs = self.peer.call(self.logits, self.upstream.targets, self.with_entropy)
        if not self.peer.differentiable:
            self.outputs = self.logits = None

    def backward(self) -> Tensor:
        """Nothing is kept: saved activations would still be held while the next provider runs."""
        assert self.logits is not None and self.outputs is not None
        logprobs, entropy = self.outputs
        outputs = [(logprobs, self.upstream.grad_logprobs)]
        if entropy is not None:
            outputs.append((entropy, self.upstream.grad_entropy))
        logits, self.logits, self.outputs = self.logits, None, None
        (gradient,) = torch.autograd.grad([o for o, _ in outputs], logits, [g for _, g in outputs])
        return gradient

    def errors(self) -> Errors:
        """Against fp64, everywhere: largest difference of log-probs and entropy, relative one of the gradient."""
        self.prepare()
        gradient = None
        if self.peer.differentiable:
            self.forward()
            assert self.outputs is not None
            found = [o.detach() for o in self.outputs if o is not None]
            gradient = self.backward()
        else:
            assert self.logits is not None
            found = [o for o in self.peer.call(self.logits, self.upstream.targets, False) if o is not None]
        return errors(self.rotation.untouched, self.upstream, found, gradient)

    def work(self) -> Work:
        phases = {"forward": self.forward}
        if self.peer.differentiable:
            phases["backward"] = self.backward  # type: ignore[assignment]
        return Work(phases, self.prepare)


def truth(logits: Tensor, upstream: Upstream, with_entropy: bool) -> tuple[list[Tensor], Tensor]:
    """([log-probs, entropy], gradient) of a few rows in fp64, by PyTorch's own autograd."""
    z = logits.double().requires_grad_()
    log_p = z.log_softmax(-1)
    outputs, gradients = [log_p.gather(1, upstream.targets[:, None])[:, 0]], [upstream.grad_logprobs.double()]
    if with_entropy:
        outputs.append(-(log_p.exp() * log_p).sum(1))
        gradients.append(upstream.grad_entropy.double())
    (gradient,) = torch.autograd.grad(outputs, z, gradients)
    return [output.detach() for output in outputs], gradient


class GradientError:
    """Distance of a gradient from fp64, added up a few rows at a time on the device."""

    def __init__(self, device: torch.device) -> None:
        self._squares = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, found: Tensor, expected: Tensor) -> None:
        apart = found - expected, expected.to(found.dtype) - expected, expected
        self._squares += torch.stack([part.square().sum() for part in apart])

    def result(self) -> Errors:
        off, rounding, size = self._squares.sqrt().tolist()
        return {"gradient": off / size, "gradient_over_rounding": off / rounding}


def row_slices(logits: Tensor, rows: int | None = None) -> Iterator[slice]:
    """The rows (the first `rows` of them), as many at a time as fit in fp64."""
    rows, step = len(logits) if rows is None else rows, max(1, _TRUTH_ELEMENTS // logits.shape[1])
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def errors(logits: Tensor, upstream: Upstream, found: list[Tensor], gradient: Tensor | None) -> Errors:
    worst = torch.zeros(len(found), dtype=torch.float64, device=logits.device)
    distance = GradientError(logits.device)
    for span in row_slices(logits, len(found[0])):
        expected, slope = truth(logits[span], Upstream(*(part[span] for part in upstream)), len(found) > 1)
        far = [(f[span] - e).abs().max() for f, e in zip(found, expected, strict=True)]
        # maximum keeps NaN
        worst = torch.maximum(worst, torch.stack(far))
        if gradient is not None:
            distance.add(gradient[span], slope)
    result = dict(zip(("logprobs", "entropy"), worst.tolist(), strict=False))
    return result if gradient is None else result | distance.result()


PEER_TOLERANCE = {"logprobs": 1e-2, "entropy": 1e-2, "gradient": 2e-2}
"""A peer is beaten on time when it answers right for its purpose, however it rounds."""


def tolerance(bench: Bench) -> Errors:
    """Of ours. Where a GPU rounds fp32 to the nearest bf16, the interpreter cuts it off: one unit in the last place."""
    gradient = {"gradient_over_rounding": _LEAVES_ROUNDING} if bench.meter.measures else {"gradient": 2.0**-7}
    return {"logprobs": 1e-4, "entropy": 1e-4, "loss": 1e-4, **gradient}


def logits_rows(bench: Bench, shape: Shape, peers: list[Peer], first_of_width: bool) -> list[Row]:
    """One row for log-probs alone, one for log-probs and entropy.

    Args:
        first_of_width: count launches, and let compilers forget other widths: they specialise on that of this one.
    """
    if first_of_width:
        torch._dynamo.reset()
    rotation, upstream = Rotation(shape, bench), Upstream.of(shape, bench)
    rows = []
    for with_entropy in (False, True):
        fitting = [p for p in peers if p.entropy or not with_entropy]
        calls = {p.name: LogitsCall(p, rotation, upstream, with_entropy) for p in fitting}
        providers = {}
        for name, call in calls.items():
            bounds = tolerance(bench) if name.startswith("megatron_rc") else PEER_TOLERANCE
            providers[name] = checked(call.errors, bounds)
            bench.free()
        able = {name: call.work() for name, call in calls.items() if providers[name]["state"] == "ran"}
        for name, work in able.items():
            attempted(providers[name], lambda work=work: bench.meter.extra_bytes(work))  # type: ignore[misc]
            if name == OURS:
                attempted(providers[name], lambda work=work: bench.meter.moved_bytes(work))  # type: ignore[misc]
            if first_of_width:
                attempted(providers[name], lambda work=work: bench.meter.launches(work))  # type: ignore[misc]
        for name, figures in bench.meter.interleaved(able).items():
            providers[name]["measured"].update(figures)
        for peer in fitting:
            providers[peer.name] |= {"vocab_parallel": peer.vocab_parallel, "in_place": peer.in_place}
        rows.append(
            {
                "name": f"log-probs{', entropy' * with_entropy}, {shape.tokens:,} x {shape.columns:,} (TP {shape.tp})",
                "kind": "logits",
                "outputs": "logprobs, entropy" if with_entropy else "logprobs",
                **shape._asdict(),
                "columns": shape.columns,
                "providers": providers,
            }
        )
    return rows
