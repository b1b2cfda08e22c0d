"""loss_mode=megatron_rc and the learning rate of verl's workers, on a stand-in and Megatron's own scheduler."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from hosts.verl import cases, sources
from hosts.verl.stand_in import PPO, corrected, loss_of, module, nested, patched
from hosts.verl.stand_in import stub as stub

from megatron_rc.integrations.verl import driver
from megatron_rc.learning_rate.surge import SurgeDetector


def test_the_loss_refuses_to_run_without_the_weights_of_the_trainer_process() -> None:
    batch = cases.rollout(0)
    with patched("{correction: token-tis}"), pytest.raises(ValueError, match="has not corrected the rollout"):
        loss_of(batch, batch.old, None, 1)


@pytest.mark.parametrize("wrong", [lambda weights: None, lambda weights: weights / 2 + 0.5, lambda weights: -weights])
def test_a_loss_that_does_not_multiply_its_weights_in_is_refused_at_the_first_batch(
    wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, core = cases.rollout(0), module(f"{PPO}core_algos")
    own = core.plain

    def plain(**given: Any) -> Any:
        weights = given["rollout_is_weights"]
        return own(**{**given, "rollout_is_weights": weights if weights is None else wrong(weights)})

    weights = batch.mask.float()
    with patched("{correction: token-tis}"):
        loss_of(batch, batch.old, weights, 1)
    monkeypatch.setattr(core, "plain", plain)
    with patched("{correction: token-tis}"), pytest.raises(ValueError, match="does not multiply rollout_is_weights"):
        loss_of(batch, batch.old, weights, 1)


@pytest.mark.host("verl", proof="stand-in", feature="correction none leaves the loss bit-identical")
def test_with_correction_none_the_loss_is_the_hosts_bit_for_bit() -> None:
    batch = cases.rollout(0)
    with patched("{correction: none}"):
        ours = loss_of(batch, batch.old, None, 2)
    core = module(f"{PPO}core_algos")
    core.get_policy_loss_fn = lambda name: core.plain
    theirs = loss_of(batch, batch.old, None, 2)
    assert ours[0] == theirs[0] and torch.equal(ours[1], theirs[1])


@pytest.mark.host("verl", proof="stand-in", feature="corrupt log-probs leave the gradient finite")
@pytest.mark.parametrize("corrupt", ["old", "current"])
def test_a_rejected_token_with_a_nan_adds_nothing_to_loss_and_gradient(corrupt: str) -> None:
    batch, clean = cases.rollout(0), cases.rollout(0)
    weights = clean.mask.float()
    weights[3, 1] = 0
    getattr(batch, corrupt)[3, 1] = float("nan")
    with patched("{correction: token-tis}"):
        ours, expected = (loss_of(each, each.old, weights, 1) for each in (batch, clean))
    assert ours[0] == expected[0] and torch.equal(ours[1], expected[1])


@pytest.mark.host("verl", proof="stand-in", feature="two policies (`old: rollout`)")
@pytest.mark.parametrize("surrogate", ["ppo", "reinforce"])
def test_two_policy_loss_metrics_and_denominator_do_not_depend_on_the_cut(surrogate: str) -> None:
    batch = cases.rollout(2)
    case = "seq_mean_k3" if surrogate == "ppo" else "token-tis"
    by_current = json.dumps({"correction": cases.correction(case).to_dict()})
    weights = corrected(by_current, batch._replace(old=batch.current))[0]["rollout_is_weights"]
    tokens = int(batch.mask.sum())
    text = json.dumps({"correction": cases.correction(case, old="rollout").to_dict(), "surrogate": surrogate})
    ratio = (batch.current - batch.rollout).double().exp()
    gradient = -batch.advantages.double() * weights * (ratio if surrogate == "ppo" else 1) / tokens
    metrics = []
    for cut in (1, 2, 6):
        with patched(text) as session:
            _, ours = loss_of(batch, batch.rollout, None, cut)
            torch.testing.assert_close(ours.double(), gradient, rtol=1e-5, atol=1e-9)
            metrics.append(driver.checked_metrics(session, session.sums[0]))
    assert metrics[1] == pytest.approx(metrics[0]) and metrics[2] == pytest.approx(metrics[0])


def test_with_two_policies_a_gate_may_look_at_the_sign_of_the_advantage() -> None:
    batch = cases.rollout(2)
    gate = {"statistic": "k2", "level": "token", "upper": 1e-12, "when": "negative_advantage"}
    with patched(json.dumps({"correction": {"old": "rollout", "reject": [gate]}})):
        _, gradient = loss_of(batch, batch.rollout, None, 1)
    assert torch.equal(gradient != 0, (batch.advantages > 0) & batch.mask.bool())


class Engine:
    def __init__(self, is_value_model: bool = False) -> None:
        self.is_value_model = is_value_model
        self.optimizer = SimpleNamespace(param_groups=[{"lr": 0.0, "weight_decay": 0.0}])
        own = module("verl.workers.engine.megatron.transformer_impl").MegatronEngine
        self.lr_scheduler = own._build_lr_scheduler(self)

    def get_data_parallel_group(self) -> Any:
        return dist.group.WORLD if dist.is_initialized() else None


def worker(engine: Engine, model_type: str = "language_model", update: Any = None) -> Any:
    """A worker that answers with the learning rate of its one mini-batch, after which verl steps the scheduler."""
    made = module("verl.workers.engine_workers").TrainingWorker()
    made.engine, made.config = engine, SimpleNamespace(model_type=model_type)

    def train(data: Any) -> dict[str, Any]:
        rate = engine.optimizer.param_groups[0]["lr"]
        if update is not None:
            update(data)
        engine.lr_scheduler.step(1)
        return {"lr": [rate]}

    made.update = train
    return made


def batch_of(*lengths: int) -> dict[str, Any]:
    return {"response_mask": nested([[1.0] * length for length in lengths])}


def rates(made: Any, batches: list[dict[str, Any]]) -> list[float]:
    return [made.train_mini_batch(data)["metrics"]["lr"][0] for data in batches]


@pytest.mark.host("verl", proof="stand-in", feature="length decay: resume")
def test_the_decay_steps_before_the_update_and_resumes_from_the_schedulers_own_state() -> None:
    batches = [batch_of(2, 4)] * 6
    with patched("{lr_rule: {rule: length_decay, decay_period: 2}}"):
        whole = rates(worker(Engine()), batches)
        first = worker(Engine())
        begun = rates(first, batches[:3])
        saved = first.engine.lr_scheduler.state_dict()
    with patched("{lr_rule: {rule: length_decay, decay_period: 2}}"):
        engine = Engine()
        engine.lr_scheduler.load_state_dict(saved)
        assert begun + rates(worker(engine), batches[3:]) == whole
    assert whole == pytest.approx([1e-3, 0.495e-3, 0.49e-3, 0.2425e-3, 0.24e-3, 0.11875e-3])
    assert rates(worker(Engine()), batches[:2]) == pytest.approx([1e-3, 0.99e-3]), "undo leaves verl's schedule"


def test_undo_takes_the_rule_off_a_scheduler_that_lives_on() -> None:
    with patched("{lr_rule: {rule: length_decay, decay_period: 1}}"):
        engine = Engine()
        rates(worker(engine), [batch_of(3)])
    assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.99e-3)
    assert "megatron_rc_lr_rule" not in engine.lr_scheduler.state_dict()


def test_a_critic_keeps_its_learning_rate() -> None:
    with patched("{lr_rule: {rule: length_decay, decay_period: 1}}"):
        actor, critic = Engine(), Engine(is_value_model=True)
        assert worker(critic, "value_model").train_mini_batch(batch_of(3))["metrics"] == {"lr": [1e-3]}
        assert rates(worker(actor), [batch_of(3)]) == [0.5e-3]


def test_an_engine_without_megatrons_scheduler_is_refused() -> None:
    with patched("{lr_rule: length_decay}"), pytest.raises(ValueError, match="actor.strategy=megatron"):
        worker(SimpleNamespace(get_data_parallel_group=lambda: None)).train_mini_batch(batch_of(3))  # type: ignore[arg-type]


def test_the_gate_reads_k3_of_the_rollout_that_is_trained_on() -> None:
    batch = cases.rollout(0)
    fields = {"response_mask": batch.mask, "old_log_probs": batch.old}
    expected = corrected("{correction: none}", batch)[1]["rc/k3"]
    with patched("{correction: none, lr_rule: {rule: mismatch, signal: k3, target: 1}}"):
        made = worker(Engine())
        with pytest.raises(ValueError, match="get no rollout_log_probs"):
            made.train_mini_batch(fields)
        metrics = made.train_mini_batch({**fields, "rollout_log_probs": batch.rollout})["metrics"]
    assert metrics["lr_rule/signal"] == [pytest.approx(expected)]


def _rank(rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    sys.path.insert(0, str(sources.STUB))
    batch = cases.rollout(2)
    mine = cases.Rollout(*(part[rank::2] for part in batch))
    correction = cases.correction("seq_mean_k3", old="rollout").to_dict()
    with patched(json.dumps({"correction": correction, "lr_rule": "length_decay"})) as session:
        made = worker(Engine(), update=lambda data: loss_of(mine, mine.rollout, None, 1 + rank))
        fields = {"response_mask": mine.mask, "rollout_log_probs": mine.rollout, "old_log_probs": mine.rollout}
        return made.train_mini_batch(fields)["metrics"], session.attached.rule.state_dict()


@pytest.mark.host("verl", proof="stand-in", feature="data-parallel ranks")
def test_two_data_parallel_ranks_pool_lengths_and_metrics() -> None:
    batch = cases.rollout(2)
    (first, lengths), (second, same) = run_ranks(2, _rank)
    text = json.dumps({"correction": cases.correction("seq_mean_k3", old="rollout").to_dict()})
    with patched(text) as session:
        loss_of(batch, batch.rollout, None, 1)
        alone = driver.checked_metrics(session, session.sums[0])
    assert first == second and lengths == same
    assert {name: first[name][0] for name in alone} == pytest.approx(alone)
    detector = SurgeDetector()
    detector.update(float(batch.mask.sum() / (batch.mask.sum(1) > 0).sum()))
    assert lengths == detector.state_dict()
