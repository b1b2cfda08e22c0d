"""slime's learning rate hook on Megatron's own scheduler: once per rollout, from the lengths that the hooks see."""

import inspect
import math
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hosts.slime.host import arguments, hooks, naming
from hosts.slime.single import alone
from length_curves import length_curves
from megatron.core import dist_checkpointing
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_rc import LengthDecayLR
from megatron_rc.integrations.scheduler_rule import remember_loaded_states
from megatron_rc.integrations.slime.signals import LENGTHS, LR_METRICS
from megatron_rc.learning_rate.scale import Signals

LR = 1e-6
DATA_HOOK, TIS = naming("rollout_data"), naming("tis")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    LENGTHS.forget()
    LR_METRICS.clear()
    # as in a process in which `enable` has not run
    own = inspect.unwrap(OptimizerParamScheduler.load_state_dict)
    monkeypatch.setattr(OptimizerParamScheduler, "load_state_dict", own)
    alone(monkeypatch, last_stage=False)


class Run:
    """slime's loop around the hook: rollout by rollout, step by step."""

    def __init__(self, args: Namespace, steps: int = 1) -> None:
        self.args, self.steps = args, steps
        self.model = [torch.nn.Linear(1, 1)]
        self.optimizer = torch.optim.AdamW(self.model[0].parameters(), lr=1.0)
        plan = (0.0, LR, 0.0, 0, 10_000, "constant", 0.0, 0.0, 0, "constant")
        self.scheduler = OptimizerParamScheduler(self.optimizer, *plan)

    def rollout(self, rollout_id: int, lengths: Sequence[int]) -> list[float]:
        if self.args.rollout_data_postprocess_path:
            totals, masks = [n + 1 for n in lengths], [torch.ones(n, dtype=torch.int32) for n in lengths]
            data = {"total_lengths": totals, "response_lengths": [*lengths], "loss_masks": masks}
            hooks.rollout_data(self.args, rollout_id, data)
        rates = []
        for step in range(self.steps):
            hooks.before_train_step(self.args, rollout_id, step, self.model, self.optimizer, self.scheduler)
            if self.args.custom_tis_function_path:
                # what the hook of the loss records of the micro-batches of this step
                LENGTHS.record(lengths[step :: self.steps])
            rates.append(self.optimizer.param_groups[0]["lr"])
            self.scheduler.step(increment=4)
        return rates


def curve() -> list[int]:
    """A surge at rollout 60, and the first halvings after it."""
    return [round(length) for length in length_curves(1, 240, at=60.0)[0]]


def settings(**changes: Any) -> Namespace:
    key = {"lr_rule": {"rule": "length_decay", **changes.pop("decay", {})}, **changes.pop("key", {})}
    return arguments(megatron_rc=key, **changes)


def alone_on(lengths: Sequence[float | None]) -> list[float]:
    decay = LengthDecayLR(LR)
    return [decay.step(length) for length in lengths]


@pytest.mark.parametrize("steps", [1, 3])
def test_every_step_of_a_rollout_has_the_rate_of_its_own_length(steps: int) -> None:
    run, lengths = Run(settings(**DATA_HOOK), steps), curve()
    expected = alone_on([float(n) for n in lengths])
    assert min(expected) < LR
    for rollout_id, (length, rate) in enumerate(zip(lengths, expected, strict=True)):
        assert run.rollout(rollout_id, [length - 1, length + 1]) == pytest.approx([rate] * steps)


def test_hooks_of_the_loss_tell_the_length_one_rollout_late() -> None:
    run, lengths = Run(settings(**TIS), 2), curve()
    expected = alone_on([None, *map(float, lengths[:-1])])
    found = [run.rollout(number, [length - 300, length + 300]) for number, length in enumerate(lengths)]
    assert found == [pytest.approx([rate] * 2) for rate in expected]


def test_the_rule_by_mismatch_takes_what_the_correction_of_this_rollout_measured() -> None:
    key = {"key": {"lr_rule": "mismatch", "correction": "token-tis"}, **DATA_HOOK}
    run, resumed = (Run(checked(**key)) for _ in range(2))
    rates = []
    for number, ess in enumerate([0.9, 0.125, math.nan, 0.02]):
        LENGTHS.record_mismatch(number, Signals(ess=ess, k3=1e-3))
        rates += run.rollout(number, [9])
    assert rates == pytest.approx([LR, LR / 2, LR / 2, 0.2 * LR])
    LENGTHS.record_mismatch(3, Signals(ess=0.125))  # of another rollout
    assert run.rollout(4, [9]) == pytest.approx([0.2 * LR])
    resumed.scheduler.load_state_dict(run.scheduler.state_dict())
    LENGTHS.record_mismatch(5, Signals())
    assert resumed.rollout(5, [9]) == pytest.approx([0.2 * LR])


def test_the_rule_is_logged_next_to_the_metrics_of_the_loss() -> None:
    args = settings(decay={"decay_period": 2}, use_tis=True, **TIS)
    run, seen = Run(args), []
    probs = [torch.full((3,), -1.0)]
    batch = {"pg_loss": torch.zeros(3), "train_log_probs": probs, "rollout_log_probs": probs}
    batch |= {"loss_masks": [torch.ones(3, dtype=torch.int32)], "total_lengths": [5], "response_lengths": [3]}
    assert not any(name.startswith("lr_rule/") for name in hooks.tis(args, **batch)[2])
    for number in range(4):
        run.rollout(number, [3])
        *_, metrics = hooks.tis(args, **batch)
        seen.append(metrics["lr_rule/scale"].tolist())
        assert metrics["lr_rule/period"].tolist() == [2.0] * 3
    assert seen == [[1.0] * 3, [0.5] * 3, [0.5] * 3, [0.25] * 3]


