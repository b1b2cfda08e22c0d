"""Cases about logits: log-probs, entropy, and what is made of them, with the gradient of the logits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rc import vocab_parallel_logprobs
from megatron_rc.batch import Support
from speed.meter import Call, Figures, Meter, both_passes
from speed.peers import EAGER, Peers, eager
from speed.tokens import BACKENDS, Batch, Shape

Path = Callable[[Tensor], tuple[Tensor, ...]]
"""Logits -> outputs, each [N] or a sum over rows."""

_AT_A_TIME = 2**27
"""Logits turned to fp64 at a time: 1 GiB per temporary."""


def row_slices(rows: int, columns: int) -> Iterator[slice]:
    """As many rows at a time as fit in fp64."""
    step = max(1, _AT_A_TIME // columns)
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


@dataclass
class Problem:
    """Logits, the gradient that comes back to the outputs, and the outputs in fp64."""

    source: Tensor
    upstream: list[Tensor]
    exact: Callable[[Tensor, slice], tuple[Tensor, ...]]
    """(fp64 logits of some rows, which rows) -> their outputs, through PyTorch's own autograd."""
    keep: Tensor | None = None
    """[N] bool: rows that count."""

    def __post_init__(self) -> None:
        self._work = self.source.clone()

    @classmethod
    def of(cls, meter: Meter, shape: Shape, *given: Any) -> "Problem":
        logits = torch.empty(shape.tokens, shape.columns, dtype=torch.bfloat16, device=meter.device)
        return cls(logits.normal_(0, 3, generator=meter.new(shape.tokens)["generator"]), *given)

    def call(self, path: Path) -> Call:
        """On a buffer that is restored before every call, since the gradient may be in place."""

        def leaves() -> list[Tensor]:
            self._work.copy_(self.source)
            return [self._work.detach().requires_grad_()]

        return both_passes(leaves, path, self.upstream, self.distance)

    def distance(self, found: list[Tensor], gradients: tuple[Tensor, ...]) -> Figures:
        """The largest difference of rows, or the relative one of a sum; that of the gradient, relative and in units of
        what rounding the exact gradient does."""
        (gradient,), per_row = gradients, found[0].dim() > 0
        total = torch.zeros(len(found), dtype=torch.float64, device=self.source.device)
        squares = torch.zeros(3, dtype=torch.float64, device=self.source.device)
        for rows in row_slices(*self.source.shape):
            z = self.source[rows].double().requires_grad_()
            exact = self.exact(z, rows)
            back = [part[rows].double() if per_row else part.double() for part in self.upstream]
            (slope,) = torch.autograd.grad(exact, z, back)
            apart = gradient[rows] - slope, slope.to(gradient.dtype) - slope, slope
            squares += torch.stack([part.square().sum() for part in apart])
            if per_row:
                far = torch.stack([(f[rows] - e).detach().abs() for f, e in zip(found, exact, strict=True)])
                # amax and maximum keep NaN
                far = far if self.keep is None else far.where(self.keep[rows], 0)
                total = torch.maximum(total, far.amax(1))
            else:
                total += torch.stack(exact).detach()
        if not per_row:
            total = (torch.stack(found) - total).abs() / total.abs()
        off, rounding, size = squares.sqrt().tolist()
        names = ("logprobs", "entropy") if per_row else ("loss",)
        figures = dict(zip(names, total.tolist(), strict=False))
        return figures | {"gradient": off / size, "gradient_over_rounding": off / rounding}


def ours(backend: str, targets: Tensor, with_entropy: bool, **options: Any) -> Path:
    def path(logits: Tensor) -> tuple[Tensor, ...]:
        given: dict[str, Any] = {"with_entropy": with_entropy, "inplace_backward": True, "backend": backend} | options
        answer = vocab_parallel_logprobs(logits.view_as(logits), targets, **given)
        return answer if isinstance(answer, tuple) else (answer,)

    return path


