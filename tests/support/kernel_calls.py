"""Calls that between them launch every kernel: small for the interpreter, wide for the compilers."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from correction_cases import case, correct
from loss_batch import grouped
from torch import Tensor

from megatron_rc import Corrected, HeadInputs, LossOptions, MetricSums, loss_scale, policy_loss
from megatron_rc.batch import Support
from megatron_rc.correction.settings import Rejection, RolloutCorrection, Weight
from megatron_rc.logprobs import backends
from megatron_rc.logprobs.linear import linear_logprobs, linear_policy_loss
from megatron_rc.logprobs.logits import vocab_parallel_logprobs
from megatron_rc.logprobs.reference.rows import Rows
from megatron_rc.moe import compare
from megatron_rc.moe.reference import RouteComparison


class Size(NamedTuple):
    rows: int
    """Rows of logits."""
    vocabulary: int
    lengths: tuple[int, ...]
    """Lengths of the sequences, where there are no logits."""


class Answer(NamedTuple):
    tensors: dict[str, Tensor]
    metrics: MetricSums | None = None

    def bits(self) -> list[Tensor]:
        """Copies of everything, metrics as one tensor."""
        metrics = [torch.tensor(list(self.metrics.values().values()), dtype=torch.float64)] if self.metrics else []
        return [tensor.detach().clone() for tensor in self.tensors.values()] + metrics


class Prepared(NamedTuple):
    inputs: list[Tensor]
    run: Callable[[str], Answer]
    """By a backend; makes no inputs and, on a device, does not wait for it."""


Call = Callable[[Size, int], Prepared]
"""(size, seed) -> a call; the shapes of its inputs are the same for every seed."""


SMALL = Size(13, 70, (7, 0, 6))
WIDE = Size(4, 151_936, (160, 60, 0, 92))
ON_A_CARD = Size(256, 98_304, (1100, 0, 40, 4))
"""Rows as wide as those of WIDE for the launch table, cut into shards that are, too: the same kernels."""

EVERY_LEVEL = RolloutCorrection(
    Weight("segment", "clip", 0.5, 2.0),
    (
        Rejection("ratio", "token", lower=0.2, upper=5.0),
        Rejection("k3", "token", upper=2.0, when="negative_advantage"),
        Rejection("surprise", "token", upper=2.5),
        Rejection("ratio", "sequence", "mean", lower=0.5, upper=2.0),
        Rejection("prob_diff", "sequence", "max", upper=0.9),
        Rejection("k2", "segment", "sum", upper=4.0, when="negative_advantage"),
        Rejection("abs_log_ratio", "segment", "min", upper=1.5),
    ),
    normalize="batch",
)

BY_LAG = RolloutCorrection(
    Weight("sequence", "clip", 0.5, 2.0, growth="sqrt_lag"), (Rejection("lag", "segment", "max", upper=9.0),)
)
STANDARDIZED_TURNS = RolloutCorrection(Weight("token"), (Rejection("standardized", "segment", upper=1.1),))
TERMS = {"dual_clip": 3.0, "kl_coef": 0.2, "entropy_coef": 0.1}
TWO_FACTORS = RolloutCorrection(Weight("token", "clip", 0.5, 2.0, staleness_upper=1.5))
MEASURED_SEQUENCES = Weight("sequence", upper="measured")
CONFIDENT = RolloutCorrection(Weight(upper=3.3, growth="confidence", confidence_floor=5e-3))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def logprobs(dtype: torch.dtype, size: Size, seed: int, *, entropy: bool, kept: bool, per_row: bool) -> Prepared:
    """Log-probs, of kept ids only if asked, and the gradient of what they are for."""
    generator, rows, width = _generator(seed), size.rows, size.vocabulary
    leaf = torch.randn(rows, width, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(width - 5, (rows,), generator=generator)
    options: dict[str, Any] = {"vocab_size": width - 5, "with_entropy": entropy, "inplace_backward": per_row}
    inputs = [leaf.detach(), targets]
    if kept:
        ids = torch.stack([torch.randperm(width - 5, generator=generator)[:9] for _ in range(rows)])
        ids[::2, 3] = torch.where((ids == targets[:, None]).any(1), ids[:, 3], targets)[::2]
        options["support"] = Support(ids.flatten(), torch.arange(rows + 1) * 9)
        inputs.append(options["support"].ids)
    if per_row:
        options["temperature"] = torch.rand(rows, generator=generator) + 0.5
        options["mask"] = torch.arange(rows) % 4 != 1
        inputs.append(options["temperature"])
    upstream = [torch.rand(rows, generator=generator) for _ in range(1 + entropy)]

    def run(backend: str) -> Answer:
        # not the leaf itself, which is read again and must not be overwritten
        answer = vocab_parallel_logprobs(leaf * 1, targets, backend=backend, **options)
        parts = answer if isinstance(answer, tuple) else (answer,)
        slopes = [torch.where(part.isfinite(), up, 0) for part, up in zip(parts, upstream, strict=True)]
        (gradient,) = torch.autograd.grad(parts, leaf, slopes)
        return Answer({"logprobs": parts[0], "entropy": parts[-1], "gradient": gradient})

    return Prepared(inputs + upstream, run)


def corrected(
    correction: RolloutCorrection, size: Size, seed: int, per_token: bool = False, lags: bool = False,
    sampling: bool = False,
) -> Prepared:  # fmt: skip
    batch = case(list(size.lengths), seed=seed)
    if lags:
        batch.lags = torch.arange(sum(size.lengths), dtype=torch.int32) % 20
    if per_token:
        batch.advantages = torch.randn(sum(size.lengths), generator=_generator(seed))
    given = batch.options | ({"sampling_logprobs": batch.train * 0.9} if sampling else {})
    inputs = [*batch.arguments, batch.advantages, *batch.statistics.values()]
    inputs += [given["sampling_logprobs"]] if sampling else []

    def run(backend: str) -> Answer:
        answer = correct(*batch.arguments, correction=correction, measured_upper=1.7, backend=backend, **given)
        tensors = {"weights": answer.weights, "mask": answer.mask, "bad_sequences": answer.bad_sequences}
        return Answer(tensors, answer.metrics)

    return Prepared(inputs, run)


def loss(
    correction: RolloutCorrection, size: Size, seed: int, *, old: bool, every_term: bool, **options: Any
) -> Prepared:
    generator, batch = _generator(seed), case(list(size.lengths), seed=seed)
    train = torch.nan_to_num(batch.train)
    given = correct(*batch.arguments, correction=correction, backend="torch", **batch.options)
    scale = loss_scale(batch.mask, given.mask)
    n = sum(size.lengths)
    leaves = [(train + 0.3 * torch.randn(n, generator=generator)).requires_grad_()]
    advantages, entropy = torch.randn(2, n, generator=generator)
    terms: dict[str, Any] = {}
    if every_term:
        reference = train + 0.3 * torch.randn(n, generator=generator)
        leaves.append(entropy.requires_grad_())
        terms = {"reference_logprobs": reference, "kl_coef": 0.2, "entropy": entropy, "entropy_coef": 0.1}

    def run(backend: str) -> Answer:
        more = grouped(scale=scale, backend=backend, **terms, **options)
        value, metrics = policy_loss(leaves[0], train if old else None, advantages, given, **more)
        gradients = torch.autograd.grad(value, leaves)
        names = ("gradient", "entropy gradient")[: len(gradients)]
        return Answer({"loss": value.detach(), **dict(zip(names, gradients, strict=True))}, metrics)

    inputs = [*leaves, train, advantages, given.weights, given.mask, scale]
    inputs += [terms["reference_logprobs"]] if every_term else []
    return Prepared([part.detach() for part in inputs], run)


def update(size: Size, seed: int) -> Prepared:
    """From logits to their gradient, over correction and loss; by kernels that the other calls compile, too."""
    generator, batch = _generator(seed), case(list(size.lengths), seed=seed)
    n = sum(size.lengths)
    leaf = torch.randn(n, size.vocabulary, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(size.vocabulary - 5, (n,), generator=generator)
    advantages, temperature = torch.randn(n, generator=generator), torch.rand(n, generator=generator) + 0.5
    old = batch.train.nan_to_num()
    softmax: dict[str, Any] = {"temperature": temperature, "mask": batch.mask, "vocab_size": size.vocabulary - 5}

    def run(backend: str) -> Answer:
        current, entropy = vocab_parallel_logprobs(
            leaf * 1, targets, with_entropy=True, inplace_backward=True, backend=backend, **softmax
        )
        chosen = RolloutCorrection.preset("token-tis")
        given = correct(*batch.arguments, correction=chosen, backend=backend, **batch.options)
        scale = loss_scale(batch.mask, given.mask, cu_seqlens=batch.cu_seqlens)
        terms: Any = {"entropy": entropy, "reference_logprobs": old, "options": LossOptions(**TERMS)}
        value, metrics = policy_loss(current, old, advantages, given, scale=scale, backend=backend, **terms)
        (gradient,) = torch.autograd.grad(value, leaf)
        return Answer({"loss": value.detach(), "gradient": gradient}, metrics)

    inputs = [*batch.arguments, batch.advantages, *batch.statistics.values()]
    return Prepared([*inputs, leaf.detach(), targets, advantages, temperature, old], run)


def head(size: Size, seed: int, *, fused: bool) -> Prepared:
    """From hidden states to their gradient and to that of the weight, in main_grad where the loss is fused."""
    generator, features = _generator(seed), 8
    hidden = torch.randn(size.rows, features, generator=generator).requires_grad_()
    weight: Any = torch.randn(size.vocabulary, features, generator=generator).requires_grad_()
    targets = torch.randint(size.vocabulary, (size.rows,), generator=generator)
    advantages, old, upstream = torch.randn(3, size.rows, generator=generator)
    mask, scale, one = torch.arange(size.rows) % 4 != 1, torch.rand(size.rows, generator=generator), torch.ones(())
    given = Corrected(scale, mask, mask[:1], MetricSums(), RolloutCorrection())
    options: dict[str, Any] = {"head": HeadInputs(mask=mask, chunk=size.rows // 2 + 1), "with_entropy": True}
    of_loss: Any = {"scale": scale, "reference_logprobs": old, "options": LossOptions(**TERMS), "upstream": one}
    if fused:
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False

    def run(backend: str) -> Answer:
        if not fused:
            found = linear_logprobs(hidden, weight, targets, backend=backend, **options)
            gradients = torch.autograd.grad(found, (hidden, weight), (upstream, scale))
            return Answer(dict(zip(("logprobs", "entropy", "states", "weight"), (*found, *gradients), strict=True)))
        weight.main_grad.zero_()
        answer = linear_policy_loss(
            hidden, weight, targets, old, advantages, given, backend=backend, **of_loss, **options
        )
        (gradient, _) = torch.autograd.grad(answer.loss, (hidden, weight), one)
        tensors = {"loss": answer.loss.detach(), "logprobs": answer.logprobs, "states": gradient}
        return Answer(tensors | {"weight": weight.main_grad.clone()}, answer.metrics)  # the same memory every time

    return Prepared([hidden.detach(), weight.detach(), targets, advantages, old, upstream, scale], run)


def routes(a_dtype: torch.dtype, b_dtype: torch.dtype, size: Size, seed: int, *, masked: bool) -> Prepared:
    generator, tokens = _generator(seed), sum(size.lengths)
    a = torch.rand(tokens, 5, 16, generator=generator).argsort()[..., :8].to(a_dtype)
    b = torch.where(torch.rand(a.shape, generator=generator) < 0.1, -1, a).to(b_dtype)
    mask = torch.arange(tokens) % 3 != 0 if masked else None

    def run(backend: str) -> Answer:
        compared = compare.computing(backend).compare_routes(a, b, mask)
        return Answer(dict(zip(RouteComparison._fields, compared, strict=True)))

    return Prepared([a, b], run)


def shards(size: Size, seed: int, *, kept: bool) -> Prepared:
    """Statistics of three shards, their merger, and the gradient of each: what a single process never needs."""
    generator, n, width = _generator(seed), sum(size.lengths), size.vocabulary
    # one row in memory, made different by the temperatures
    row = torch.randn(1, width, generator=generator).bfloat16()
    targets = torch.randint(width, (n,), generator=generator)
    ids = torch.stack([torch.randperm(40, generator=generator)[:9] for _ in range(n)]).flatten() if kept else None
    offsets = torch.arange(n + 1) * 9 if kept else None
    temperature, mask = torch.rand(n, generator=generator) + 0.5, torch.arange(n) % 5 != 2
    # one shard is narrow, and another begins at an odd address
    parts = [
        (row.expand(n, width)[:, a:b], Rows(targets, temperature, mask, ids, offsets, a, b - a))
        for a, b in itertools.pairwise([0, width // 8, width // 2 + 1, width])
    ]
    upstream = torch.randn(2, n, generator=generator)

    def run(backend: str) -> Answer:
        rows = backends.computing(backend)
        statistics = [rows.shard_statistics(*part, with_entropy=True) for part in parts]
        merged = rows.merge_shards(torch.stack(statistics), parts[0][1], with_entropy=True)
        finite = torch.where(merged.logprobs.isfinite(), upstream, 0)
        gradients = [torch.empty_like(shard, memory_format=torch.contiguous_format) for shard, _ in parts]
        for gradient, part in zip(gradients, parts, strict=True):
            rows.write_gradient(gradient, *part, merged, *finite)
        return Answer({"logprobs": merged.logprobs, "entropy": merged.entropy, "gradient": torch.cat(gradients, 1)})

    return Prepared([row, targets, temperature, upstream, *([ids] if ids is not None else [])], run)


CALLS: dict[str, Call] = {
    "log-probs bf16": partial(logprobs, torch.bfloat16, entropy=True, kept=False, per_row=True),
    "log-probs fp32": partial(logprobs, torch.float32, entropy=True, kept=False, per_row=False),
    "log-probs without entropy": partial(logprobs, torch.float16, entropy=False, kept=False, per_row=False),
    "kept ids bf16": partial(logprobs, torch.bfloat16, entropy=True, kept=True, per_row=True),
    "kept ids fp32": partial(logprobs, torch.float32, entropy=False, kept=True, per_row=False),
    "correct none": partial(corrected, RolloutCorrection()),
    "correct token": partial(corrected, RolloutCorrection.preset("token-tis")),
    "correct sequence": partial(corrected, RolloutCorrection.preset("seq-mis")),
    "correct geometric": partial(corrected, RolloutCorrection.preset("geo-mask-token-tis")),
    "correct standardized": partial(corrected, STANDARDIZED_TURNS),
    "correct measured, of tokens": partial(corrected, RolloutCorrection(Weight(upper="measured")), per_token=True),
    "correct measured, of sequences": partial(corrected, RolloutCorrection(MEASURED_SEQUENCES), per_token=True),
    "correct every level": partial(corrected, EVERY_LEVEL),
    "correct every level, advantages of tokens": partial(corrected, EVERY_LEVEL, per_token=True),
    "correct by lag": partial(corrected, BY_LAG, lags=True),
    "correct prefixes": partial(
        corrected, RolloutCorrection(Weight("prefix", "clip", 0.5, 2.0, growth="sqrt_position"))
    ),
    "correct by confidence": partial(corrected, CONFIDENT),
    "correct two factors": partial(corrected, TWO_FACTORS, sampling=True),
    "loss": partial(loss, RolloutCorrection.preset("token-tis"), old=True, every_term=True, dual_clip=3.0),
    "loss of one term": partial(loss, RolloutCorrection(old="current"), old=False, every_term=False),
    "loss cispo": partial(loss, RolloutCorrection(), old=True, every_term=False, surrogate="cispo"),
    "loss reinforce": partial(
        loss, RolloutCorrection.preset("seq-tis"), old=True, every_term=True, surrogate="reinforce"
    ),
    "update": update,
    "head": partial(head, fused=True),
    "head, log-probs": partial(head, fused=False),
    "shards": partial(shards, kept=False),
    "shards of kept ids": partial(shards, kept=True),
    "routes int16 and int64": partial(routes, torch.int16, torch.int64, masked=True),
    "routes int32": partial(routes, torch.int32, torch.int32, masked=False),
}
COVERED = (
    *("log-probs without entropy", "kept ids fp32", "correct none", "correct geometric"),
    *("correct every level, advantages of tokens", "loss of one term"),
)
"""Calls whose kernels do nothing that those of the others do not."""


def every_call(size: Size = WIDE) -> None:
    for name, call in CALLS.items():
        if name not in COVERED:
            call(size, 0).run("triton")
