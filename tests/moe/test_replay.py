"""Routes of a real Megatron model: recorded, replayed bit for bit, and the sampler's own followed."""

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch
from distributed import run_ranks
from moe_runs import MODEL, batch_of, restore, routing_of, sampled, save_model, step, weights, world
from refusals import refusal, refuses
from torch import Tensor

from megatron_rc.correction.settings import Rejection, RolloutCorrection, Weight

LAYERS = [0, 2, 3]
"""With experts; layer 1 is dense."""
SHIFT_GATE = RolloutCorrection(Weight(), (Rejection("route_shift", "token", upper=0.4),))
LAYOUTS: dict[str, dict[str, int]] = {
    "experts": {"expert": 2}, "stages": {"pipeline": 2}, "rows": {"tensor": 2},
    "rows and experts": {"tensor": 2, "expert": 2},
}  # fmt: skip
LAYOUTS_OF_4: dict[str, dict[str, int]] = {
    "stages and experts": {"pipeline": 2, "expert": 2}, "stages and rows": {"pipeline": 2, "tensor": 2},
    "rows and data": {"tensor": 2},
}  # fmt: skip
REPLAYS = ("none", "R2", "R3")
EXACT = ("route_any_diff", "route_tokens_touched", "route_layers_differing", "replay/share", "replay/disagreement")
"""Quotients of counts."""


def gradients(policy: Any, batch: Any, **tables: Tensor) -> dict[str, Any]:
    """Log-probs, loss and gradients of an update pass over two micro-batches, which leaves the weights as they are."""
    from megatron_rc.training.microbatches import MicroExtras, split_rows
    from megatron_rc.training.step.routing import StepRoutes

    before, out = weights(policy), dict[str, Any]()

    def loss(answer: Any) -> tuple[Tensor, Any]:
        logprobs, _ = answer.logprobs()
        value = -(logprobs * answer.micro.batch.loss_mask).sum()
        return value, (logprobs.detach(), value.detach())

    def look(outputs: list[Any]) -> None:
        out["logprobs"], out["loss"] = torch.cat([o[0] for o in outputs]), torch.stack([o[1] for o in outputs])
        out["gradients"] = {n: p.main_grad.clone() for n, p in policy.modules[0].named_parameters()}

    routes = StepRoutes(routing_of(policy, record=True), None)
    parts = split_rows(batch, [[0, 1, 2], [3, 4, 5, 6, 7]], MicroExtras(**tables))
    policy.update(parts, loss, before_step=look, around=routes.around)
    restore(policy, before)
    return out | {"table": routes.recorded}


def _is_freed(path: str) -> bool:
    with world(path) as policy:
        module = weakref.ref(policy.modules[0])
        step(policy, sampled(policy, flipped=False), record=True)
    del policy
    gc.collect()
    return module() is None


def _one_process(rank: int, path: str) -> dict[str, Any]:
    from megatron.core.transformer.moe.router_replay import RouterReplay

    out: dict[str, Any] = {"freed": _is_freed(path)}
    with world(path) as policy:
        registered = list(RouterReplay.global_router_replay_instances)
        start = weights(policy)
        plain, flipped = sampled(policy, flipped=False), sampled(policy, flipped=True)
        out["samples"] = plain
        batch = batch_of(flipped)

        def run(samples: Any = flipped, **options: Any) -> Any:
            restore(policy, start)
            return step(policy, samples, **options)

        out["plain"] = run(plain, record=True).metrics
        out["off"] = run(record=True).metrics
        out["R3"] = run(record=True, replay="R3")
        out["R3 two-policy"] = run(correction=RolloutCorrection(old="current"), record=True, replay="R3").metrics
        for replay in ("none", "R2", "R3"):
            out[f"mini {replay}"] = run(record=True, replay=replay, mini=2).metrics
        out["no routing"] = run().metrics
        out["gate"] = run(correction=SHIFT_GATE, record=True)
        restore(policy, start)

        free = gradients(policy, batch)
        own = gradients(policy, batch, replayed_routes=free["table"].ids, compared_routes=free["table"].ids)
        out["free"], out["own"] = free, own
        three = torch.tensor([4, 0, 7]).to(torch.int16).expand(batch.num_tokens, 3, 3)
        out["three"] = gradients(policy, batch, replayed_routes=three)
        config = policy.modules[0].config
        config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", "uniform", 1
        sampler = batch.routes[:, LAYERS].to(torch.int16)
        sampler[batch.cu_seqlens[1:].long() - 1] = torch.tensor([0, 1, 2], dtype=torch.int16)
        out["recomputed"] = gradients(policy, batch, replayed_routes=sampler)
        config.recompute_granularity = None
        out["kept"] = gradients(policy, batch, replayed_routes=sampler)
        out["left"] = [r.router_replay for routers in routing_of(policy, record=True).chunks for r in routers.values()]
        out["registered"] = RouterReplay.global_router_replay_instances == registered
        for name, change in {"dtype": three.float(), "layers": three[:, :2]}.items():
            out[name] = refusal(gradients, policy, batch, replayed_routes=change)
            restore(policy, start)
        out["after an error"] = gradients(policy, batch)
    return out


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def found(model: str) -> dict[str, Any]:
    return run_ranks(1, _one_process, model)[0]


