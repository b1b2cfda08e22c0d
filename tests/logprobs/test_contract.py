"""What log-probs and distributions promise: rows, layouts, memory, autograd, waiting, errors, and the fp64 truth."""

from typing import Any, ClassVar

import pytest
import torch
from distributed import run_ranks
from logprobs_truth import kept_columns, random_logits, random_support, unchecked
from refusals import refusal
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rc.batch import Support
from megatron_rc.logprobs.logits import Distribution, vocab_parallel_distribution, vocab_parallel_logprobs
from megatron_rc.logprobs.reference import rows as module
from speed.operations import OperationCount

ZEROS = torch.zeros(5, dtype=torch.int64)
LEAF = torch.zeros(4, 9, requires_grad=True)
ROWS, VOCABULARY = 9, 61
WIDTHS = {1: (64,), 2: (40, 24), 3: (40, 20, 4)}
"""Shards by the number of ranks; the last 3 columns are padding."""


def kept(ids: list[int], offsets: list[int]) -> Support:
    return Support(torch.tensor(ids), torch.tensor(offsets))


def test_a_row_does_not_depend_on_its_batch_its_position_or_its_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets = random_logits(7, 70_001)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        whole = vocab_parallel_logprobs(logits, targets, with_entropy=True)
        for row in range(7):
            alone = vocab_parallel_logprobs(logits[row : row + 1], targets[row : row + 1], with_entropy=True)
            assert torch.equal(alone[0], whole[0][row : row + 1]) and torch.equal(alone[1], whole[1][row : row + 1])
        columns = vocab_parallel_logprobs(logits.t().contiguous().t(), targets, with_entropy=True)
        assert torch.equal(columns[0], whole[0]) and torch.equal(columns[1], whole[1])
        monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 2 * 70_001)
        chunked = vocab_parallel_logprobs(logits, targets, with_entropy=True)
        assert torch.equal(chunked[0], whole[0]) and torch.equal(chunked[1], whole[1])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("with_support", [False, True])
def test_inplace_backward_gives_the_same_gradient_in_the_memory_of_the_logits(with_support: bool) -> None:
    hidden, targets = random_logits(6, 8)
    weight = torch.randn(8, 30, generator=torch.Generator().manual_seed(2)).requires_grad_()
    targets = targets * 3
    support = random_support(targets, 30, torch.Generator().manual_seed(1)) if with_support else None
    gradients, storages = [], []
    for inplace in (False, True):
        logits = hidden @ weight
        logits.register_hook(lambda gradient: storages.append(gradient.data_ptr()))
        both = vocab_parallel_logprobs(logits, targets, support=support, inplace_backward=inplace, with_entropy=True)
        gradients += torch.autograd.grad((both[0] * torch.arange(6)).sum() + both[1].sum(), weight)
        storages[-1] = storages[-1] == logits.data_ptr()
    assert torch.equal(*gradients) and storages == [False, True]


@pytest.mark.parametrize("name", ["logits", "targets", "temperature", "mask", "ids", "offsets", "logprobs", "entropy"])
def test_a_tensor_written_to_between_forward_and_backward_raises_there(name: str) -> None:
    logits, targets = random_logits(4, 9)
    support = random_support(targets, 9, torch.Generator().manual_seed(1))
    given: Any = {"temperature": torch.tensor([0.5, 1, 2, 3]), "mask": torch.tensor([True, False, True, True])}
    lp, entropy = vocab_parallel_logprobs(logits.requires_grad_(), targets, support=support, with_entropy=True, **given)
    total = lp.sum() + entropy.sum()
    given |= {"logits": logits.detach(), "targets": targets, "logprobs": lp.detach(), "entropy": entropy.detach()}
    (given | support._asdict())[name].fill_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("with_support", [False, True])
def test_nothing_waits_for_the_device(with_support: bool) -> None:
    logits, targets = random_logits(8, 40)
    support = random_support(targets, 40, torch.Generator().manual_seed(1)) if with_support else None
    with unchecked(), OperationCount() as count:
        lp, entropy = vocab_parallel_logprobs(
            logits.requires_grad_(), targets, temperature=torch.ones(8), mask=torch.ones(8), vocab_size=39,
            support=support, with_entropy=True,
        )  # fmt: skip
        (lp.sum() + entropy.sum()).backward()
    assert count.operations.total() > 30 and not count.waits


