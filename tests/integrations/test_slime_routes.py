"""Where slime's response tokens lie on a rank, and routes inside slime and miles next to what the host replays."""

import random
from argparse import Namespace
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed import run_ranks
from hosts.slime import routers, sources
from hosts.slime.cases import Case, batch_of, ours, whole
from hosts.slime.host import given_to_tis, hooks, local_masks, micro_batch, naming, positions, rollout
from hosts.slime.routers import LAYERS, MICRO_BATCHES, OWN, REPLAYED, Model, Rows, by_environment, chosen
from hosts.slime.single import in_one_process as in_one_process
from megatron.core import parallel_state
from torch import Tensor

import megatron_rc.moe.routers  # noqa: F401 - before megatron is taken away
from megatron_rc.integrations.parallel import parallel
from megatron_rc.integrations.slime.hooks import rollout_data as rollout_hook
from megatron_rc.integrations.slime.layout import Layout
from megatron_rc.integrations.slime.routes import RouteWatch
from megatron_rc.integrations.slime.tokens import HostTokens
from megatron_rc.moe.watching import RouterWatch

WHOLE = {**naming("before_log_prob", "rollout_data"), "use_rollout_routing_replay": True, "get_mismatch_metrics": True}
UPDATE = {**WHOLE, **naming("before_train_step", "tis"), "use_tis": True, "rollout_data_postprocess_path": None}


@pytest.fixture(autouse=True)
def replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUTING_REPLAY_STAGE", "replay_forward")


def settings(correction: Any = "none", **changes: Any) -> Namespace:
    return ours(Case(), **{**WHOLE, "megatron_rc": {"correction": correction, "routes": True}, **changes})


def layout_of(totals: list[int], responses: list[int], padded: list[int] | None, rank: int, size: int) -> Layout:
    return Layout.of(zip(totals, responses, padded or totals, strict=True), rank, size)


def model_of(rows: Rows, layers: tuple[int, ...] = LAYERS, replay: Any = by_environment, **more: Any) -> Model:
    return Model(layers, {layer: replay(ids) for layer, ids in rows.replays().items()}, **more)


def shifts() -> list[Tensor]:
    """[response, L] per sample: whether the two engines chose other experts for the row that predicts the token."""
    own, replayed = ([ids.sort(-1).values for ids in chosen(seed)] for seed in (OWN, REPLAYED))
    samples = zip(own, replayed, whole().prompts, strict=True)
    return [(mine != theirs).any(-1)[prompt - 1 : -1] for mine, theirs, prompt in samples]


def data() -> dict[str, Any]:
    return {**batch_of(Case()), "micro_batch_indices": MICRO_BATCHES}


def test_rollout_data_logs_the_shift_of_the_loss_tokens() -> None:
    model, rollout = model_of(Rows()), data()
    hooks.before_log_prob(settings(), [model], "")
    Rows().forward(model)
    hooks.rollout_data(settings(), 0, rollout)
    mask = torch.cat(whole().loss_masks).bool()
    differs = torch.cat(shifts())[mask].float()
    assert rollout["rc/route_any_diff"] == pytest.approx(differs.mean().item())
    assert rollout["rc/route_tokens_touched"] == pytest.approx((differs.sum(1) > 0).float().mean().item())
    assert rollout["rc/route_layers_differing"] == pytest.approx(differs.sum(1).mean().item())
    ell = torch.cat(rollout["log_probs"]) - torch.cat(rollout["rollout_log_probs"])
    touched = ell[mask][differs.sum(1) > 0]
    assert rollout["rc/abs_log_ratio_shifted"] == pytest.approx(touched.abs().mean().item(), rel=1e-5)
    assert not any("by_layer" in name for name in rollout)
    assert all("routing" not in vars(router) for _, router in model.routers())


def test_a_rejection_on_the_route_shift_drops_the_advantage_of_shifted_tokens() -> None:
    gate = {"statistic": "route_shift", "level": "token", "upper": 0.4}
    model, rollout, args = model_of(Rows()), data(), settings({"reject": [gate]})
    before = torch.cat(rollout["advantages"])
    hooks.before_log_prob(args, [model], "")
    Rows().forward(model)
    hooks.rollout_data(args, 0, rollout)
    kept = (torch.cat(shifts()).float().mean(1) <= 0.4) & torch.cat(whole().loss_masks).bool()
    assert 0 < kept.sum() < len(kept)
    torch.testing.assert_close(torch.cat(rollout["advantages"]), torch.where(kept, before, 0))


def test_passes_of_other_models_and_the_update_are_not_watched() -> None:
    model = model_of(Rows())
    for prefix in ("ref_", "teacher_"):
        hooks.before_log_prob(settings(), [model], prefix)
        assert all("routing" not in vars(router) for _, router in model.routers())
    critic: Any = model_of(Rows())
    critic.role = "critic"
    hooks.before_log_prob(settings(), [critic], "")
    assert all("routing" not in vars(router) for _, router in critic.routers())
    hooks.before_log_prob(settings(), [model], "")
    assert all("routing" in vars(router) for _, router in model.routers())
    hooks.before_log_prob(settings(), [model], "ref_")
    assert all("routing" not in vars(router) for _, router in model.routers())