def test_trainer_and_sampler_of_equal_weights_choose_the_same_experts(found: dict[str, Any]) -> None:
    metrics = found["plain"]
    assert metrics["old/route_any_diff"] == 0.0 and metrics["old/route_overlap"] == 1.0
    assert metrics["old/route_layers"] == LAYERS and metrics["old/k3"] < 1e-10
    for sample in found["samples"]:
        ids = sample.routes
        assert ids.shape == (len(sample.prompt_ids) + len(sample.output_ids) - 1, 4, 3) and not ids[:, 1].any()
        assert (ids[:, LAYERS].sort(-1).values.diff() > 0).all(), "distinct experts"


def test_a_planted_flip_shows_without_replay_and_is_gone_with_the_samplers_routes(found: dict[str, Any]) -> None:
    old, local = found["R3"].columns["old_logprobs"], found["R3"].share.batch
    assert (old - local.rollout_logprobs)[local.loss_mask].abs().max() < 1e-4
    assert found["off"]["old/k3"] > 1e-2 and found["off"]["old/abs_log_ratio_shifted"] > 0.05
    assert found["off"]["old/route_any_diff"] > 0.3 and found["off"]["old/route_overlap"] < 0.9


def test_replay_says_how_much_it_replayed_and_how_often_the_router_disagrees(found: dict[str, Any]) -> None:
    metrics, local = found["R3"].metrics, found["R3"].share.batch
    assert metrics["replay/share"] == pytest.approx(1 - local.num_sequences / local.num_tokens)
    # the weights are those of the old pass, and so are the experts that the routers wanted
    assert metrics["replay/disagreement"] == metrics["old/route_any_diff"] > 0.3
    assert found["mini R2"]["replay/share"] == 1.0 and 0 < found["mini R2"]["replay/disagreement"] < 1
    assert "replay/share" not in found["off"]
    assert found["R3 two-policy"]["current/k3"] < 1e-9 and found["R3 two-policy"]["current/route_any_diff"] > 0.3


def test_replay_holds_the_routes_over_the_optimizer_steps_of_a_rollout(found: dict[str, Any]) -> None:
    off, r2 = found["mini none"], found["mini R2"]
    assert off["current_old/route_any_diff"] > 0 and off["current_old/route_kl"] > 0
    assert r2["current_old/k3"] != off["current_old/k3"]
    assert r2["replay/disagreement"] == pytest.approx(r2["current_old/route_any_diff"])


def test_recording_changes_nothing_that_is_trained(found: dict[str, Any]) -> None:
    without, recorded = found["no routing"], found["off"]
    for name in ("grad_norm", "old/k3", "current_old/k3", "entropy"):
        assert without[name] == recorded[name], name


