"""Which process sees which rows and layers, and one schedule's queues, on synthetic tables and stand-in routers."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from context_slice import context_slice
from refusals import refuses
from torch import Tensor

from megatron_rc.batch import TokenBatch
from megatron_rc.engine import Sample, SamplingParams
from megatron_rc.moe.replay import RoutedSchedule
from megatron_rc.moe.routers import routers_of
from megatron_rc.moe.slicing import join_rows, local_rows, take_rows
from megatron_rc.moe.tables import MoeShape, sampler_table

LAYERS = 16
SHAPE = MoeShape(LAYERS, tuple(i for i in range(LAYERS) if i not in (0, 5)), top_k=3, num_experts=10)
LENGTHS = ((5, 0, 17, 1), (40,), (3, 3))
"""Lengths of the sequences of three micro-batches."""
SIZES = (1, 2, 4)
STAGES = [(1, 1), *itertools.product(SIZES[1:], (1, 2))]
"""Pipeline stages and chunks of each: megatron-core has no virtual stages without stages."""
ONE_F_ONE_B = [("forward", 0), ("forward", 1), ("back", 0), ("forward", 2), ("back", 1), ("back", 2)]
FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}


class Router:
    """Asks for its top-k as megatron-core's router does."""

    def __init__(self, **config: Any) -> None:
        defaults = {"moe_router_fusion": False, "recompute_granularity": None, "recompute_modules": None}
        defaults |= {"moe_router_pre_softmax": False, "recompute_method": None}
        self.config = SimpleNamespace(**{**defaults, **config})
        self.routing_type, self.score_function, self.expert_bias = "none", "softmax", None
        self.router_replay: Any = None

    def __call__(self, scores: Tensor) -> Tensor:
        def topk(values: Tensor, k: int, num_groups: Any = None, group_topk: Any = None) -> Any:
            return torch.topk(values, k=k, dim=1)

        return self.router_replay.get_replay_topk(scores, SHAPE.top_k, None, None, topk)[1]