def test_bf16_logits_are_never_copied_to_fp32_as_a_whole() -> None:
    class NewTensors(TorchDispatchMode):
        sizes: ClassVar[list[int]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.dtype == torch.float32 and result._base is None:
                self.sizes.append(result.numel())
            return result

    logits = torch.randn(600, 2**14).bfloat16().requires_grad_()
    with NewTensors() as new:
        vocab_parallel_logprobs(logits, torch.arange(600)).sum().backward()
    assert max(new.sizes) == 2**22 < logits.numel()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"backend": "triton"}, "logits must be on a CUDA device for backend 'triton', got cpu"),
        ({"backend": "cuda"}, "backend must be 'auto', 'torch' or 'triton', got 'cuda'"),
        ({"temperature": 0.0}, "temperature must be > 0, got 0.0"),
        ({"temperature": torch.ones(3)}, "temperature must have the shape (4,)"),
        ({"mask": torch.ones(4, 1)}, "mask must have the shape (4,)"),
        ({"targets": torch.zeros(5, dtype=torch.int64)}, "targets must have the shape (4,)"),
        ({"vocab_size": 10}, "vocab_size must be between 1 and the 9 ids of all shards, got 10"),
        ({"logits": torch.zeros(4)}, "logits must be floating point [N, V_local]"),
        ({"logits": torch.zeros(4, 9, dtype=torch.int64)}, "logits must be floating point"),
        ({"targets": torch.zeros(4)}, "targets must be int64 or int32, got torch.float32"),
        ({"targets": torch.zeros(4, dtype=torch.int64, device="meta")}, "targets must be on cpu, where logits are, go"),
        ({"mask": torch.zeros(4, device="meta")}, "mask must be on cpu, where logits are, got meta"),
        ({"support": Support(torch.zeros(0), ZEROS)}, "support.ids must be int64 or int32, got torch.float32"),
        ({"support": Support(ZEROS, torch.zeros(5))}, "support.offsets must be int64 or int32, got torch.float32"),
        ({"support": Support(torch.zeros(0), torch.zeros(4))}, "support.offsets must have 5 entries for 4 rows"),
        ({"logits": torch.zeros(1, 9).expand(4, 9), "inplace_backward": True}, "inplace_backward must be False"),
        ({"logits": LEAF, "inplace_backward": True}, "inplace_backward must be False for a leaf with requires_grad"),
        ({"logits": [[0.0]]}, "logits must be of type Tensor, got list"),
        ({"targets": [0] * 4}, "targets must be of type Tensor, got list"),
    ],
)
def test_bad_input_is_named(options: dict[str, Any], sentence: str) -> None:
    arguments = {"logits": torch.zeros(4, 9), "targets": torch.zeros(4, dtype=torch.int64), **options}
    assert refusal(vocab_parallel_logprobs, **arguments).startswith(sentence)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"targets": torch.tensor([0, 8, 9, 2])}, "targets must lie in [0, 9) where mask is not 0, got 9"),
        ({"targets": torch.tensor([0, 8, -100, 2])}, "targets must lie in [0, 9) where mask is not 0, got -100"),
        ({"targets": torch.tensor([0, 6, 7, 2]), "vocab_size": 7}, "targets must lie in [0, 7)"),
        ({"temperature": torch.tensor([1.0, 2.0, 0.0, 1.0])}, "temperature must be > 0 where mask is not 0, got 0.0"),
        ({"temperature": torch.tensor([1.0, torch.nan, 1.0, 1.0])}, "temperature must be > 0 where mask is not 0"),
        ({"support": kept([0, 1, 9, 2], [0, 1, 2, 3, 4])}, "support.ids must lie in [0, 9), got 9"),
        ({"support": kept([0, -1, 3, 2], [0, 1, 2, 3, 4])}, "support.ids must lie in [0, 9), got -1"),
        ({"support": kept([0, 1, 2, 3], [0, 1, 2, 3, 3])}, "support.offsets must ascend from 0 to 4"),
        ({"support": kept([0, 1, 2, 3], [0, 3, 2, 3, 4])}, "support.offsets must ascend from 0 to 4"),
        ({"support": kept([0, 1, 2, 3], [1, 1, 2, 3, 4])}, "support.offsets must ascend from 0 to 4"),
    ],
)
def test_bad_values_are_named_where_debug_checks_are_on(options: dict[str, Any], sentence: str) -> None:
    arguments = {"logits": torch.zeros(4, 9), "targets": torch.zeros(4, dtype=torch.int64), **options}
    assert refusal(vocab_parallel_logprobs, **arguments).startswith(sentence)
    bad_rows = torch.tensor([True, False, False, True])
    if "support" not in options:
        vocab_parallel_logprobs(mask=bad_rows, **arguments)
        with unchecked():
            vocab_parallel_logprobs(**arguments)