def updates(args: Namespace, order: list[list[int]]) -> list[dict[str, Tensor]]:
    """What tis logs of the micro-batches of an update."""
    whole, logs = given_to_tis(batch_of(Case())), []
    for samples in order:
        given = {name: [values[i] for i in samples] for name, values in whole.items()}
        logs.append(hooks.tis(args, pg_loss=torch.ones(sum(given["response_lengths"])), **given)[2])
    return logs


@pytest.mark.parametrize("host", [None, *sources.VARIABLES])
def test_where_no_hook_sees_a_rollout_tis_logs_the_shift_of_its_micro_batch(host: str | None) -> None:
    args = settings(**UPDATE)
    replays = nullcontext(by_environment) if host is None else routers.of_the_host(host, sources.tree(host))
    with pytest.MonkeyPatch.context() as replaying, replays as replay:
        replaying.setenv("ENABLE_ROUTING_REPLAY", "1")
        model = model_of(Rows(), replay=replay)
        hooks.before_log_prob(args, [model], "")
        Rows().forward(model)
    hooks.before_train_step(args, 0, 0, [model], None, object())
    masks = whole().loss_masks
    for samples, log in zip(MICRO_BATCHES, updates(args, MICRO_BATCHES), strict=True):
        expected = torch.cat([shifts()[i] for i in samples]).float().mean(1) * torch.cat([masks[i] for i in samples])
        torch.testing.assert_close(log["rc/route_shift"], expected)
        assert log["rc/route_tokens_touched"].tolist() == (expected > 0).float().tolist()
    with pytest.raises(ValueError, match="^megatron_rc.routes needs the update to see the micro-batches"):
        updates(args, MICRO_BATCHES)


def test_a_rollout_without_the_pass_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_hook, "WATCH", RouteWatch())
    with pytest.raises(ValueError, match="^megatron_rc.routes needs a pass over the old log-probs of a model with"):
        hooks.rollout_data(settings(), 0, data())


PLACES = {"cp2": "context", "tp2": "tensor_model", "pp2": "pipeline_model"}


def _megatrons_own_router() -> tuple[int, bool]:
    """(watched passes of megatron-core's router, whether it chose what it used); no replay is on."""
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes = {"num_layers": 1, "hidden_size": 4, "num_attention_heads": 1, "num_moe_experts": 6, "moe_router_topk": 2}
    config = TransformerConfig(**sizes, moe_router_load_balancing_type="none")
    router: Any = TopKRouter(config=config, pg_collection=get_default_pg_collection())
    watch = RouterWatch(router, nullcontext)
    with torch.no_grad():
        router.weight.copy_(torch.arange(24.0).view(6, 4).sin())
        router.eval()(torch.arange(20.0).view(5, 1, 4).cos())
    (pair,) = watch.pairs
    return len(pair[0]), torch.equal(pair[0].sort(-1).values, pair[1].sort(-1).values)


def _work(rank: int) -> dict[str, Any]:
    found = {}
    for name, kind in PLACES.items():
        parallel_state.initialize_model_parallel(**{f"{kind}_parallel_size": 2})
        rows = Rows(cp=(rank, 2) if name == "cp2" else (0, 1), tp=(rank, 2) if name == "tp2" else (0, 1))
        # the layers of a stage need not be consecutive: chunks of a stage may be interleaved
        layers = ((1, 5), (2,))[rank] if name == "pp2" else LAYERS
        ranks, samples = parallel(), whole()
        sizes_of = [[[of[i] for i in batch] for of in (samples.totals, samples.responses)] for batch in MICRO_BATCHES]
        layouts = [layout_of(*each, None, ranks.cp_rank, ranks.cp_size) for each in sizes_of]
        watches = [RouteWatch(), RouteWatch()]
        for each in watches:
            model = model_of(rows, layers, sequence_parallel=name == "tp2")
            each.begin([model])
            rows.forward(model)
        tables, watch = watches[0].whole(ranks, MICRO_BATCHES, layouts), watches[1]
        watch.collect(ranks)
        found[name] = ([t.ids for t in tables], [watch.next_shift(layout) for layout in layouts])
        if name == "cp2":
            found["router"] = _megatrons_own_router()
        parallel_state.destroy_model_parallel()
    return found