def chunk_layers(stages: int, virtual: int, stage: int, chunk: int) -> list[int]:
    """By megatron-core: the layers of one chunk."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=8, num_attention_heads=2, pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None, pipeline_dtype=torch.float32,
    )  # fmt: skip
    first = get_transformer_layer_offset(config, chunk if virtual > 1 else None, stage)
    return list(range(first, first + get_num_layers_to_build(config, chunk if virtual > 1 else None, stage)))


def expected_rows(lengths: tuple[int, ...], context: tuple[int, int], tensor: tuple[int, int], multiple: int) -> Tensor:
    """Rows of one rank by padding, reshaping and cutting, where every sequence divides evenly."""
    (size, rank), parts, start = context, [], 0
    for length in lengths:
        padded = -(-length // multiple) * multiple
        rows = torch.full((padded,), -1).index_copy(0, torch.arange(length), torch.arange(start, start + length))
        chunks = rows.view(2 * size, -1)
        parts.append(torch.stack([chunks[rank], chunks[2 * size - 1 - rank]]).flatten())
        start += length
    rows = torch.cat(parts)
    return torch.cat([rows, torch.full((-len(rows) % tensor[0],), -1)]).view(tensor[0], -1)[tensor[1]]


def drawn(seed: int, tokens: int) -> Tensor:
    """[tokens, layers, experts] scores without ties."""
    return torch.rand(tokens, LAYERS, SHAPE.num_experts, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tensor", SIZES)
@pytest.mark.parametrize("context", SIZES)
@pytest.mark.parametrize(("stages", "virtual"), STAGES)
def test_ranks_replay_and_record_their_part_of_the_whole(tensor: int, context: int, stages: int, virtual: int) -> None:
    tables = [drawn(i, sum(n)).argsort(-1)[:, :, : SHAPE.top_k] for i, n in enumerate(LENGTHS)]
    scores = [drawn(10 + i, sum(n)) for i, n in enumerate(LENGTHS)]
    live = [s.topk(SHAPE.top_k).indices for s in scores]
    moe = list(SHAPE.layers)
    places = list(itertools.product(range(context), range(tensor)))
    multiple = 2 * context
    cut: dict[str, int] = {"context_size": context, "tensor_size": tensor, "sequence_multiple": multiple}
    seen: dict[int, list[list[Tensor]]] = {}
    for stage in range(stages):
        owned = [chunk_layers(stages, virtual, stage, chunk) for chunk in range(virtual)]
        for c, t in places:
            rows = [local_rows(n, context_rank=c, tensor_rank=t, **cut) for n in LENGTHS]
            routers = [{layer: Router() for layer in layers if layer in moe} for layers in owned]
            with RoutedSchedule(routers, SHAPE, forward_only=True) as schedule:
                for micro, chunk in itertools.product(range(len(LENGTHS)), range(virtual)):
                    mine = rows[micro]
                    assert torch.equal(mine, expected_rows(LENGTHS[micro], (context, c), (tensor, t), multiple))
                    with schedule.forward(chunk, target=take_rows(tables[micro][:, moe], mine, SHAPE)):
                        for layer, router in routers[chunk].items():
                            used = router(scores[micro][mine.clamp(min=0), layer])
                            assert torch.equal(used[mine >= 0], tables[micro][mine[mine >= 0], layer])
                            assert (used.sort(-1).values.diff() > 0).all(), "padding names distinct experts"
            for layer, passes in schedule.recorded().items():
                seen.setdefault(layer, [[] for _ in LENGTHS])
                for micro, one in enumerate(passes):
                    seen[layer][micro].append(one.ids)
    assert sorted(seen) == moe
    for layer, micros in seen.items():
        for micro, parts in enumerate(micros):
            rows = [local_rows(LENGTHS[micro], context_rank=c, tensor_rank=t, **cut) for c, t in places]
            assert torch.equal(join_rows(parts, rows, sum(LENGTHS[micro])).long(), live[micro][:, layer])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_without_padding_the_rows_are_those_of_the_token_batch(size: int) -> None:
    samples = [Sample([1] * p, [2] * o, [0.0] * o, "stop") for p, o in ((3, 4), (1, 1), (6, 9))]
    batch = TokenBatch.from_samples(samples, SamplingParams())
    batch.tokens = torch.arange(batch.num_tokens)
    for rank in range(size):
        rows = local_rows(batch.lengths, context_size=size, context_rank=rank)
        assert torch.equal(rows, context_slice(batch, size, rank).tokens)


def test_the_last_token_of_a_sequence_gets_distinct_experts_and_dense_layers_are_left_out() -> None:
    routes = torch.stack([torch.tensor([[1, 0], [9, 9], [2, 1]])] * 7)
    table = sampler_table(routes, torch.tensor([0, 3, 3, 7]), MoeShape(3, (0, 2), top_k=2, num_experts=3))
    assert table.ids.shape == (7, 2, 2) and table.ids.dtype == torch.int16
    for row in (0, 1, 3, 4, 5):
        assert table.ids[row].tolist() == [[1, 0], [2, 1]]
    assert table.ids[2].tolist() == [[1, 2], [1, 2]] and table.ids[6].tolist() == [[0, 1], [0, 1]]


def backward_schedule(routers: dict[int, Router], order: list[tuple[str, int]], **config: Any) -> list[Tensor]:
    """Forward passes and recomputations of micro-batches in an order; what each recomputation used."""
    tables = [drawn(i, 4).argsort(-1)[:, :, : SHAPE.top_k] for i in range(3)]
    scores, used = drawn(9, 4), []
    for router in routers.values():
        vars(router.config).update(config)
    with RoutedSchedule([routers], SHAPE, forward_only=False) as schedule:
        for kind, micro in order:
            if kind == "forward":
                with schedule.forward(0, target=tables[micro][:, list(SHAPE.layers)]):
                    for layer, router in routers.items():
                        router(scores[:, layer])
            else:
                used += [router(scores[:, layer]) for layer, router in routers.items()]
                replayed = zip(used[-len(routers) :], routers, strict=True)
                assert all(torch.equal(ids, tables[micro][:, layer]) for ids, layer in replayed)
    return used


def test_interleaved_recomputation_takes_the_routes_of_its_own_micro_batch() -> None:
    routers = {1: Router(), 2: Router()}
    assert len(backward_schedule(routers, ONE_F_ONE_B, **FULL)) == 6
    assert all(router.router_replay is None for router in routers.values())


@pytest.mark.parametrize(
    ("order", "config", "sentence"),
    [
        (ONE_F_ONE_B[:-1], FULL, "layer 1: 1 of 3 replayed micro-batches were not recomputed"),
        (ONE_F_ONE_B[:-1], {"recompute_granularity": "selective", "recompute_modules": ["moe"]}, "1 of 3 replayed"),
        (ONE_F_ONE_B, {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, "0 of 3 replayed"),
        ([*ONE_F_ONE_B, ("back", 2)], FULL, "layer 1: more forward passes were recomputed than were replayed"),
    ],
)
def test_a_queue_that_is_not_consumed_is_an_error(order: Any, config: dict[str, Any], sentence: str) -> None:
    router = Router()
    refuses(sentence, backward_schedule, {1: router}, order, **config)
    assert router.router_replay is None, "cleared all the same"


def test_a_router_that_does_not_run_is_an_error() -> None:
    with (
        pytest.raises(ValueError, match="layer 1: its router ran 0 times in 1 forward passes"),
        RoutedSchedule([{1: Router()}], SHAPE, forward_only=True) as schedule,
        schedule.forward(0),
    ):
        pass


def test_routes_for_other_rows_or_for_some_micro_batches_only_are_refused() -> None:
    router, table = Router(), take_rows(torch.zeros(0, 14, 3, dtype=torch.int16), torch.arange(4), SHAPE)
    with (
        pytest.raises(ValueError, match="layer 1: 4 rows of routes were given for 5 rows of tokens"),
        RoutedSchedule([{1: router}], SHAPE, forward_only=True) as schedule,
        schedule.forward(0, target=table),
    ):
        router(torch.rand(5, SHAPE.num_experts))
    with RoutedSchedule([{1: router}], SHAPE, forward_only=True) as schedule:
        with schedule.forward(0):
            router(torch.rand(4, SHAPE.num_experts))
        refuses("target must be given for every micro-batch", schedule.forward(0, target=table).__enter__)


def model_of(layers: dict[int, Any], **others: Any) -> Any:
    decoder = [SimpleNamespace(layer_number=n + 1, mlp=SimpleNamespace(router=r) if r else SimpleNamespace())
               for n, r in layers.items()]  # fmt: skip
    return SimpleNamespace(module=SimpleNamespace(decoder=SimpleNamespace(layers=decoder), **others))


def test_routers_are_found_by_layer_in_the_decoder_alone() -> None:
    first, third = Router(), Router()
    prediction = SimpleNamespace(layers=[SimpleNamespace(layer_number=1, mlp=SimpleNamespace(router=Router()))])
    found = routers_of(model_of({7: third, 4: None, 2: first}, mtp=prediction))
    assert found == {2: first, 7: third} and list(found) == [2, 7]
    assert routers_of(model_of({0: None})) == {}


def test_routers_that_cannot_be_replayed_are_refused() -> None:
    refuses("moe_router_fusion must be False", routers_of, model_of({0: Router(moe_router_fusion=True)}))
    sinkhorn = Router()
    sinkhorn.routing_type = "sinkhorn"
    refuses("moe_router_load_balancing_type must not be 'sinkhorn'", routers_of, model_of({0: sinkhorn}))


@pytest.mark.parametrize("kind", ["softmax", "softmax before top-k", "sigmoid", "sigmoid with bias"])
def test_log_probs_and_margins_are_those_of_every_kind_of_router(kind: str) -> None:
    from megatron_rc.moe.routers import RouterTap

    logits = torch.randn(6, SHAPE.num_experts, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    router, probabilities = Router(moe_router_pre_softmax=kind.endswith("top-k")), logits.softmax(-1)
    scores, compared = logits, logits.log_softmax(-1)
    if kind.endswith("top-k"):
        scores = probabilities
    if kind.startswith("sigmoid"):
        router.score_function = "sigmoid"
        scores = compared = logits.sigmoid()
        probabilities = scores / scores.sum(-1, keepdim=True)
    if kind.endswith("bias"):
        router.expert_bias = torch.linspace(0, 1, SHAPE.num_experts)
        scores = compared = scores + router.expert_bias.double()
    reference = torch.tensor([[4, 1, 7]] * 6)
    tap = RouterTap(router, 0, detail=True, dtype=torch.int16)  # type: ignore[arg-type]
    tap.reference = reference
    tap.attach()
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    tap.set_router_replay_action(RouterReplayAction.RECORD)
    ids = router(scores.float())
    (seen,) = tap.seen
    ordered = compared.sort(-1, descending=True).values
    close = {"rtol": 1e-5, "atol": 1e-6, "check_dtype": False}
    torch.testing.assert_close(seen.margins, ordered[:, 2] - ordered[:, 3], **close)
    torch.testing.assert_close(seen.logprobs, probabilities.log().gather(1, ids), **close)
    torch.testing.assert_close(seen.reference_logprobs, probabilities.log().gather(1, reference), **close)