def problem(kept: bool) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Logits with padding columns that would win, a masked row of NaN, and a row whose kept ids lie in one shard."""
    generator = torch.Generator().manual_seed(7)
    logits = 5 * torch.randn(ROWS, 64, generator=generator)
    logits[torch.rand(ROWS, 64, generator=generator) < 0.1] = -torch.inf
    logits[:, VOCABULARY:] = 99.0
    logits[1] = torch.nan
    targets = logits[:, :VOCABULARY].argmax(1)
    options: dict[str, Any] = {"mask": torch.arange(ROWS) % 4 != 1, "temperature": 0.7, "vocab_size": VOCABULARY}
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
    top = top_ids(targets)
    listed = torch.where(top >= 0, p.gather(1, top.clamp(min=0)).log(), -torch.inf)
    return Distribution(
        *(None if v is None else torch.where(options["mask"], v, 0) for v in values),  # type: ignore[arg-type]
        torch.where(options["mask"][:, None], listed, 0),
    )


def top_ids(targets: Tensor) -> Tensor:
    """[N, 3] ids that may be drawn, in several shards, and a place without an id."""
    return torch.stack([targets, torch.full_like(targets, -1), torch.where(torch.arange(ROWS) == 2, targets, 41)], 1)


def described(rank: int, world: int, kept: bool, backend: str) -> tuple[Distribution, Tensor]:
    """The distribution by this rank's shard, and the log-probs of the function with a gradient."""
    logits, targets, options = problem(kept)
    start = sum(WIDTHS[world][:rank])
    shard = logits[:, start : start + WIDTHS[world][rank]].contiguous()
    options |= {"tp_group": None if world == 1 else torch.distributed.group.WORLD, "backend": backend}
    with unchecked():
        logprobs = vocab_parallel_logprobs(shard, targets, **options)
        return vocab_parallel_distribution(
            shard, targets, with_kept_mass=True, with_varentropy=True, top_ids=top_ids(targets), **options
        ), logprobs


@pytest.mark.parametrize("kept", [False, True], ids=["all-ids", "kept-ids"])
@pytest.mark.parametrize(
    ("world", "backend"),
    [*((n, "torch") for n in WIDTHS), *(pytest.param(n, "triton", marks=pytest.mark.interpreter) for n in (1, 2))],
)
def test_every_statistic_equals_that_of_the_whole_vocabulary_in_fp64(world: int, backend: str, kept: bool) -> None:
    answers = run_ranks(world, described, world, kept, backend) if world > 1 else [described(0, 1, kept, backend)]
    truth = expected(*problem(kept))
    for answer, logprobs in answers:
        assert torch.equal(answer.logprobs, logprobs), "the old pass and the update have the same log-probs"
        for name, value, right in zip(Distribution._fields, answer, truth, strict=True):
            if right is None:
                assert value is None, name
                continue
            torch.testing.assert_close(value.double(), right, atol=2e-6, rtol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
            assert torch.equal(value, answers[0][0]._asdict()[name]), "ranks differ"
