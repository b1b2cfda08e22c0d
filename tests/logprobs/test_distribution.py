"""vocab_parallel_distribution against fp64, for whole and sharded vocabularies, with and without kept ids."""

from typing import Any

import pytest
import torch
from distributed import run_ranks
from logprobs_truth import kept_columns, unchecked
from torch import Tensor

from megatron_rc.batch import Support
from megatron_rc.logprobs.logits import Distribution, vocab_parallel_distribution, vocab_parallel_logprobs

ROWS, VOCABULARY = 9, 61
WIDTHS = {1: (64,), 2: (40, 24), 3: (40, 20, 4)}
"""Shards by the number of ranks; the last 3 columns are padding."""


def problem(kept: bool) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Logits with padding columns that would win, a masked row of NaN, and a row whose kept ids lie in one shard."""
    generator = torch.Generator().manual_seed(7)
    logits = 5 * torch.randn(ROWS, 64, generator=generator)
    logits[torch.rand(ROWS, 64, generator=generator) < 0.1] = -torch.inf
    logits[:, VOCABULARY:] = 99.0
    mask = torch.arange(ROWS) % 4 != 1
    logits[1] = torch.nan
    targets = logits[:, :VOCABULARY].argmax(1)
    options: dict[str, Any] = {"mask": mask, "temperature": 0.7, "vocab_size": VOCABULARY}
    if kept:
        ids = [torch.tensor([int(t), *(i for i in (0, 3, 41, 60) if i != t)]) for t in targets]
        ids[2] = ids[2][:1]
        options["support"] = Support(torch.cat(ids), torch.tensor([0, *map(len, ids)]).cumsum(0))
    return logits, targets, options


def expected(logits: Tensor, targets: Tensor, options: dict[str, Any]) -> Distribution:
    z = logits[:, :VOCABULARY].double() / options["temperature"]
    support = options.get("support")
    legal = torch.ones_like(z, dtype=torch.bool) if support is None else kept_columns(support, VOCABULARY)
    p = z.masked_fill(~legal, -torch.inf).softmax(1)
    surprise = torch.where(p > 0, -p.log(), 0)
    entropy = (p * surprise).sum(1)
    varentropy = (p * (surprise - entropy[:, None]) ** 2).sum(1)
    kept_mass = None if support is None else (z.softmax(1) * legal).sum(1)
    values = (p.gather(1, targets[:, None])[:, 0].log(), entropy, p.amax(1), kept_mass, varentropy)
    return Distribution(*(None if v is None else torch.where(options["mask"], v, 0) for v in values))  # type: ignore[arg-type]


def described(rank: int, world: int, kept: bool, backend: str) -> tuple[Distribution, Tensor]:
    """The distribution by this rank's shard, and the log-probs of the function with a gradient."""
    logits, targets, options = problem(kept)
    start = sum(WIDTHS[world][:rank])
    shard = logits[:, start : start + WIDTHS[world][rank]].contiguous()
    options |= {"tp_group": None if world == 1 else torch.distributed.group.WORLD, "backend": backend}
    more = {"with_kept_mass": True, "with_varentropy": True}
    with unchecked():
        logprobs = vocab_parallel_logprobs(shard, targets, **options)
        return vocab_parallel_distribution(shard, targets, **options, **more), logprobs


def check(world: int, kept: bool, backend: str) -> None:
    answers = run_ranks(world, described, world, kept, backend) if world > 1 else [described(0, 1, kept, backend)]
    truth = expected(*problem(kept))
    for answer, logprobs in answers:
        assert torch.equal(answer.logprobs, logprobs), "the old pass and the update have the same log-probs"
        for name, value, right in zip(Distribution._fields, answer, truth, strict=True):
            if right is None:
                assert value is None, name
            else:
                torch.testing.assert_close(
                    value.double(), right, atol=2e-6, rtol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
                )
            assert value is None or torch.equal(value, answers[0][0]._asdict()[name]), "ranks differ"


@pytest.mark.parametrize("kept", [False, True], ids=["all-ids", "kept-ids"])
@pytest.mark.parametrize("world", WIDTHS)
def test_every_statistic_equals_that_of_the_whole_vocabulary_in_fp64(world: int, kept: bool) -> None:
    check(world, kept, "torch")


@pytest.mark.interpreter
@pytest.mark.parametrize("kept", [False, True], ids=["all-ids", "kept-ids"])
@pytest.mark.parametrize("world", [1, 2])
def test_the_kernels_give_the_same_statistics(world: int, kept: bool) -> None:
    check(world, kept, "triton")
