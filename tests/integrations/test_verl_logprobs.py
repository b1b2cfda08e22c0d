"""vocab_parallel_logprobs in verl's Megatron workers: against verl's own function on two tensor-parallel ranks."""

import sys
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from hosts.verl import own_logits, sources
from hosts.verl.stand_in import module, patched
from hosts.verl.stand_in import stub as stub

ENGINE = "verl.workers.engine.megatron.transformer_impl"
SETTINGS = "{vocab_parallel_logprobs: true}"
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


def _rank(rank: int, tree: str | None) -> dict[bool, dict[str, Any]]:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    sys.path.insert(0, str(sources.STUB))
    engine = module(ENGINE).MegatronEngineWithLMHead()
    theirs = engine._lm_head_logits_processor if tree is None else own_logits.logits_processor(tree)
    answers = {with_entropy: {"theirs": _answer(theirs, rank, with_entropy)} for with_entropy in (True, False)}
    with patched(SETTINGS):
        # the first call exchanges the widths of the shards
        _answer(engine._lm_head_logits_processor, rank, True)
        for with_entropy, found in answers.items():
            found["ours"] = _answer(engine._lm_head_logits_processor, rank, with_entropy)
    return answers


_ranks = cache(partial(run_ranks, RANKS, _rank))


@pytest.mark.host("verl", proof="own code", feature="tensor-parallel ranks")
@pytest.mark.host("verl", proof="stand-in", feature="tensor-parallel ranks")
@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("source", ["stand-in", "verl"])
def test_log_probs_entropy_and_gradient_are_verls_with_one_collective(source: str, with_entropy: bool) -> None:
    ranks = [rank[with_entropy] for rank in _ranks(own_logits.tree(source))]
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
    with patched(SETTINGS), pytest.raises(ValueError, match=f"must be False where verl asks for {asked}"):
        module(ENGINE).MegatronEngineWithLMHead()._lm_head_logits_processor(
            torch.zeros(1, 1, 4), torch.zeros(1, 1), torch.ones(1, 1), calculate_entropy=False, **{**PLAIN, asked: True}
        )