def test_every_rank_has_all_layers_of_its_tokens() -> None:
    samples = whole()
    for rank, results in enumerate(run_ranks(2, _work)):
        assert results.pop("router") == (5, True)
        for name, (tables, per_batch) in results.items():
            cp = (rank, 2) if name == "cp2" else (0, 1)
            here = samples.held(*cp)
            for seed, ids in zip((OWN, REPLAYED), tables, strict=True):
                of_samples = zip(chosen(seed), samples.prompts, here, strict=True)
                expected = [routes[prompt - 1 : -1][mine] for routes, prompt, mine in of_samples]
                assert ids.shape[1:] == (len(LAYERS), routers.TOP_K)
                torch.testing.assert_close(ids.sort(-1).values.long(), torch.cat(expected).sort(-1).values)
            for batch, shift in zip(MICRO_BATCHES, per_batch, strict=True):
                expected = torch.cat([shifts()[i][here[i]] for i in batch]).float().mean(1)
                torch.testing.assert_close(shift, expected)


SIZES = [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (4, 0), (4, 3)]


@pytest.mark.parametrize(("size", "rank"), SIZES)
@pytest.mark.parametrize("padded", [None, 20])
def test_every_token_is_found_where_the_rank_holds_it(size: int, rank: int, padded: int | None) -> None:
    for seed in range(20):
        chance = random.Random(seed)
        whole = rollout(seed, [(chance.randint(1, 9), chance.randint(0, 9)) for _ in range(6)])
        batch = micro_batch(whole, rank, size, padded)
        layout = layout_of(whole.totals, whole.responses, batch["max_seq_lens"], rank, size)
        assert layout.rows == sum(len(positions(padded or total, rank, size)) for total in whole.totals)
        assert torch.equal(layout.local(whole.values["log_probs"]), torch.cat(batch["log_probs"]))
        assert torch.equal(layout.local(whole.loss_masks), torch.cat(local_masks(whole, rank, size, padded)))
        assert list(layout.counts) == [len(part) for part in batch["log_probs"]]
        # the row of a token is that of the logits which predict it, and its target is the token itself
        logits = batch["logits"].reshape(-1, batch["logits"].shape[-1])
        rows = layout.logits_rows(torch.device("cpu"))
        targets = layout.local([ids[prompt:] for ids, prompt in zip(whole.tokens, whole.prompts, strict=True)])
        found = logits[rows].log_softmax(-1).gather(1, targets[:, None])[:, 0]
        samples = zip(whole.logits, whole.prompts, strict=True)
        policy = torch.cat([logits.log_softmax(-1)[prompt - 1 : -1] for logits, prompt in samples])
        expected = policy.gather(1, whole.targets[:, None])[:, 0]
        assert torch.equal(found, whole.on_rank(expected, rank, size, padded))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_turn_that_two_slices_share_has_one_number_and_positions_are_those_of_whole_responses(rank: int) -> None:
    # responses of 8 tokens with a hole: two turns per sample, cut by zigzag slices of 3 and 1, 2, 2 tokens
    masks = [torch.tensor([1, 1, 1, 1, 0, 1, 1, 1])] * 2
    layout, turns = layout_of([9, 9], [8, 8], None, rank, 2), [0, 0, 0, 0, 0, 1, 1, 1]
    tokens = [(sample, t) for sample, part, _ in layout.spans for t in range(part.start, part.stop)]
    ids, bound = layout.segments(masks)
    assert ids.tolist() == [2 * sample + turns[t] for sample, t in tokens] and bound >= 4
    found = layout.positions(masks)[layout.local(masks).bool()]
    assert found.tolist() == [t - (t > 4) for _, t in tokens if t != 4]


def test_a_list_of_the_wrong_length_is_named_with_its_sample() -> None:
    def joined(values: Any, remedy: str) -> Tensor:
        lengths = {"total_lengths": [4, 7], "response_lengths": [2, 3]}
        return HostTokens(ours(Case()), {**lengths, "log_probs": values}).joined("log_probs", remedy)

    assert joined([torch.zeros(2), torch.ones(3)], "").tolist() == [0, 0, 1, 1, 1]
    with pytest.raises(ValueError, match=r"^log_probs of sample 1 must be \[3\] on this rank, got \(2,\)$"):
        joined([torch.zeros(2), torch.zeros(2)], "")
    for given in (None, [torch.zeros(2), None]):
        with pytest.raises(ValueError, match="log_probs must be in every sample of the batch: set --this"):
            joined(given, "set --this")


def test_slimes_wrapper_of_a_process_group_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("tensor_model_parallel", "context_parallel", "data_parallel", "pipeline_model_parallel")
    groups = {name: object() for name in names}
    for name, group in groups.items():
        wrapped = SimpleNamespace(group=group) if name != "context_parallel" else group
        monkeypatch.setattr(parallel_state, f"get_{name}_group", lambda found=wrapped, **kwargs: found)
    monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda: 1)
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 2)
    monkeypatch.setattr(parallel_state, "is_pipeline_last_stage", lambda ignore_virtual: ignore_virtual)
    found = parallel()
    assert found.tp_group is groups["tensor_model_parallel"] and found.cp_group is groups["context_parallel"]
    assert found.dp_group is found.dp_cp_group is groups["data_parallel"]
    assert (found.cp_rank, found.cp_size, found.last_stage) == (1, 2, True)
