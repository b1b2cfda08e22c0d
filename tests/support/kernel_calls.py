"""Calls that between them launch every kernel: small for the interpreter, wide for the compilers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from correction_book import case
from torch import Tensor

from megatron_rc.batch import Support
from megatron_rc.config import Rejection, RolloutCorrection, Weight
from megatron_rc.correction import correct
from megatron_rc.fused import backend_module
from megatron_rc.logprobs import vocab_parallel_logprobs
from megatron_rc.loss import loss_scale, policy_loss
from megatron_rc.metrics import MetricSums
from megatron_rc.reference.routes import RouteComparison
from megatron_rc.reference.rows import Rows


class Size(NamedTuple):
    rows: int
    """Rows of logits."""
    vocabulary: int
    lengths: tuple[int, ...]
    """Lengths of the sequences, where there are no logits."""


class Answer(NamedTuple):
    tensors: dict[str, Tensor]
    metrics: MetricSums | None = None


Call = Callable[[str, Size], Answer]

SMALL = Size(13, 70, (7, 0, 6))
WIDE = Size(4, 151_936, (1500, 700, 0, 900))

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


TWO_FACTORS = RolloutCorrection(Weight("token", "clip", 0.5, 2.0, staleness_upper=1.5))
PREFIXES = RolloutCorrection(Weight("prefix", "clip", 0.5, 2.0, growth="sqrt_position"))


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def logprobs(dtype: torch.dtype, *, entropy: bool, kept: bool, per_row: bool) -> Call:
    """Log-probs, of kept ids only if asked, and the gradient of what they are for."""

    def call(backend: str, size: Size) -> Answer:
        generator, rows, width = _generator(), size.rows, size.vocabulary
        leaf = torch.randn(rows, width, generator=generator).to(dtype).requires_grad_()
        targets = torch.randint(width - 5, (rows,), generator=generator)
        options: dict[str, Any] = {"vocab_size": width - 5}
        if kept:
            ids = torch.stack([torch.randperm(width - 5, generator=generator)[:9] for _ in range(rows)])
            ids[::2, 3] = torch.where((ids == targets[:, None]).any(1), ids[:, 3], targets)[::2]
            options["support"] = Support(ids.flatten(), torch.arange(rows + 1) * 9)
        if per_row:
            options["temperature"] = torch.rand(rows, generator=generator) + 0.5
            options["mask"] = torch.arange(rows) % 4 != 1
        logits = leaf * 1
        answer = vocab_parallel_logprobs(
            logits, targets, with_entropy=entropy, inplace_backward=per_row, backend=backend, **options
        )
        parts = answer if isinstance(answer, tuple) else (answer,)
        finite = [torch.where(part.isfinite(), part, 0) for part in parts]
        sum((part * torch.rand(rows, generator=generator)).sum() for part in finite).backward()
        assert leaf.grad is not None
        return Answer({"logprobs": parts[0], "entropy": parts[-1], "gradient": leaf.grad})

    return call


def corrected(
    correction: RolloutCorrection, *, per_token: bool = False, lags: bool = False, sampling: bool = False
) -> Call:
    def call(backend: str, size: Size) -> Answer:
        batch = case(list(size.lengths))
        if lags:
            batch.lags = torch.arange(sum(size.lengths), dtype=torch.int32) % 20
        if per_token:
            batch.advantages = torch.randn(sum(size.lengths), generator=_generator())
        given = batch.options | ({"sampling_logprobs": batch.train * 0.9} if sampling else {})
        answer = correct(*batch.arguments, correction=correction, measured_upper=1.7, backend=backend, **given)
        tensors = {"weights": answer.weights, "mask": answer.mask, "bad_sequences": answer.bad_sequences}
        return Answer(tensors, answer.metrics)

    return call


def loss(correction: RolloutCorrection, *, old: bool, every_term: bool, **options: Any) -> Call:
    def call(backend: str, size: Size) -> Answer:
        generator, batch = _generator(), case(list(size.lengths))
        train = torch.nan_to_num(batch.train)
        given = correct(*batch.arguments, correction=correction, backend="torch", **batch.options)
        scale = loss_scale(batch.mask, given.mask)
        n = sum(size.lengths)
        current = (train + 0.3 * torch.randn(n, generator=generator)).requires_grad_()
        advantages, entropy = torch.randn(2, n, generator=generator)
        entropy.requires_grad_()
        terms = {}
        if every_term:
            reference = train + 0.3 * torch.randn(n, generator=generator)
            terms = {"reference_logprobs": reference, "kl_coef": 0.2, "entropy": entropy, "entropy_coef": 0.1}
        value, metrics = policy_loss(
            current, train if old else None, advantages, given, scale=scale, backend=backend, **terms, **options
        )
        value.backward()
        assert current.grad is not None
        tensors = {"loss": value.detach(), "gradient": current.grad}
        return Answer(tensors if entropy.grad is None else tensors | {"entropy gradient": entropy.grad}, metrics)

    return call


def routes(a_dtype: torch.dtype, b_dtype: torch.dtype, *, masked: bool) -> Call:
    def call(backend: str, size: Size) -> Answer:
        generator, tokens = _generator(), sum(size.lengths)
        a = torch.rand(tokens, 5, 16, generator=generator).argsort()[..., :8].to(a_dtype)
        b = torch.where(torch.rand(a.shape, generator=generator) < 0.1, -1, a).to(b_dtype)
        mask = torch.arange(tokens) % 3 != 0 if masked else None
        compared = backend_module("routes", backend).compare_routes(a, b, mask)
        return Answer(dict(zip(RouteComparison._fields, compared, strict=True)))

    return call


def shards(*, kept: bool) -> Call:
    """Statistics of three shards, their merger, and the gradient of each: what a single process never needs."""

    def call(backend: str, size: Size) -> Answer:
        generator, n, width = _generator(), sum(size.lengths), size.vocabulary
        # one row in memory, made different by the temperatures
        logits = torch.randn(1, width, generator=generator).bfloat16().expand(n, width)
        targets = torch.randint(width, (n,), generator=generator)
        ids = torch.stack([torch.randperm(40, generator=generator)[:9] for _ in range(n)]).flatten() if kept else None
        offsets = torch.arange(n + 1) * 9 if kept else None
        temperature, mask = torch.rand(n, generator=generator) + 0.5, torch.arange(n) % 5 != 2
        rows = backend_module("rows", backend)
        # one shard is narrow, and another begins at an odd address
        parts = [
            (logits[:, a:b], Rows(targets, temperature, mask, ids, offsets, a, b - a))
            for a, b in itertools.pairwise([0, width // 8, width // 2 + 1, width])
        ]
        statistics = [rows.shard_statistics(*part, with_entropy=True) for part in parts]
        merged = rows.merge_shards(torch.stack(statistics), parts[0][1], with_entropy=True)
        upstream = torch.randn(2, n, generator=generator)
        finite = torch.where(merged.logprobs.isfinite(), upstream, 0)
        assert merged.entropy is not None
        gradients = [torch.empty(shard.shape, dtype=shard.dtype) for shard, _ in parts]
        for gradient, part in zip(gradients, parts, strict=True):
            rows.write_gradient(gradient, *part, merged, *finite)
        return Answer({"logprobs": merged.logprobs, "entropy": merged.entropy, "gradient": torch.cat(gradients, 1)})

    return call


CALLS: dict[str, Call] = {
    "log-probs bf16": logprobs(torch.bfloat16, entropy=True, kept=False, per_row=True),
    "log-probs fp32": logprobs(torch.float32, entropy=True, kept=False, per_row=False),
    "log-probs without entropy": logprobs(torch.float16, entropy=False, kept=False, per_row=False),
    "kept ids bf16": logprobs(torch.bfloat16, entropy=True, kept=True, per_row=True),
    "kept ids fp32": logprobs(torch.float32, entropy=False, kept=True, per_row=False),
    "correct none": corrected(RolloutCorrection()),
    "correct token": corrected(RolloutCorrection.preset("token-tis")),
    "correct sequence": corrected(RolloutCorrection.preset("seq-mis")),
    "correct geometric": corrected(RolloutCorrection.preset("geo-mask-token-tis")),
    "correct standardized": corrected(STANDARDIZED_TURNS),
    "correct measured, of tokens": corrected(RolloutCorrection(Weight("token", upper="measured")), per_token=True),
    "correct measured, of sequences": corrected(
        RolloutCorrection(Weight("sequence", upper="measured")), per_token=True
    ),
    "correct every level": corrected(EVERY_LEVEL),
    "correct every level, advantages of tokens": corrected(EVERY_LEVEL, per_token=True),
    "correct by lag": corrected(BY_LAG, lags=True),
    "correct prefixes": corrected(PREFIXES),
    "correct two factors": corrected(TWO_FACTORS, sampling=True),
    "loss": loss(RolloutCorrection.preset("token-tis"), old=True, every_term=True, dual_clip=3.0),
    "loss of one term": loss(RolloutCorrection(old="current"), old=False, every_term=False),
    "loss reinforce": loss(RolloutCorrection.preset("seq-tis"), old=True, every_term=True, surrogate="reinforce"),
    "shards": shards(kept=False),
    "shards of kept ids": shards(kept=True),
    "routes int16 and int64": routes(torch.int16, torch.int64, masked=True),
    "routes int32": routes(torch.int32, torch.int32, masked=False),
}


COVERED = (
    *("log-probs without entropy", "kept ids fp32", "correct none", "correct geometric"),
    *("correct every level, advantages of tokens", "loss of one term"),
)
"""Calls whose kernels do nothing that those of the others do not."""


def every_wide_call() -> None:
    for name, call in CALLS.items():
        if name not in COVERED:
            call("triton", WIDE)
