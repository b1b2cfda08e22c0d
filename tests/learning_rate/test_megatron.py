"""The length decay on Megatron's own OptimizerParamScheduler, and in a training job."""

import inspect
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import TASK, doctored, run_together, settings_file, timeless, train, warm_model
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from refusals import refuses

from megatron_rc import LengthDecayLR, MismatchLR
from megatron_rc.report.log import read_metrics

LR = 1e-6
STYLES = [
    {},
    {"lr_decay_style": "cosine", "lr_warmup_steps": 7, "min_lr": 1e-7, "lr_decay_steps": 60},
    {"lr_decay_style": "linear", "lr_warmup_steps": 3, "init_lr": 2e-7, "lr_decay_steps": 40},
    {"lr_decay_style": "inverse-square-root", "lr_warmup_steps": 5},
    {"lr_decay_style": "WSD", "wsd_decay_steps": 20, "lr_wsd_decay_style": "exponential", "lr_decay_steps": 50},
]
JOB: dict[str, Any] = {
    "task": TASK,
    "rollout": {"prompts_per_step": 6, "samples_per_prompt": 4, "max_new_tokens": 4},
    "train": {"steps": 8, "lr": 1e-3, "lr_warmup_steps": 2, "save_interval": 2, "eval_interval": 100, "save_hf": False},
}
TWO_UPDATES = (
    "train.mini_batches_per_rollout=2",
    "lr_rule={rule: length_decay, decay_period: 3, detector: {warmup: 2}}",
)
BY_MISMATCH = (
    "rollout.amplify=0.2",
    "correction={preset: token-tis, old: current}",
    "lr_rule={rule: mismatch, action: halve, target: 1.0, patience: 2, floor: 0.2}",
)


