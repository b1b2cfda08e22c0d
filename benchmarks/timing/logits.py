"""Rows about logits: log-probs, with or without entropy, and their gradient, ours beside every peer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from timing import counting
from timing.bench import OURS, Bench, Errors, Row
from timing.meter import Work
from timing.peers import Peer, ours
from timing.plan import Condition, Shape

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
    """What the rows are asked for, and the gradients that come back to them."""

    targets: Tensor
    grad_logprobs: Tensor
    """0 where a row does not count."""
    grad_entropy: Tensor
    keep: Tensor
    """[tokens] bool: rows that count."""
    temperature: float = 1.0

    @classmethod
    def of(cls, shape: Shape, bench: Bench, *, masked: float = 0.0, temperature: float = 1.0) -> Upstream:
        generator = bench.generator(shape.tokens + 1)
        targets = torch.randint(shape.columns, (shape.tokens,), device=bench.device, generator=generator)
        gradients = torch.randn(2, shape.tokens, device=bench.device, generator=generator)
        # exactly that share: how many bytes move must be known
        order = torch.rand(shape.tokens, device=bench.device, generator=generator).argsort()
        keep = order >= round(masked * shape.tokens)
        grad_logprobs, grad_entropy = gradients * keep
        return cls(targets, grad_logprobs, grad_entropy, keep, temperature)

    def rows(self, span: slice) -> Upstream:
        targets, grad_logprobs, grad_entropy, keep = (part[span] for part in self[:4])
        return Upstream(targets, grad_logprobs, grad_entropy, keep, self.temperature)


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
    log_p = (z / upstream.temperature).log_softmax(-1)
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
        rows = upstream.rows(span)
        expected, slope = truth(logits[span], rows, len(found) > 1)
        far = [(f[span] - e).abs().where(rows.keep[: len(e)], 0).max() for f, e in zip(found, expected, strict=True)]
        # maximum keeps NaN
        worst = torch.maximum(worst, torch.stack(far))
        if gradient is not None:
            distance.add(gradient[span], slope)
    result = dict(zip(("logprobs", "entropy"), worst.tolist(), strict=False))
    return result if gradient is None else result | distance.result()


PEER_TOLERANCE = {"logprobs": 1e-2, "entropy": 1e-2, "gradient": 2e-2}
"""A peer is beaten on time when it answers right for its purpose, however it rounds."""


def tolerance(bench: Bench) -> Errors:
    """Errors allowed: where a GPU rounds to bf16 the interpreter truncates, by one unit in the last place."""
    gradient = {"gradient_over_rounding": _LEAVES_ROUNDING} if bench.meter.measures else {"gradient": 2.0**-7}
    return {"logprobs": 1e-4, "entropy": 1e-4, "loss": 1e-4, **gradient}


def conditioned(peer: Peer, upstream: Upstream) -> Peer:
    """The peer as it is called under a mask and a temperature: others than ours know neither."""
    if peer.name.startswith("megatron_rc"):
        mask = None if upstream.keep.all() else upstream.keep
        return ours(peer.name.split()[-1], mask=mask, temperature=upstream.temperature)
    if upstream.temperature == 1:
        return peer
    # in bf16 the quotients would be rounded by more than a log-prob may be off
    return peer._replace(call=lambda logits, *rest: peer.call(logits.float() / upstream.temperature, *rest))


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
        providers = _measured(bench, rotation, upstream, peers, with_entropy=with_entropy, counted=first_of_width)
        name = f"log-probs{', entropy' * with_entropy}, {shape.tokens:,} x {shape.columns:,} (TP {shape.tp})"
        rows.append({"name": name, "kind": "logits"} | _facts(shape, with_entropy) | {"providers": providers})
    return rows


def condition_row(bench: Bench, condition: Condition, peers: list[Peer]) -> Row:
    """Log-probs alone, which every peer answers, under one condition."""
    torch._dynamo.reset()
    shape = condition.shape
    upstream = Upstream.of(shape, bench, masked=condition.masked, temperature=condition.temperature)
    peers = [conditioned(peer, upstream) for peer in peers]
    providers = _measured(bench, Rotation(shape, bench), upstream, peers, with_entropy=False, counted=True)
    facts = {"kind": "condition", "condition": condition.name, "counted_rows": int(upstream.keep.sum())}
    return facts | _facts(shape, False) | {"providers": providers}


def _facts(shape: Shape, with_entropy: bool) -> Row:
    outputs = "logprobs, entropy" if with_entropy else "logprobs"
    return {"outputs": outputs, **shape._asdict(), "columns": shape.columns}


def _measured(
    bench: Bench, rotation: Rotation, upstream: Upstream, peers: list[Peer], *, with_entropy: bool, counted: bool
) -> dict[str, Row]:
    """Every peer that answers this, checked, then measured."""
    fitting = [peer for peer in peers if peer.entropy or not with_entropy]
    calls = {peer.name: LogitsCall(peer, rotation, upstream, with_entropy) for peer in fitting}
    providers = {}
    for name, call in calls.items():
        bounds = tolerance(bench) if name.startswith("megatron_rc") else PEER_TOLERANCE
        providers[name] = bench.checked(name, call.errors, bounds)
        bench.free()
    able = {name: call.work() for name, call in calls.items() if providers[name]["state"] == "ran"}
    for name, work in able.items():
        row = providers[name]
        bench.attempted(name, row, lambda work=work: bench.meter.extra_bytes(work))  # type: ignore[misc]
        if name == OURS:
            bench.attempted(name, row, lambda work=work: counting.moved_bytes(bench.meter, work))  # type: ignore[misc]
        if counted:
            bench.attempted(name, row, lambda work=work: counting.launches(bench.meter, work))  # type: ignore[misc]
    bench.timed(providers, able)
    for peer in fitting:
        providers[peer.name] |= {"vocab_parallel": peer.vocab_parallel, "in_place": peer.in_place}
    return providers
