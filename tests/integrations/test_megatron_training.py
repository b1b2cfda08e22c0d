"""The host megatron-training: a stub of its functions around real process groups and the real scheduler."""

import math
import re
from functools import partial
from importlib import import_module
from pathlib import Path
from shutil import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import training_host
from distributed import run_ranks
from megatron.core import parallel_state
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from training_host import HOST, LN2, NONE, STUB, TIS, Optimizer, batch, decay, forward_step, stub_host, train, train_one
from training_host import groups as groups
from training_host import training as training

from megatron_rc import LengthDecayLR, MismatchLR, RolloutCorrection, patch
from megatron_rc.integrations.installed import session_of
from megatron_rc.learning_rate.rule import HOST_KEY


def test_metrics_are_pooled_over_micro_batches_and_not_averaged(training: Any) -> None:
    with patch(HOST, correction=NONE):
        ((log,), _, _) = train(training, [[batch(LN2), batch(0.0, 0.0, 0.0)]])
    # rho = 2, 1, 1, 1: (sum rho)^2 / (n sum rho^2) = 25 / 28, where the mean over micro-batches is 1
    assert log["rc/ess_token"] == pytest.approx(25 / 28)
    assert log["rc/rho_max"] == pytest.approx(2)
    assert log["rc/k3"] == pytest.approx((2 - 1 - LN2) / 4)
    assert log["rc/response_length"] == 2


@pytest.mark.host("megatron-training", proof="stand-in", feature="loss and gradient of a correction")
def test_the_loss_function_gets_the_weights_of_the_patch_and_one_without_it(training: Any) -> None:
    steps = [[batch(math.log(5), -LN2)]]
    with patch(HOST, correction=TIS):
        ((log,), _, _) = train(training, steps)
    assert log["pg loss"] == pytest.approx((2 + 0.5) / 2)
    assert log["rc/truncated_token"] == 0.5
    ((log,), _, _) = train(training, steps)
    assert log == {"pg loss": 1.0}


@pytest.mark.host("megatron-training", proof="stand-in", feature="correction none leaves the loss bit-identical")
def test_measuring_alone_leaves_the_loss_as_it_is(training: Any) -> None:
    steps = [[batch(0.7, -0.2), batch(1.3)]]
    ((alone,), _, _) = train(training, steps)
    with patch(HOST, correction=NONE):
        ((measured,), _, _) = train(training, steps)
    assert measured["pg loss"] == alone["pg loss"] and len(measured) > len(alone)


def test_an_optimizer_step_already_has_the_rate_of_its_own_rollout(training: Any) -> None:
    with patch(HOST, lr_rule=decay(period=2)):
        logs, optimizer, _ = train(training, [[batch(0.0)]] * 5)
    assert optimizer.used == [1e-3, 5e-4, 5e-4, 2.5e-4, 2.5e-4]
    assert [log["lr_rule/scale"] for log in logs] == [1.0, 0.5, 0.5, 0.25, 0.25]


def test_of_a_step_that_is_run_again_the_last_run_counts(training: Any) -> None:
    seen, runs = decay(), iter([[batch(LN2)], [batch(0.0, 0.0)]])

    def doubted(*, data_iterator: Any, **others: Any) -> Any:
        return training_host.run_micro_batches(data_iterator=next(runs), **others)

    with patch(HOST, correction=NONE, lr_rule=seen):
        ((log,), _, _) = train(training, [[]], schedule=doubted, runs=2)
    assert log["rc/rho_max"] == 1 and log["rc/response_length"] == 2 and seen.rollouts == 1


def test_a_step_that_leaves_before_its_optimizer_counts_no_rollout(training: Any) -> None:
    # it is done again after the restart
    seen = decay()
    with patch(HOST, lr_rule=seen):
        assert train(training, [[batch(0.0)]], exits=True)[0] == [{}]
    assert seen.rollouts == 0


def test_evaluation_is_corrected_and_not_counted(training: Any) -> None:
    seen = decay()
    with patch(HOST, correction=TIS, lr_rule=seen):
        train(training, [[batch(0.0)]])
        assert session_of(HOST).step is None
        (loss,) = training_host.run_micro_batches(
            forward_step_func=forward_step, data_iterator=[batch(math.log(5))], model=None, forward_only=True
        )
        assert loss["pg loss"][0] == 2 and seen.rollouts == 1
        ((log,), _, _) = train(training, [[batch(0.0)]])
    assert log["rc/rho_max"] == 1 and seen.rollouts == 2


