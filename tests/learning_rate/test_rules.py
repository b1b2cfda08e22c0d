"""Every rule of RULES is known by its name wherever a rule is chosen, saved, measured or drawn."""

import inspect
import json
from typing import Any

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from refusals import refusal, refuses

from megatron_rc.integrations.run_script import patch_settings
from megatron_rc.integrations.scheduler_rule import SchedulerRule
from megatron_rc.learning_rate.length_decay import LengthDecaySettings
from megatron_rc.learning_rate.mismatch import MismatchSettings
from megatron_rc.learning_rate.rule import HOST_KEY, OF_EVERY_RULE, RULES, earlier_state, resume, state_of
from megatron_rc.learning_rate.scale import NOTHING, PREFIX, LRScale, Signals
from megatron_rc.settings import job

KNOWN = f"known: {', '.join(RULES)}"
MEASURED = Signals(length=900.0, truncated_share=0.1, ess=0.2, k3=0.01, grad_cosine=0.5)


def made(name: str) -> LRScale:
    settings = job.load("correction: token-tis", [f"lr_rule={name}"]).lr_rule
    assert type(settings) is RULES[name].settings
    assert patch_settings(preset="token-tis", lr_rule=name).lr_rule == settings
    rule = settings.build(1e-3)
    assert type(rule) is settings.makes and rule.name == name
    return rule


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_what_its_name_says_and_has_the_metrics_of_its_row(name: str) -> None:
    rule, row = made(name), RULES[name]
    for signals in (MEASURED, NOTHING, *[MEASURED] * 40):
        rule.begin(signals)
    assert 0 < rule.scale <= 1 and rule.rollouts == 42 and rule.needs <= set(Signals._fields)
    written, documented = set(rule.metrics()), {f"{PREFIX}{each}" for each in (*OF_EVERY_RULE, *row.metrics)}
    assert {f"{PREFIX}{each}" for each in OF_EVERY_RULE} <= written <= documented
    assert row.halves in row.metrics and row.summary and row.title


@pytest.mark.parametrize("name", RULES)
def test_a_state_is_taken_by_the_rule_that_wrote_it_alone(name: str) -> None:
    rule = made(name)
    for signals in [MEASURED, NOTHING] * 5:
        rule.begin(signals)
    saved = json.loads(json.dumps(state_of(rule)))
    for other in map(made, RULES):
        assert resume(other, saved) == (other.name == name)
        assert other.rollouts == (10 if other.name == name else 0)
    assert not resume(made(name), None)
    refuses(r"state must have the fields \['rollouts', .*got \['max_lr'\]", rule.load_state_dict, {"max_lr": 1.0})


@pytest.mark.parametrize("name", RULES)
def test_settings_and_constructor_have_the_same_arguments_and_defaults(name: str) -> None:
    settings = RULES[name].settings()
    first, *others = inspect.signature(settings.makes).parameters.values()
    assert (first.name, first.kind) == ("initial_lr", first.POSITIONAL_OR_KEYWORD)
    assert all(each.kind is each.KEYWORD_ONLY for each in others)
    assert {"rule": name, **{each.name: each.default for each in others}} == vars(settings)


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("lr_rule=lenght_decay", "lr_rule: unknown rule 'lenght_decay'; did you mean 'length_decay'?"),
        ("lr_rule={rule: mismatch, flor: 1}", "unknown field 'lr_rule.flor' of rule 'mismatch'; did you mean 'floor'?"),
        ("lr_rule={floor: 0.2}", f"lr_rule: the field rule is missing; {KNOWN}"),
        ("lr_rule.floor=0.2", f"lr_rule: the field rule is missing; {KNOWN}"),
        ("lr_rule=3", f"lr_rule: unknown rule 3; {KNOWN}"),
        ("lr_rule={rule: [1]}", f"lr_rule: unknown rule [1]; {KNOWN}"),
        ("lr_rule={rule: length_decay, min_lr_ratio: 2}", "lr_rule: min_lr_ratio must be in [0, 1], got 2.0"),
        ("lr_rule={rule: length_decay, detector: {patience: 0}}", "lr_rule.detector: patience must be >= 1, got 0"),
    ],
)
def test_a_rule_that_is_written_wrong_is_one_sentence(assignment: str, sentence: str) -> None:
    assert refusal(job.load, "correction: token-tis", [assignment]) == sentence


def test_an_assignment_changes_a_field_of_the_rule_and_another_rule_replaces_that_of_the_base(tmp_path: Any) -> None:
    changed = job.load("{correction: token-tis, lr_rule: mismatch}", ["lr_rule.floor=0.2"])
    assert changed.lr_rule == MismatchSettings(floor=0.2)
    assert job.load("lr_rule: null").lr_rule is None is job.JobSettings().lr_rule
    (tmp_path / "first.yaml").write_text("lr_rule: {rule: length_decay, decay_period: 9}")
    for text, expected in (
        ("{rule: mismatch, signal: k3, target: 1}", MismatchSettings(signal="k3", target=1.0)),
        ("{min_lr_ratio: 0.5}", LengthDecaySettings(decay_period=9, min_lr_ratio=0.5)),
    ):
        (tmp_path / "second.yaml").write_text(f"base: first.yaml\ncorrection: token-tis\nlr_rule: {text}")
        assert job.load(tmp_path / "second.yaml").lr_rule == expected


def on_scheduler(settings: Any) -> tuple[OptimizerParamScheduler, SchedulerRule]:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    scheduler = OptimizerParamScheduler(optimizer, 0.0, 1e-3, 0.0, 0, 100, "constant", 0.0, 0.0, 0, "constant")
    return scheduler, SchedulerRule(scheduler, settings)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (LengthDecaySettings(decay_period=2), "megatron_rc_length_decay"),
        (MismatchSettings(action="halve", patience=2), "megatron_rc_lr_gate"),
    ],
)
def test_the_checkpoint_of_a_host_that_version_0_1_wrote_goes_on(settings: Any, key: str) -> None:
    scheduler, before = on_scheduler(settings)
    for _ in range(4):
        before.begin(MEASURED)
    saved = scheduler.state_dict()
    _, *fields = saved.pop(HOST_KEY).items()
    earlier, after = on_scheduler(settings)
    earlier.load_state_dict({**saved, key: dict(fields)})
    assert after.rule.scale == before.rule.scale == 0.25 and after.rule.rollouts == 4
    assert scheduler.optimizer.param_groups[0]["lr"] == 0.25e-3
    other, untouched = on_scheduler(MismatchSettings() if key.endswith("decay") else LengthDecaySettings())
    other.load_state_dict({**saved, key: dict(fields)})
    assert untouched.rule.rollouts == 0
    assert earlier_state({"lr_decay": None, "lr_gate": None}) is None