def checked(**changes: Any) -> Namespace:
    remember_loaded_states()
    return settings(**changes)


def through_a_checkpoint(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What Megatron's checkpoint gives back of a scheduler's state."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    folder.mkdir()
    with pytest.MonkeyPatch.context() as on_cpu:
        on_cpu.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        dist_checkpointing.save({"opt_param_scheduler": state}, str(folder))
    loaded = dist_checkpointing.load_common_state_dict(str(folder))
    dist.destroy_process_group()
    return dict(loaded["opt_param_scheduler"])


@pytest.mark.host("slime", proof="stand-in", feature="length decay: resume")
@pytest.mark.parametrize("stop", [1, 57, 150])
def test_the_hosts_checkpoint_alone_resumes_the_decay(stop: int, tmp_path: Path) -> None:
    lengths = curve()
    expected = alone_on([float(n) for n in lengths])
    args = checked(**DATA_HOOK)
    run = Run(args)
    for number in range(stop):
        run.rollout(number, [lengths[number]])
    resumed = Run(args)
    resumed.scheduler.load_state_dict(through_a_checkpoint(run.scheduler.state_dict(), tmp_path / "checkpoint"))
    found = [resumed.rollout(number, [lengths[number]])[0] for number in range(stop, len(lengths))]
    assert found == pytest.approx(expected[stop:])
    # the state of the resumed run goes into its own checkpoints
    again = Run(args)
    again.scheduler.load_state_dict(resumed.scheduler.state_dict())
    assert again.rollout(len(lengths), [9]) == resumed.rollout(len(lengths), [9])


def test_rollouts_after_the_checkpoint_that_no_step_came_from_count() -> None:
    run, resumed = (Run(checked(decay={"decay_period": 4})) for _ in range(2))
    run.rollout(0, [9])
    resumed.scheduler.load_state_dict(run.scheduler.state_dict())
    assert [resumed.rollout(number, [9])[0] for number in (2, 3)] == [LR, LR / 2]


def test_a_checkpoint_of_a_later_rollout_or_of_the_other_rule_has_no_state() -> None:
    run = Run(checked(decay={"decay_period": 2}))
    run.rollout(0, [9])
    run.rollout(1, [9])
    state = run.scheduler.state_dict()
    by_length = {"key": {"lr_rule": {"rule": "mismatch", "signal": "length", "target": 9.0}}}
    for changes in ({"decay": {"decay_period": 2}}, by_length):
        other = Run(checked(**changes, **TIS, use_tis=True))
        other.scheduler.load_state_dict(state)
        with pytest.raises(ValueError, match="needs its state after rollout 0 .*without --no-load-optim"):
            other.rollout(1, [9])


def test_a_checkpoint_with_the_state_loads_without_the_rule() -> None:
    run, plain = Run(checked(decay={"decay_period": 1})), Run(settings())
    run.rollout(0, [9])
    plain.scheduler.load_state_dict(run.scheduler.state_dict())
    assert plain.scheduler.num_steps == run.scheduler.num_steps == 4


@pytest.mark.host("miles", proof="stand-in", feature="length decay: resume")
def test_a_resumed_run_whose_lengths_come_from_the_loss_misses_one_of_them_and_no_more() -> None:
    lengths, stop = curve(), 56
    seen = [None, *map(float, lengths[:-1])]
    whole, seen[stop] = alone_on(seen), None
    assert alone_on(seen) != whole
    run, resumed = (Run(checked(**TIS, use_tis=True)) for _ in range(2))
    for number in range(stop):
        run.rollout(number, [lengths[number]])
    LENGTHS.take(0, torch.device("cpu"))  # a new process has none
    resumed.scheduler.load_state_dict(run.scheduler.state_dict())
    found = [resumed.rollout(number, [lengths[number]])[0] for number in range(stop, len(lengths))]
    assert min(found) < LR and found == pytest.approx(alone_on(seen)[stop:])


def test_a_run_that_resumes_without_the_state_is_refused_or_begins_where_it_is_told() -> None:
    with pytest.raises(ValueError, match="needs its state after rollout 6 in the scheduler of the loaded checkpoint"):
        Run(settings(decay={"decay_period": 2})).rollout(7, [9])
    run = Run(settings(decay={"decay_period": 2}, key={"lr_rule_start": 7}))
    assert run.rollout(5, [9]) == [LR]
    assert [run.rollout(number, [9])[0] for number in (7, 8, 9)] == pytest.approx([LR, LR / 2, LR / 2])


def test_a_decay_begins_with_the_first_rollout_that_trains_the_actor() -> None:
    run = Run(settings(decay={"decay_period": 2}, num_critic_only_steps=7))
    assert [run.rollout(number, [9])[0] for number in (7, 8, 9)] == pytest.approx([LR, LR / 2, LR / 2])


def test_a_repeated_rollout_counts_once_and_one_without_update_counts_too() -> None:
    run = Run(settings(decay={"decay_period": 4}))
    for number in (0, 1, 1, 1):
        assert run.rollout(number, [9]) == [LR]
    assert run.rollout(3, [9]) == [LR / 2]  # the fourth, though the third led to no step


def test_a_critic_and_a_host_without_scheduler_keep_their_rate() -> None:
    run = Run(settings(decay={"decay_period": 1}, loss_type="value_loss"))
    assert run.rollout(0, [9]) == [LR]
    hooks.before_train_step(settings(decay={"decay_period": 1}), 0, 0, run.model, None, None)
