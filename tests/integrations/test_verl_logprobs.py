"""Log-probs and entropy in verl's Megatron workers: of sharded logits against verl's own function, and `head: linear`.

The head runs in verl's own functions, against fp64 and against verl's kernel.
"""

import json
import sys
from functools import cache, partial
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from hosts.verl import own_head, own_logits, sources
from hosts.verl.head_job import Answer, Case, answers, case, recorded, truth
from hosts.verl.stand_in import module, patched
from hosts.verl.stand_in import stub as stub
from megatron.core import parallel_state

from megatron_rc import RolloutCorrection, patch
from megatron_rc.integrations.verl import logprobs
from megatron_rc.integrations.verl.settings import prepared, read
from megatron_rc.training import emulation

LINEAR, SHARDED = "{head: linear}", "{vocab_parallel_logprobs: true}"
FUSED, ENGINE = "verl.models.mcore.model_forward_fused", "verl.workers.engine.megatron.transformer_impl"
NAMES = ("log_probs", "entropy")
ROWS, VOCABULARY, RANKS = (1, 9), 24, 2
PLAIN = {
    **dict.fromkeys(("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only"), False),
    **dict.fromkeys(("logits_processor_func", "batch", "data_format")),
}


def _answer(processor: Any, rank: int, with_entropy: bool) -> dict[str, Any]:
    """Results of this rank, the gradient of its logits by both results, and the names of the collectives."""
    random = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(*ROWS, VOCABULARY, generator=random)
    labels = torch.randint(VOCABULARY, ROWS, generator=random)
    temperature, upstream = torch.full(ROWS, 0.7), torch.randn(2, *ROWS, generator=random)
    temperature[0, -1] = 0  # padding
    mine = logits.chunk(RANKS, -1)[rank].clone().requires_grad_()
    called: list[str] = []

    def counted(name: str, original: Any) -> Any:
        return lambda *args, **kwargs: (called.append(name), original(*args, **kwargs))[1]

    with pytest.MonkeyPatch.context() as counting:
        for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single"):
            if hasattr(dist, name):
                counting.setattr(dist, name, counted(name, getattr(dist, name)))
        # a copy, which the functions may write into
        found = processor(mine * 1, labels, temperature.clone(), calculate_entropy=with_entropy, **PLAIN)
    torch.autograd.backward([found[name] for name in NAMES if name in found], list(upstream[: len(found)]))
    assert mine.grad is not None
    kept = {name: value.detach()[:, :-1] for name, value in found.items()}
    return {**kept, "gradient": mine.grad[:, :-1], "collectives": called}


def _rank_of_logits(rank: int, tree: str | None) -> dict[bool, dict[str, Any]]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    sys.path.insert(0, str(sources.STUB))
    engine = module(ENGINE).MegatronEngineWithLMHead()
    theirs = engine._lm_head_logits_processor if tree is None else own_logits.logits_processor(tree)
    answers = {with_entropy: {"theirs": _answer(theirs, rank, with_entropy)} for with_entropy in (True, False)}
    with patched(SHARDED):
        # the first call exchanges the widths of the shards
        _answer(engine._lm_head_logits_processor, rank, True)
        for with_entropy, found in answers.items():
            found["ours"] = _answer(engine._lm_head_logits_processor, rank, with_entropy)
    return answers


_ranks_of_logits = cache(partial(run_ranks, RANKS, _rank_of_logits))


@pytest.mark.host("verl", proof="own code", feature="tensor-parallel ranks")
@pytest.mark.host("verl", proof="stand-in", feature="tensor-parallel ranks")
@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("source", ["stand-in", "verl"])
def test_log_probs_entropy_and_gradient_are_verls_with_one_collective(source: str, with_entropy: bool) -> None:
    ranks = [rank[with_entropy] for rank in _ranks_of_logits(own_logits.tree(source))]
    for found in ranks:
        theirs, ours = found["theirs"], found["ours"]
        assert ours.keys() == theirs.keys() and ("entropy" in ours) == with_entropy
        for name in ours.keys() - {"collectives"}:
            assert ours[name].dtype == torch.float32
            torch.testing.assert_close(ours[name], theirs[name], rtol=2e-6, atol=2e-6)
        assert len(ours["collectives"]) == 1
        if source == "verl":
            assert theirs["collectives"] == ["all_reduce"] * (6 if with_entropy else 3)
    assert torch.equal(ranks[0]["ours"]["log_probs"], ranks[1]["ours"]["log_probs"])