@pytest.mark.host("megatron-training", proof="stand-in", feature="everything is given back")
def test_the_patch_is_nested_and_undone_exactly(training: Any) -> None:
    before = dict(vars(training))
    shared = decay()
    with patch(HOST, lr_rule=shared):
        inside = dict(vars(training))
        changed = {name for name in before if inside[name] is not before[name]}
        assert changed == {"get_optimizer_param_scheduler", "train_step"}
        with patch(HOST, lr_rule=shared):
            assert dict(vars(training)) == inside
        assert dict(vars(training)) == inside
        _, optimizer, scheduler = train(training, [[batch(0.0)]])
        assert optimizer.param_groups[0]["lr"] == 5e-4
    assert dict(vars(training)) == before
    assert not {"get_lr", "state_dict", "load_state_dict"} & vars(scheduler).keys()
    assert "step" not in vars(optimizer) and optimizer.param_groups[0]["lr"] == 1e-3


def test_a_step_that_the_host_itself_has_replaced_stays(training: Any) -> None:
    class Graphed(Optimizer):
        def __init__(self) -> None:
            super().__init__()
            self.step = self.own = partial(Optimizer.step, self)  # type: ignore[method-assign]

    optimizer = Graphed()
    with patch(HOST, correction=NONE):
        train_one(training, forward_step, [batch(0.0)], optimizer)
    assert optimizer.step is optimizer.own and optimizer.used == [1e-3]


@pytest.mark.host("megatron-training", proof="stand-in", feature="length decay: resume")
def test_the_host_s_checkpoint_carries_the_decay(training: Any) -> None:
    steps = [[batch(0.0)]] * 6
    with patch(HOST, lr_rule=decay(period=2)):
        _, whole, _ = train(training, steps)
    with patch(HOST, lr_rule=decay(period=2)):
        _, _, scheduler = train(training, steps[:3])
        saved = scheduler.state_dict()
    assert saved[HOST_KEY]["rollouts"] == 3

    resumed = decay(period=2)
    with patch(HOST, lr_rule=resumed):
        optimizer = Optimizer()
        scheduler = training.get_optimizer_param_scheduler(optimizer)
        scheduler.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == whole.used[2] and resumed.rollouts == 3
    own = training.get_optimizer_param_scheduler(Optimizer())
    own.load_state_dict(saved)
    assert own.num_steps == 3 and HOST_KEY not in own.state_dict()
    with patch(HOST, lr_rule=decay(period=2)):
        scheduler = training.get_optimizer_param_scheduler(Optimizer())
        scheduler.load_state_dict(own.state_dict())  # of a run without the decay
        assert scheduler.state_dict()[HOST_KEY]["rollouts"] == 0
    assert type(own).state_dict is OptimizerParamScheduler.state_dict


@pytest.mark.parametrize(
    ("settings", "data", "forward", "sentence"),
    [
        ({"correction": TIS}, [batch(0.0)], training_host.sft_step, "no loss function called correct_micro_batch"),
        ({"correction": "standardized"}, [batch(0.0)], forward_step, "not use 'standardized' in correct_micro_batch"),
        ({"lr_rule": decay()}, [batch(0.0, new=False)], forward_step, "new_rollout=True"),
        ({"correction": TIS}, [batch(0.0, math.nan)], forward_step, "nonfinite_share must be <= 0.01, got 1 of 2"),
    ],
)
def test_a_step_is_refused_before_its_optimizer(training: Any, settings: Any, data: Any, forward: Any, sentence: str):
    with patch(HOST, **settings):
        optimizer = Optimizer()
        with pytest.raises(ValueError, match=sentence):
            train_one(training, forward, data, optimizer)
        assert optimizer.used == [] and "step" not in vars(optimizer)