def test_replaying_the_trainers_own_routes_changes_no_bit(found: dict[str, Any]) -> None:
    free, own = found["free"], found["own"]
    assert torch.equal(free["logprobs"], own["logprobs"]) and torch.equal(free["loss"], own["loss"])
    assert free["gradients"].keys() == own["gradients"].keys()
    for name, gradient in free["gradients"].items():
        assert torch.equal(gradient, own["gradients"][name]), name
    assert torch.equal(free["table"].margins, own["table"].margins)
    # megatron-core 0.19 sorts the experts of a row only where gradients are wanted: each keeps its log-prob
    for mine, theirs in zip(by_expert(free["table"]), by_expert(own["table"]), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(own["table"].reference_logprobs, free["table"].logprobs)


def by_expert(table: Any) -> tuple[Tensor, Tensor]:
    ids, order = table.ids.sort(-1)
    return ids, table.logprobs.gather(-1, order)


def test_after_an_error_nothing_is_replayed_any_more(found: dict[str, Any]) -> None:
    assert torch.equal(found["after an error"]["logprobs"], found["free"]["logprobs"])
    assert found["left"] == [None, None, None] and found["registered"]
    assert "target must be int16, int32 or int64, got torch.float32" in found["dtype"]
    assert "target must hold 3 layers of 3 experts, got (2, 3)" in found["layers"]


def test_a_closed_policy_keeps_no_model(found: dict[str, Any]) -> None:
    assert found["freed"]


def test_the_gradient_reaches_the_replayed_experts_and_no_others(found: dict[str, Any]) -> None:
    for name, gradient in found["three"]["gradients"].items():
        if ".experts.local_experts." in name:
            assert bool(gradient.any()) == (int(name.split(".local_experts.")[1].split(".")[0]) in (0, 4, 7)), name
        elif name.endswith("router.weight"):
            assert [bool(row.any()) for row in gradient] == [e in (0, 4, 7) for e in range(8)], name
    assert (found["three"]["table"].ids != torch.tensor([4, 0, 7])).any(), "the live choice is recorded, not the given"


def test_recomputed_layers_take_the_replayed_routes_of_their_own_micro_batch(found: dict[str, Any]) -> None:
    kept, recomputed = found["kept"], found["recomputed"]
    assert torch.equal(kept["logprobs"], recomputed["logprobs"])
    for name, gradient in kept["gradients"].items():
        assert torch.equal(gradient, recomputed["gradients"][name]), name
    assert not torch.equal(kept["logprobs"], found["free"]["logprobs"])


def test_recorded_margins_and_log_probs_are_those_of_the_routers(found: dict[str, Any]) -> None:
    table = found["free"]["table"]
    assert table.ids.dtype == torch.int16 and table.shape.layers == tuple(LAYERS)
    assert (table.margins > 0).all() and (table.logprobs.diff(dim=-1) <= 0).all()
    assert (table.logprobs.exp().sum(-1) < 1).all()


def test_a_rejection_on_route_shift_drops_exactly_the_tokens_above_it(found: dict[str, Any]) -> None:
    result, touched = found["gate"], found["off"]["old/route_tokens_touched"]
    rejected = result.metrics["old/rejected_route_shift_token_token"]
    assert 0 < rejected < touched, "one of three layers is allowed to differ"
    assert result.columns["mask"].sum() / result.share.batch.loss_mask.sum() == pytest.approx(1 - rejected)


def _layouts(rank: int, path: str, layouts: dict[str, dict[str, int]]) -> dict[str, dict[str, dict[str, Any]]]:
    out: dict[str, dict[str, dict[str, Any]]] = {}
    for name, layout in layouts.items():
        with world(path, **layout) as policy:
            start, samples, out[name] = weights(policy), sampled(policy, flipped=True), {}
            for replay in REPLAYS:
                restore(policy, start)
                out[name][replay] = step(policy, samples, record=True, replay=replay, mini=2).metrics
    return out


@pytest.fixture(scope="module")
def two(model: str) -> list[Any]:
    return run_ranks(2, _layouts, model, LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("replay", REPLAYS)
def test_two_ranks_replay_and_measure_as_one(layout: str, replay: str, two: list[Any], found: dict[str, Any]) -> None:
    assert_same(two[0][layout][replay], found[f"mini {replay}"])
    assert str(two[0][layout][replay]) == str(two[1][layout][replay])


@pytest.mark.full
def test_four_processes_replay_and_measure_what_one_does(model: str, found: dict[str, Any]) -> None:
    ranks = run_ranks(4, _layouts, model, LAYOUTS_OF_4)
    assert all(str(rank) == str(ranks[0]) for rank in ranks)
    for replays in ranks[0].values():
        for replay, metrics in replays.items():
            assert_same(metrics, found[f"mini {replay}"])


def assert_same(metrics: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(metrics) == set(expected)
    for name, value in expected.items():
        given, wanted = (torch.tensor(v, dtype=torch.float64) for v in (metrics[name], value))
        # against the replayed sampler the log-ratio is rounding alone
        rtol, atol = (1e-12, 0.0) if name.endswith(EXACT) else (1e-4, 2e-6)
        rounding = name == "horizon" and value > 1e9  # 1 / (2 k3)
        if name not in ("tokens_per_second", "updates") and not rounding:
            said = lambda m, n=name: f"{n}: {m}"  # noqa: E731
            torch.testing.assert_close(given, wanted, rtol=rtol, atol=atol, equal_nan=True, msg=said)


def test_samples_whose_routes_cannot_be_trusted_are_refused(found: dict[str, Any]) -> None:
    from megatron_rc.moe.tables import MoeShape, check_replayable, check_samples, sampler_table

    samples, batch = found["samples"], batch_of(found["samples"])
    shape = MoeShape(4, (0, 2, 3), 3, MODEL["num_experts"])
    with pytest.raises(ValueError, match="sample 1 was retracted 2 times"):
        check_samples([samples[0], dataclasses.replace(samples[1], retractions=2)])
    with pytest.raises(ValueError, match="routes must hold the model's 48 layers, got 4"):
        sampler_table(batch.routes, batch.cu_seqlens, dataclasses.replace(shape, num_layers=48))
    with pytest.raises(ValueError, match="routes must hold 8 experts per layer, got 3"):
        sampler_table(batch.routes, batch.cu_seqlens, dataclasses.replace(shape, top_k=8))
    with pytest.raises(ValueError, match=r"routes must be int16, int32 or int64, got torch.uint8"):
        sampler_table(batch.routes.to(torch.uint8), batch.cu_seqlens, shape)
    check_replayable(batch.routes, batch.lengths, shape)
    for value, sentence in ((8, "layer 2 name an expert outside of 8"), (None, "layer 2 name an expert twice")):
        broken = batch.routes.clone()
        broken[1, 2, 0] = broken[1, 2, 1] if value is None else value
        refuses(sentence, check_replayable, broken, batch.lengths, shape)


def test_a_model_without_experts_has_no_routes() -> None:
    from tiny_models import DENSE

    from megatron_rc.rollout.embedded.engine import EmbeddedEngine
    from megatron_rc.training.step.routing import moe_shape

    refuses("need a model with experts", moe_shape, {**MODEL, "num_experts": 0})
    with pytest.raises(ValueError, match="return_routes needs a model with experts"):
        EmbeddedEngine(DENSE, dtype="fp32", device="cpu", return_routes=True)