@pytest.mark.parametrize("asked", ["calculate_sum_pi_squared", "distillation_use_topk", "distillation_only"])
def test_what_needs_the_softmax_of_all_ids_is_refused_by_name(asked: str) -> None:
    with patched(SHARDED), pytest.raises(ValueError, match=f"must be False where verl asks for {asked}"):
        module(ENGINE).MegatronEngineWithLMHead()._lm_head_logits_processor(
            torch.zeros(1, 1, 4), torch.zeros(1, 1), torch.ones(1, 1), calculate_entropy=False, **{**PLAIN, asked: True}
        )


RECORDED = json.loads((sources.HERE / "head.json").read_text())
DTYPES = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
"""Largest relative distance of a gradient; that of log-probs is 2e-6 in both."""


def _ours(tree: str | None) -> dict[str, Any]:
    """The functions of the stand-in as they are patched, or those of a tree with what the patch replaces them by."""
    if tree is None:
        return {name: getattr(module(FUSED), name) for name in own_head.FUNCTIONS}
    made = own_head.functions(tree, None)  # ours call no kernel of verl
    state = prepared(read(LINEAR))
    return {name: partial(logprobs.with_our_head, own, state) for name, own in made.items()}


def _rank_of_states(rank: int, tree: str | None) -> dict[Any, list[Answer]]:
    """Answers by layout and dtype."""
    emulation.emulate_cuda_on_cpu()
    sys.path.insert(0, str(sources.STUB))
    found = {}
    with patched(LINEAR):
        for ranks, sequence_parallel in own_head.LAYOUTS:
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
            for dtype in DTYPES:
                made = answers(_ours(tree), case(dtype), rank % ranks, ranks, sequence_parallel)
                found[(ranks, sequence_parallel), dtype] = made
            parallel_state.destroy_model_parallel()
    return found


_ranks_of_states = cache(partial(run_ranks, 2, _rank_of_states))


def _found(source: str, layout: tuple[int, bool], dtype: torch.dtype) -> list[list[Answer]]:
    """For every tensor-parallel rank, its answers."""
    return [rank[layout, dtype] for rank in _ranks_of_states(own_logits.tree(source))[: layout[0]]]


def _whole(parts: list[Answer], sequence_parallel: bool) -> Answer:
    """The answer of all ranks, which have the same log-probs and, unless they split the rows, gradients of rows."""
    for part in parts[1:]:
        assert torch.equal(part.log_probs, parts[0].log_probs) and torch.equal(part.entropy, parts[0].entropy)
        assert sequence_parallel or torch.equal(part.by_hidden, parts[0].by_hidden)
    rows = torch.cat([part.by_hidden for part in parts]) if sequence_parallel else parts[0].by_hidden
    return parts[0]._replace(by_hidden=rows, by_weight=torch.cat([part.by_weight for part in parts]))


@pytest.mark.host("verl", proof="own code", feature="log-probs without logits in memory")
@pytest.mark.parametrize("source", ["stand-in", "verl"])
@pytest.mark.parametrize("layout", own_head.LAYOUTS, ids=str)
def test_log_probs_entropy_and_gradients_are_those_of_all_logits_in_fp64(source: str, layout: tuple[int, bool]) -> None:
    for dtype, largest in DTYPES.items():
        given: Case = case(dtype)
        true = truth(given)
        for parts in zip(*_found(source, layout, dtype), strict=True):
            whole = _whole(list(parts), layout[1])
            assert whole.log_probs.dtype == whole.entropy.dtype == torch.float32
            for name, value, expected in zip(Answer._fields, whole, true, strict=True):
                assert value.shape == expected.shape
                allowed = largest if name.startswith("by") else 2e-6
                assert (value.double() - expected).norm() <= allowed * expected.norm(), (name, dtype)


@pytest.mark.host("verl", proof="recorded", feature="log-probs without logits in memory")
def test_they_are_what_the_kernel_of_verl_was_recorded_to_answer() -> None:
    found = recorded(_found("stand-in", (1, False), torch.float32)[0][0])
    assert found.keys() == RECORDED.keys()
    for name, values in RECORDED.items():
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(values), rtol=1e-5, atol=1e-5)