def test_what_cannot_be_honoured_is_refused_by_name(training: Any) -> None:
    for fields, sentence in (
        ({"weight": {}, "normalize": "batch"}, "normalize must be 'none' with host 'megatron-training'"),
        ({"weight": {}, "old": "rollout"}, "old must be 'recompute' or 'current' with a weight"),
        ({"weight": {"upper": "measured"}}, "upper must be a number in host 'megatron-training'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            patch(HOST, correction=RolloutCorrection.from_dict(fields))
    with patch(HOST, correction=TIS), pytest.raises(ValueError, match="--cuda-graph-impl"):
        train(training, [[batch(0.0)]], schedule=FullCudaGraphWrapper.__new__(FullCudaGraphWrapper))
    flags = vars(import_module("megatron.training.global_vars").args)
    for flag, value, fix in (
        ("cuda_graph_scope", "full_iteration", "set --cuda-graph-impl to local"),
        ("moe_router_fusion", True, "drop --moe-router-fusion"),
    ):
        flags |= {"moe_enable_routing_replay": True, flag: value}
        with patch(HOST, correction=TIS), pytest.raises(ValueError, match=f"^megatron-training: .*; {fix}"):
            train(training, [[batch(0.0)]])
        del flags[flag]
    with patch(HOST, lr_rule=LengthDecayLR(1e-5)), pytest.raises(ValueError, match="initial_lr must be the max_lr"):
        train(training, [])


def test_the_parameters_of_train_step_are_those_of_the_version(tmp_path: Path) -> None:
    file = "megatron/training/training.py"
    older = (STUB / file).read_text().replace(", pg_collection=None, p2p_communicator=None", "")
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(older)
    copy(STUB / file.replace("training.py", "global_vars.py"), (tmp_path / file).parent)
    with stub_host(tmp_path, "0.18.2") as module, patch(HOST, correction=TIS):
        assert train(module, [[batch(math.log(5))]])[0][0]["pg loss"] == 2
    with stub_host(tmp_path, "0.19.0"), pytest.raises(ValueError, match="train_step takes .*patch was made for"):
        patch(HOST, correction=TIS)
    with stub_host(STUB, "0.16.1"), pytest.raises(ValueError, match="must be of version 0.17 or .* found 0.16.1"):
        patch(HOST, correction=TIS)


def test_the_recipe_of_the_docs_corrects_and_decays(training: Any) -> None:
    page = (Path(__file__).parents[2] / "docs/hosts/megatron_training.md").read_text()
    recipe = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert recipe is not None and len(recipe[1].strip().splitlines()) <= 10
    found: list[Any] = []

    def forward(data: Any, model: Any) -> dict[str, Any]:
        gaps = next(data)["gaps"]
        rows = torch.zeros_like(gaps)
        given["loss_func"](rows - 1, rows - 1 - gaps, rows, rows == 0, rows - 1)
        return {"pg loss": torch.ones(2)}

    def pretrain(*arguments: Any) -> None:
        found.append(train(training, [[batch(math.log(5))]], forward))

    given: dict[str, Any] = {"pretrain": pretrain}
    exec(recipe[1], given)
    (((log,), optimizer, _),) = found
    assert log["rc/weight_mean"] == 2 and optimizer.used == [1e-3]
    assert log["lr_rule/scale"] == 1 and "rc/k3" in log


LAYOUTS = {"dp": {}, "pp": {"pipeline_model_parallel_size": 2}, "cp": {"context_parallel_size": 2}}
SEQUENCES = (([LN2, 0.3, -0.4, 0.1], [10]), ([0.0, 1.2, -1.0, 0.5], [30]))
"""Log-ratios of two sequences, and how long the response was."""


def _rank(rank: int) -> dict[str, SimpleNamespace]:
    steps = {}
    for layout, sizes in LAYOUTS.items():
        parallel_state.initialize_model_parallel(**sizes)
        whole = [batch(*gaps, lengths=lengths) for gaps, lengths in SEQUENCES]
        halves = [batch(*gaps[2 * rank : 2 * rank + 2], lengths=lengths) for gaps, lengths in SEQUENCES]
        data = {"dp": [whole[rank]], "pp": whole, "cp": halves}[layout]
        steps[layout] = _step(data, forward_step)
        by_mismatch = MismatchLR(1e-3, signal="k3", target=1e-9, power=0.1)
        steps[f"{layout}, by mismatch"] = _step(data, forward_step, by_mismatch)
        if layout == "dp":
            steps["dp, one rank silent"] = _step(data, forward_step if rank == 0 else training_host.sft_step)
        parallel_state.destroy_model_parallel()
    return steps


def _step(data: list[Any], forward: Any, by_mismatch: MismatchLR | None = None) -> SimpleNamespace:
    """Its log, the learning rates that the optimizer used, the mean response length of the decay, and the refusal."""
    seen = decay()
    with stub_host() as module, patch(HOST, correction=NONE, lr_rule=by_mismatch or seen):
        try:
            (log,), optimizer, _ = train(module, [data], forward)
        except ValueError as refused:
            return SimpleNamespace(rates=[], length=math.nan, refusal=str(refused))
    log.pop("pg loss", None)
    length = math.exp(seen.state_dict()["fast_average"] / 0.2) if by_mismatch is None else math.nan
    return SimpleNamespace(log=log, rates=optimizer.used, length=length, refusal="")


@pytest.mark.host("megatron-training", proof="stand-in", feature="data-parallel ranks")
def test_every_layout_pools_to_the_same_metrics_and_rate_or_refuses_on_all_ranks() -> None:
    expected = _step([batch(*gaps, lengths=lengths) for gaps, lengths in SEQUENCES], forward_step).log
    ranks = run_ranks(2, _rank)
    for layout in LAYOUTS:
        for rank, steps in enumerate(ranks):
            step = steps[layout]
            assert (step.rates, step.length, step.refusal) == ([5e-4], pytest.approx(20), ""), layout
            # only the last stage logs
            assert step.log == ({} if (layout, rank) == ("pp", 0) else pytest.approx(expected, rel=1e-6)), layout
            # clamp((1e-9 / k3)^0.1) with the k3 of all ranks, and bitwise the same on each
            rates, lowered = steps[f"{layout}, by mismatch"].rates, 1e-3 * (1e-9 / expected["rc/k3"]) ** 0.1
            assert rates == ranks[0][f"{layout}, by mismatch"].rates == pytest.approx([lowered])
    for steps in ranks:
        assert "on every data-parallel rank in a step, or on none" in steps["dp, one rank silent"].refusal