def scheduler(**changes: Any) -> OptimizerParamScheduler:
    """Megatron's scheduler over three groups: plain, with its own max_lr and min_lr, and without weight decay."""
    groups = [
        {"params": [torch.nn.Parameter(torch.ones(2))]},
        {"params": [torch.nn.Parameter(torch.ones(2))], "max_lr": 4e-6, "min_lr": 2e-7},
        {"params": [torch.nn.Parameter(torch.ones(2))], "max_lr": LR, "wd_mult": 0.0},
    ]
    arguments = {
        **{"init_lr": 0.0, "max_lr": LR, "min_lr": 0.0, "lr_warmup_steps": 0, "lr_decay_steps": 1000},
        **{"lr_decay_style": "constant", "start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 0},
        **{"wd_incr_style": "constant", **changes},
    }
    return OptimizerParamScheduler(torch.optim.AdamW(groups, lr=1.0), **arguments)


def rates(one: OptimizerParamScheduler) -> list[float]:
    return [group["lr"] for group in one.optimizer.param_groups]


@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("style", STYLES, ids=lambda s: s.get("lr_decay_style", "constant"))
def test_every_group_has_the_schedulers_own_rate_times_the_scale(style: dict[str, Any], updates: int) -> None:
    alone, scaled = scheduler(**style), scheduler(**style)
    decay = LengthDecayLR(LR, decay_period=6)
    decay.attach(scaled)
    assert rates(scaled) == rates(alone)
    for rollout in range(1, 30):
        decay.step(1000.0)
        assert decay.scale == max(0.5 ** (rollout // 6), 0.1)
        for _ in range(updates):  # what the optimizer step of this rollout reads
            assert rates(scaled) == [decay.scale * lr for lr in rates(alone)]
            alone.step(1)
            scaled.step(1)
    assert [g["weight_decay"] for g in scaled.optimizer.param_groups] == [0.1, 0.1, 0.0]


def test_detach_puts_everything_back() -> None:
    one, alone, decay = scheduler(**STYLES[1]), scheduler(**STYLES[1]), LengthDecayLR(LR, decay_period=1)
    before = dict(vars(one))
    decay.attach(one)
    decay.step(10.0)
    for each in (one, alone):
        each.step(5)
    assert rates(one) == [lr / 2 for lr in rates(alone)] and rates(one)[0] > 0
    decay.detach(one)
    assert vars(one) == before | {"num_steps": 5} and one.get_lr.__func__ is OptimizerParamScheduler.get_lr
    assert rates(one) == rates(alone)
    decay.step(10.0)
    decay.detach(one)
    assert rates(one) == rates(alone)


def test_detach_puts_back_a_get_lr_that_somebody_else_had_set_before() -> None:
    one, decay = scheduler(), LengthDecayLR(LR, decay_period=1)
    theirs = one.get_lr = lambda group: 3 * LR
    decay.attach(one)
    decay.step(10.0)
    assert rates(one) == [1.5 * LR] * 3
    decay.detach(one)
    assert one.get_lr is theirs and rates(one) == [3 * LR] * 3


def test_attaching_twice_scales_once() -> None:
    one, decay = scheduler(), LengthDecayLR(LR, decay_period=1)
    decay.attach(one)
    wrapped = one.get_lr
    decay.attach(one)
    assert one.get_lr is wrapped
    decay.step(10.0)
    assert rates(one)[0] == LR / 2


def test_one_decay_drives_several_schedulers() -> None:
    one, other, decay = scheduler(), scheduler(), LengthDecayLR(LR, decay_period=1)
    decay.attach(one)
    decay.attach(other)
    decay.step(10.0)
    assert rates(one) == rates(other) == [LR / 2, 2e-6, LR / 2]
    decay.detach(one)
    assert rates(one)[0] == LR and rates(other)[0] == LR / 2


def test_attach_and_detach_refuse_what_they_cannot_do() -> None:
    one, decay = scheduler(), LengthDecayLR(LR)
    refuses(r"opt_param_scheduler must have \['max_lr', 'get_lr', 'step'\], got a object", decay.attach, object())
    with pytest.raises(ValueError, match="initial_lr must be the max_lr of opt_param_scheduler, got initial_lr=1e-05"):
        LengthDecayLR(1e-5).attach(one)
    decay.attach(one)
    refuses("opt_param_scheduler already has LengthDecayLR attached; detach that first", LengthDecayLR(LR).attach, one)
    one.get_lr = lambda group: 0.0
    refuses("get_lr of opt_param_scheduler was replaced after attach; undo that first", decay.detach, one)


@pytest.mark.parametrize("attach_first", [True, False])
@pytest.mark.parametrize("override", [{}, {"use_checkpoint_opt_param_scheduler": False}], ids=["use", "check"])
def test_the_schedulers_checkpoint_loads_without_scaling_twice(override: dict[str, Any], attach_first: bool) -> None:
    style = STYLES[1]
    whole, decay = scheduler(**style), LengthDecayLR(LR, decay_period=4)
    decay.attach(whole)
    expected, saved = [], None
    for rollout in range(1, 21):
        decay.step(1000.0)
        expected.append(rates(whole))
        whole.step(1)
        if rollout == 10:
            saved = (whole.state_dict(), decay.state_dict(), whole.optimizer.state_dict())
    assert saved and saved[0]["max_lr"] == LR and saved[0]["min_lr"] == 1e-7
    resumed, again = scheduler(**style, **override), LengthDecayLR(LR, decay_period=4)
    if attach_first:
        again.attach(resumed)
    resumed.optimizer.load_state_dict(saved[2])
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    if not attach_first:
        again.attach(resumed)
    found = []
    for _ in range(10):
        again.step(1000.0)
        found.append(rates(resumed))
        resumed.step(1)
    assert found == expected[10:]


def test_megatron_s_scheduler_reads_the_rate_of_a_group_through_get_lr() -> None:
    # what attach relies on: step() asks get_lr of the instance once a group, and writes what it answers
    assert "self.get_lr(param_group)" in inspect.getsource(OptimizerParamScheduler.step)
    assert list(inspect.signature(OptimizerParamScheduler.get_lr).parameters) == ["self", "param_group"]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decay")
    config = settings_file(folder, {**JOB, "model": {"hf_path": str(warm_model("dense", tmp_path_factory))}})

    def job(name: str, *assignments: str) -> list[str]:
        return train(config, folder / name, *assignments)

    def replayed(name: str, recording: str, *assignments: str) -> list[str]:
        rule = "lr_rule={rule: length_decay, decay_period: 2}"
        return job(name, rule, "rollout.engine=recorded", f"rollout.recorded_path={recording}", *assignments)

    first = [
        [*job("good", "train.steps=3"), "--dump"],
        job("whole", *TWO_UPDATES),
        job("parts", *TWO_UPDATES, "train.steps=5"),
        job("mismatch", *BY_MISMATCH, "train.steps=5"),
    ]
    assert [status for status, _ in run_together(first, folder)] == [0] * 4
    second = [
        replayed("failed", doctored(folder, "nans", lambda values: [math.nan] * len(values))),
        job("parts", *TWO_UPDATES),
        job("later", f"branch={folder / 'good'}:3", "lr_rule={rule: length_decay, decay_period: 4}", "train.steps=5"),
        job("mismatch", *BY_MISMATCH),
    ]
    (failed, said), *others = run_together(second, folder)
    assert failed == 2 and "NaN or infinite log-probs" in said
    assert [status for status, _ in others] == [0] * 3
    (state,) = (folder / "failed" / "checkpoints").glob("rl-000001/state.json")
    assert json.loads(state.read_text())["progress"]["lr_rule"]["rollouts"] == 1
    again = replayed("again", str(folder / "good/dump"), f"branch={folder / 'failed'}:1", "train.steps=3")
    ((status, said),) = run_together([again], folder)
    assert status == 0, said
    return folder


def steps(folder: Path) -> list[dict[str, Any]]:
    return [r for r in read_metrics(folder) if r["phase"] == "rl" and "reward/mean" in r]


def test_the_job_halves_what_its_optimizer_uses_at_every_period(jobs: Path) -> None:
    records = steps(jobs / "whole")
    assert [r["lr_rule/scale"] for r in records] == [1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]
    assert all(r["lr_rule/period"] == 3.0 and r["lr_rule/length_ratio"] > 0 for r in records)
    trained = [r for r in records if r["updates"] == 2][2:]  # after the linear warm-up
    assert len(trained) > 3 and all(r["lr"] == 1e-3 * r["lr_rule/scale"] for r in trained)


def test_a_resumed_job_has_the_rates_of_an_uninterrupted_one(jobs: Path) -> None:
    # the shorter job evaluated its last step, the longer one did not
    parts, whole = (timeless(steps(jobs / name), "eval/accuracy") for name in ("parts", "whole"))
    assert parts == whole


def test_a_rollout_whose_update_failed_is_not_counted_twice_in_a_branch(jobs: Path) -> None:
    assert [(r["step"], r["lr_rule/scale"]) for r in steps(jobs / "again")] == [(1, 1.0), (2, 0.5), (3, 0.5)]


def test_switched_on_by_a_branch_it_counts_the_rollouts_before(jobs: Path) -> None:
    records = steps(jobs / "later")
    assert [r.get("lr_rule/scale") for r in records] == [None, None, None, 0.5, 0.5]
    assert records[-1]["lr_rule/unmeasured"] == 3.0


def test_a_rule_by_mismatch_begins_every_rollout_with_its_own_sample_size_and_survives_a_resume(jobs: Path) -> None:
    records, again = steps(jobs / "mismatch"), MismatchLR(1e-3, action="halve", target=1.0, patience=2, floor=0.2)
    assert [r["step"] for r in records] == [*range(1, 9)]
    for record in records:
        again.step(record.get("current/ess_token_final"))
        assert {name: record[name] for name in again.metrics()} == again.metrics()
        if record["updates"] and record["step"] > 2:  # after the linear warm-up
            assert record["lr"] == pytest.approx(again.lr, rel=1e-12)
    assert again.scale < 1 and 0 < records[-1]["lr_rule/signal"] < 1
    assert "Learning-rate rule" in (jobs / "mismatch" / "report.html").read_text()
