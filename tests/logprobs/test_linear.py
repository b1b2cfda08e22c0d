"""The fused head on one process against fp64 and the path that keeps logits, its distribution too."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from head_case import Case, by_head, by_logits, distance, exact, head_case, with_main_grad
from logprobs_truth import random_support
from loss_batch import grouped
from refusals import refuses
from torch import Tensor

from megatron_rc import HeadInputs, policy_loss
from megatron_rc.logprobs.linear import linear_distribution, linear_logprobs, linear_policy_loss
from megatron_rc.logprobs.logits import vocab_parallel_distribution

FUSED = pytest.mark.parametrize("fused", [True, False], ids=["policy_loss", "logprobs"])
BACKEND = pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.kernel)])
WANTED = {"with_kept_mass": True, "with_varentropy": True}


def of_backend(backend: str) -> tuple[Case, float]:
    """A case in the widest dtype of a backend, and how far its answers may be from the truth."""
    return (head_case(), 1e-12) if backend == "torch" else (head_case(torch.float32), 5e-6)


def all_options(case: Case) -> dict[str, Any]:
    temperature = torch.linspace(0.6, 1.4, len(case.targets), dtype=case.batch["old"].dtype)
    return {"temperature": temperature, "mask": case.batch["loss_mask"], "vocab_size": 12}


def kept_ids(case: Case) -> dict[str, Any]:
    return {"support": random_support(case.targets, 13, torch.Generator().manual_seed(0)), "temperature": 0.8}


@FUSED
@pytest.mark.parametrize("softmax", [lambda _: {}, all_options, kept_ids], ids=["plain", "options", "kept ids"])
@pytest.mark.parametrize("chunk", [4, 11])
def test_values_and_gradients_equal_fp64(softmax: Callable[[Case], dict[str, Any]], chunk: int, fused: bool) -> None:
    case = head_case()
    options = softmax(case)
    true = exact(case, factor=0.7, **options)
    assert max(map(distance, by_head(case, fused=fused, factor=0.7, chunk=chunk, **options), true)) <= 1e-12


@FUSED
@BACKEND
@pytest.mark.parametrize("softmax", [all_options, kept_ids], ids=["options", "kept ids"])
def test_rows_without_loss_are_left_out(softmax: Callable[[Case], dict[str, Any]], backend: str, fused: bool) -> None:
    case, tolerance = of_backend(backend)
    mask = case.batch["loss_mask"]
    options = {**softmax(case), "mask": mask}
    true = exact(case, factor=0.7, **options)
    # what the head does not read may hold anything
    spoiled = case._replace(hidden=torch.where(mask[:, None], case.hidden, torch.nan))
    found = by_head(spoiled, fused=fused, factor=0.7, chunk=3, rows=mask.nonzero()[:, 0], backend=backend, **options)
    assert max(map(distance, found, true)) <= tolerance
    assert not found.by_hidden[~mask].any()


@FUSED
@BACKEND
def test_one_chunk_has_the_bits_of_the_logits_path(backend: str, fused: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = head_case(dtype)
        found, kept = by_head(case, fused=fused, backend=backend), by_logits(case, backend=backend)
        assert torch.equal(found.logprobs, kept.logprobs) and torch.equal(found.entropy, kept.entropy)
        assert torch.equal(found.loss, kept.loss)


@FUSED
@BACKEND
@pytest.mark.parametrize("chunk", [4, 7])
def test_several_chunks_in_fp32_are_within_1e_6_of_the_logits_path(chunk: int, backend: str, fused: bool) -> None:
    case = head_case(torch.float32, tokens=30, hidden=64, vocabulary=96)
    # logits of about 1: from 8 nats on, fp32 has steps of 1e-6
    case = case._replace(hidden=case.hidden * 0.125)
    found, kept = by_head(case, fused=fused, chunk=chunk, backend=backend), by_logits(case, backend=backend)
    torch.testing.assert_close(found.logprobs, kept.logprobs, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.entropy, kept.entropy, rtol=0, atol=1e-6)


@FUSED
@BACKEND
@pytest.mark.parametrize("logits_dtype", [None, torch.float32])
def test_bf16_errs_no_more_than_the_logits_path(logits_dtype: torch.dtype | None, backend: str, fused: bool) -> None:
    case = head_case(torch.bfloat16, tokens=48, hidden=32, vocabulary=96)
    # hidden states of a model are smaller than those of a test of formulas: logits of about 3
    case = case._replace(hidden=case.hidden * 0.5)
    true, kept = exact(case), by_logits(case, backend=backend)
    found = by_head(case, fused=fused, chunk=20, logits_dtype=logits_dtype, backend=backend)
    for ours, theirs, truth in zip(found[3:], kept[3:], true[3:], strict=True):
        assert distance(ours, truth) <= 1.25 * distance(theirs, truth)
    if logits_dtype is not None:
        assert distance(found.logprobs, true.logprobs) <= 1e-6 < distance(kept.logprobs, true.logprobs)


@FUSED
@BACKEND
def test_frozen_tensors_get_no_gradient_and_cost_none(backend: str, fused: bool) -> None:
    case, tolerance = of_backend(backend)
    true = exact(case)
    for frozen in (0, 1):
        leaves = case.leaves()
        leaves[frozen].requires_grad_(False)
        found = by_head(case, fused=fused, chunk=4, leaves=leaves, backend=backend)
        assert leaves[frozen].grad is None
        assert distance(found[4 - frozen], true[4 - frozen]) <= tolerance


@BACKEND
@pytest.mark.parametrize("known", [None, 0.7, torch.tensor(0.7, dtype=torch.float64), "logprobs"])
def test_the_gradient_of_the_weight_ends_in_main_grad(known: Any, backend: str) -> None:
    case, tolerance = of_backend(backend)
    true = exact(case, factor=0.7)
    hidden, weight = with_main_grad(case, case.weight.dtype)
    options = {"backend": backend} if isinstance(known, str) else {"backend": backend, "upstream": known}
    before = weight.main_grad.data_ptr()  # type: ignore[attr-defined]
    found = by_head(case, fused=not isinstance(known, str), factor=0.7, leaves=(hidden, weight), chunk=4, **options)
    added: Any = weight
    assert added.grad_added_to_main_grad and added.main_grad.data_ptr() == before
    assert distance(added.main_grad - 1, true.by_weight) <= tolerance
    assert distance(found.by_hidden, true.by_hidden) <= tolerance
    # overlap_grad_reduce asserts that there is one
    assert weight.grad is not None and weight.grad.shape == weight.shape


def test_a_tied_embedding_keeps_its_own_gradient() -> None:
    case = head_case()
    hidden, weight = with_main_grad(case)
    weight.zero_out_wgrad = True  # type: ignore[attr-defined]
    given, options = case.of_loss()
    loss = linear_policy_loss(hidden, weight, case.targets, *given, with_entropy=True, **grouped(**options)).loss
    (loss + (weight[:2] * 3).sum()).backward()
    alone = torch.zeros_like(weight)
    alone[:2] = 3
    assert weight.grad is not None and torch.equal(weight.grad, alone)
    assert distance(weight.main_grad - 1, exact(case).by_weight) <= 1e-12  # type: ignore[attr-defined]


def test_a_main_grad_in_bf16_gets_an_ordinary_gradient() -> None:
    case = head_case()
    leaves = with_main_grad(case, torch.bfloat16)
    found = by_head(case, fused=True, leaves=leaves)
    assert not leaves[1].grad_added_to_main_grad  # type: ignore[attr-defined]
    assert distance(found.by_weight, exact(case).by_weight) <= 1e-12


def test_without_gradients_main_grad_stays_as_it_is() -> None:
    case = head_case()
    leaves = with_main_grad(case)
    with torch.no_grad():
        found = by_head(case, fused=True, leaves=leaves, upstream=1.0, chunk=4)
    assert max(map(distance, found[:3], exact(case)[:3])) <= 1e-12
    assert (leaves[1].main_grad == 1).all()  # type: ignore[attr-defined]


@pytest.mark.parametrize("grad", [True, False], ids=["training", "no_grad"])
@pytest.mark.parametrize("surrogate", ["ppo", "cispo", "reinforce"])
def test_metrics_are_those_of_the_policy_loss(surrogate: Any, grad: bool) -> None:
    case = head_case()
    given, options = case.of_loss()
    options["dual_clip"] = options.get("dual_clip") if surrogate == "ppo" else None
    true = exact(case)
    expected = policy_loss(true.logprobs, *given, entropy=true.entropy, **grouped(surrogate=surrogate, **options))
    of_head = grouped(chunk=4, with_entropy=True, surrogate=surrogate, **options)
    with torch.set_grad_enabled(grad):
        found = linear_policy_loss(*case.leaves(), case.targets, *given, **of_head)
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-12)
    assert found.metrics.values() == pytest.approx(expected.metrics.values(), rel=1e-12)


def test_backward_of_the_loss_runs_once() -> None:
    case = head_case()
    given, options = case.of_loss()
    loss = linear_policy_loss(*case.leaves(), case.targets, *given, with_entropy=True, **grouped(**options)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward cannot run again"):
        loss.backward()


def test_a_gradient_other_than_upstream_is_refused() -> None:
    case = head_case()
    with pytest.raises(ValueError, match="upstream must be the gradient by the loss"):
        given, options = case.of_loss()
        options |= {"with_entropy": True, "upstream": 2.0}
        linear_policy_loss(*case.leaves(), case.targets, *given, **grouped(**options)).loss.backward()


def test_no_token_is_a_loss_of_zero() -> None:
    case = head_case()
    batch = {**case.batch, "scale": torch.zeros_like(case.batch["scale"])}
    found = by_head(case._replace(batch=batch), fused=True, rows=torch.zeros(0, dtype=torch.int64))
    assert found.loss == 0 and not found.by_hidden.any() and not found.by_weight.any()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"chunk": 0}, "chunk must be >= 1"),
    ({"logits_dtype": torch.float32}, "logits_dtype must be None, torch.float64, got"),
    ({"rows": torch.tensor([1, 0])}, "rows must ascend"),
    ({"rows": torch.tensor([0, 11])}, "rows must ascend within"),
    ({"rows": torch.tensor([0.0])}, "rows must be .M. int64"),
    ({"sequence_parallel": True}, "sequence_parallel must be False without a tp_group"),
    ({"temperature": 0.0}, "temperature must be > 0"),
    ({"mask": torch.ones(3)}, "mask must have the shape"),
    ({"vocab_size": 14}, "vocab_size must be between 1 and the 13 ids"),
    ({"backend": "cuda"}, "backend must be"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_wrong_arguments_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    case = head_case()
    refuses(message, linear_logprobs, case.hidden, case.weight, case.targets, **grouped(**options))


def test_wrong_weights_and_hidden_states_are_refused_by_name() -> None:
    case = head_case()

    class Float8Tensor(Tensor):
        pass

    sharded = case.weight.clone()
    sharded.__fsdp_param__ = True  # type: ignore[attr-defined]
    for hidden, weight, message in (
        (case.hidden, case.weight.as_subclass(Float8Tensor), "weight must be a plain tensor.*got Float8Tensor"),
        (case.hidden, sharded, "got one of Megatron-FSDP"),
        (case.hidden, case.weight[:, 1:], "weight must be .V_local, 6."),
        (case.hidden, case.weight.float(), "weight must be torch.float64 on cpu like hidden"),
        (case.hidden[None], case.weight, "hidden must be .N, H."),
        (case.hidden[1:], case.weight, "targets must have the shape .10,. of the rows of hidden"),
    ):
        refuses(message, linear_logprobs, hidden, weight, case.targets)


def test_wrong_arguments_of_the_loss_are_refused_by_name() -> None:
    case = head_case()
    given, options = case.of_loss()
    asked = grouped(with_entropy=True, **options)
    with pytest.raises(ValueError, match="with_entropy must be True when entropy_coef is 0.1"):
        linear_policy_loss(*case.leaves(), case.targets, *given, **grouped(**options))
    refuses("scale must be 0 outside of rows", by_head, case, fused=True, rows=torch.tensor([0]))
    with pytest.raises(ValueError, match=r"advantages must have the shape \(11,\) of targets"):
        linear_policy_loss(*case.leaves(), case.targets, given[0], given[1][1:], given[2], **asked)
    for name, given_there in (
        ("old_logprobs", (given[0].to("meta"), *given[1:])),
        ("advantages", (given[0], given[1].to("meta"), given[2])),
        ("corrected.weights", (*given[:2], replace(given[2], weights=given[2].weights.to("meta")))),
    ):
        with pytest.raises(ValueError, match=f"{name} must be on cpu, where targets are, got meta"):
            linear_policy_loss(*case.leaves(), case.targets, *given_there, **asked)
    for name in ("scale", "reference_logprobs"):
        there = {**asked, name: options[name].to("meta")}
        with pytest.raises(ValueError, match=f"{name} must be on cpu, where targets are, got meta"):
            linear_policy_loss(*case.leaves(), case.targets, *given, **there)
    with pytest.raises(ValueError, match="upstream must be on cpu, where hidden is, got meta"):
        by_head(case, fused=True, upstream=torch.ones((), device="meta"))
    refuses("upstream must be given for fp16", by_head, head_case(torch.float16), fused=True)
    refuses("upstream must be 0-d", by_head, case, fused=True, upstream=torch.ones(2))


@BACKEND
@pytest.mark.parametrize("kept", [False, True], ids=["all ids", "kept ids"])
@pytest.mark.parametrize("with_rows", [False, True], ids=["", "rows"])
@pytest.mark.parametrize("chunk", [4, 11])
def test_every_chunk_gives_what_the_logits_give(chunk: int, with_rows: bool, kept: bool, backend: str) -> None:
    case, tolerance = of_backend(backend)
    options: dict[str, Any] = {"temperature": 0.8, "mask": case.batch["loss_mask"], "vocab_size": 13}
    if kept:
        options["support"] = random_support(case.targets, 13, torch.Generator().manual_seed(0))
    wanted = {**WANTED, "top_ids": torch.stack([case.targets, case.targets.roll(1)], 1)}
    expected = vocab_parallel_distribution(
        case.hidden @ case.weight.T, case.targets, backend="torch", **options, **wanted
    )
    if with_rows:
        options["rows"] = case.batch["loss_mask"].nonzero()[:, 0]
    head = HeadInputs(chunk=chunk, **options)
    found = linear_distribution(case.hidden, case.weight, case.targets, head=head, backend=backend, **wanted)
    for name, value in expected._asdict().items():
        if value is None:
            assert name == "kept_mass" and not kept and found.kept_mass is None
        else:
            assert value.unique().numel() > 3 and distance(getattr(found, name), value.double()) <= tolerance, name