def logprobs(shape: Shape, with_entropy: bool, peers: Peers, meter: Meter) -> dict[str, Call]:
    """Log-probs, with or without entropy. Peers get what they know: fp32 logits / temperature, and every row."""
    torch._dynamo.reset()
    batch, asked = Batch(meter, shape), 1 + with_entropy
    upstream = torch.randn(2, shape.tokens, **meter.new(shape.tokens + 2)) * batch.keep

    def exact(z: Tensor, rows: slice) -> tuple[Tensor, ...]:
        return eager(z / shape.temperature, batch.targets[rows], with_entropy)[:asked]

    def theirs(call: Callable[..., tuple[Tensor, ...]], logits: Tensor) -> tuple[Tensor, ...]:
        # in bf16 the quotients would be rounded by more than a log-prob may be off
        logits = logits if shape.temperature == 1 else logits.float() / shape.temperature
        return call(logits, batch.targets, with_entropy)[:asked]

    problem = Problem.of(meter, shape, list(upstream)[:asked], exact, batch.keep)
    options = {"mask": batch.keep if shape.masked else None, "temperature": shape.temperature}
    paths = {name: ours(backend, batch.targets, with_entropy, **options) for name, backend in BACKENDS.items()}
    able = peers.rows(entropy=with_entropy, sharded=shape.tp > 1)
    paths |= {peer.name: partial(theirs, peer.call) for peer in able}
    return {name: problem.call(path) for name, path in paths.items()}


def kept_ids(shape: Shape, most: int, meter: Meter) -> dict[str, Call]:
    """Log-probs and entropy over the 1 to `most` kept ids of a truncated sampler, beside a dense mask."""
    new = meter.new(shape.tokens + 2)
    counts = 1 + torch.arange(shape.tokens, device=meter.device) % most
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    row_of = torch.arange(shape.tokens, device=meter.device).repeat_interleave(counts)
    within = torch.arange(len(row_of), device=meter.device) - offsets[row_of]
    # steps that never come back to the start: ids are distinct within a token
    start = torch.randint(shape.columns, (shape.tokens,), **new)[row_of]
    ids = (start + within * max(1, shape.columns // most)) % shape.columns
    targets, support = ids[offsets[:-1] + counts // 2], Support(ids, offsets)
    kept = torch.zeros(shape.tokens, shape.columns, dtype=torch.bool, device=meter.device)
    kept[row_of, ids] = True

    def dense(logits: Tensor, rows: slice = slice(None)) -> tuple[Tensor, ...]:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).masked_fill(~kept[rows], -torch.inf)
        log_p = wide.log_softmax(-1)
        entropy = -(log_p.exp() * log_p.masked_fill(~kept[rows], 0)).sum(-1)
        return log_p.gather(-1, targets[rows][:, None])[:, 0], entropy

    problem = Problem.of(meter, shape, list(torch.randn(2, shape.tokens, **new)), dense)
    paths = {name: ours(backend, targets, True, support=support) for name, backend in BACKENDS.items()}
    return {name: problem.call(path) for name, path in (paths | {"dense mask": dense}).items()}


def update(shape: Shape, meter: Meter) -> dict[str, Call]:
    """Logits to loss to logits gradient: log-probs, entropy, PPO with importance weights, in place."""
    batch = Batch(meter, shape)

    def path(backend: str, logits: Tensor) -> tuple[Tensor]:
        return (batch.loss(ours(backend, batch.targets, True, mask=batch.keep)(logits), backend),)

    def plain(logits: Tensor, rows: slice = slice(None)) -> tuple[Tensor]:
        return (batch.plain(logits, rows).sum(),)

    problem = Problem.of(meter, shape, [torch.ones((), device=meter.device)], plain)
    slices = row_slices(*problem.source.shape)
    batch.old_from(torch.cat([eager(problem.source[rows], batch.targets[rows], False)[0] for rows in slices]))
    paths: dict[str, Path] = {name: partial(path, backend) for name, backend in BACKENDS.items()}
    return {name: problem.call(way) for name, way in (paths | {EAGER: plain}).items()}