@pytest.mark.timeout(1000)
def test_they_are_what_the_kernel_of_verl_answers_which_sums_no_gradient_without_sequence_parallelism() -> None:
    tree = own_logits.tree("verl")
    assert tree is not None
    for layout, ranks in own_head.answers(tree).items():
        ours = _found("verl", layout, torch.float32)
        for theirs, mine in zip(zip(*ranks, strict=True), zip(*ours, strict=True), strict=True):
            parts = [Answer(*part) for part in theirs]
            if layout == (2, False):
                whole = parts[0].by_hidden + parts[1].by_hidden
                assert (parts[0].by_hidden - whole).norm() > 0.1 * whole.norm(), "a rank has its part alone"
                parts = [part._replace(by_hidden=whole) for part in parts]
            for value, other in zip(_whole(list(mine), layout[1]), _whole(parts, layout[1]), strict=True):
                torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-5)


def _engine(model: Any, *, mtp: bool = False, critic: bool = False) -> Any:
    engine = object.__new__(module(ENGINE).MegatronEngine)
    engine.engine_config = SimpleNamespace(use_fused_kernels=True)
    engine.is_value_model, engine.model_config = critic, SimpleNamespace(mtp=SimpleNamespace(enable=mtp))
    engine.module = [SimpleNamespace(module=model)]
    return engine


def test_a_worker_whose_fused_kernel_is_off_or_whose_logits_are_no_product_stops() -> None:
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import ColumnParallelLinear

    model, layer = object.__new__(GPTModel), object.__new__(ColumnParallelLinear)
    for made in (model, layer):
        torch.nn.Module.__init__(made)
    layer.bias, model.output_layer, model.post_process = None, layer, True
    model.config = SimpleNamespace()
    with patched(LINEAR):
        _engine(model)._maybe_enable_fused_kernels()
        _engine(None, critic=True)._maybe_enable_fused_kernels()
        with pytest.raises(ValueError, match=r"use_fused_kernels must be True .* verl turns it off"):
            _engine(model, mtp=True)._maybe_enable_fused_kernels()
        model.config.final_logit_softcapping = 30.0
        with pytest.raises(ValueError, match="final_logit_softcapping must be off"):
            _engine(model)._maybe_enable_fused_kernels()


def test_a_function_of_verl_that_calls_no_kernel_by_this_name_is_refused() -> None:
    def fused_output_processor(*, config: Any) -> None: ...

    assert isinstance(fused_output_processor, FunctionType)
    with pytest.raises(ValueError, match="fused_output_processor of verl must call linear_cross_entropy"):
        logprobs.with_our_head(fused_output_processor, None, config=SimpleNamespace(sequence_parallel=False))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hidden", "labels", "reduction", "sentence"),
    [((4, 1, 8), (1, 4), "sum", "reduction must be 'none'"), ((4, 2, 8), (2, 4), "none", "one packed row")],
)
def test_what_our_head_cannot_answer_is_refused(hidden: Any, labels: Any, reduction: str, sentence: str) -> None:
    def original(*, config: Any) -> Any:
        gather_from_sequence_parallel_region(None)  # type: ignore[name-defined]  # noqa: F821
        return linear_cross_entropy(torch.zeros(hidden), torch.zeros(5, 8), torch.zeros(labels), 1.0, reduction, None)  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(ValueError, match=sentence):
        logprobs.with_our_head(original, None, config=SimpleNamespace(sequence_parallel=False))  # type: ignore[arg-type]


def test_it_and_sharded_log_probs_are_off_unless_they_are_set_and_patch_takes_it_too() -> None:
    names = [(FUSED, name) for name in own_head.FUNCTIONS]
    with patched("{correction: none}"):
        assert not any(hasattr(getattr(module(where), name), "__wrapped__") for where, name in names)
        assert not hasattr(module(ENGINE).MegatronEngine._maybe_enable_fused_kernels, "__wrapped__")
        assert not hasattr(module(ENGINE).MegatronEngineWithLMHead._lm_head_logits_processor, "__wrapped__")
    with patch("verl", correction=RolloutCorrection(), head="linear") as ours:
        assert all(hasattr(getattr(module(where), name), "__wrapped__") for where, name in names)
        assert "head: linear" in ours.report()
    with pytest.raises(ValueError, match="head_chunk and head_logits_dtype must be null with verl"):
        patch("verl", correction=RolloutCorrection(), head="linear", head_chunk=7)
    assert not any(hasattr(getattr(module(where), name), "__wrapped__") for where, name in names)
