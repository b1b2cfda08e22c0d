"""The key megatron_rc of slime's YAML file, the hook enable that sets the others by it, and what each refuses."""

import dataclasses
import re
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from hosts.slime import sources
from hosts.slime.host import MILES, PATH, arguments
from hosts.slime.single import alone

from megatron_rc import RolloutCorrection
from megatron_rc.correction.settings import PRESETS
from megatron_rc.integrations import slime
from megatron_rc.integrations.flag_rules import WithDefaults
from megatron_rc.integrations.hosts import HOSTS
from megatron_rc.integrations.slime.flag_rules import DEFAULTS
from megatron_rc.integrations.slime.settings import HOOKS, assignments, flag, names, read, recipe
from megatron_rc.integrations.symbols import Recipe
from megatron_rc.learning_rate.length_decay import LengthDecaySettings
from megatron_rc.learning_rate.mismatch import MismatchSettings

TOKEN_TIS = {"correction": "token-tis"}
EVERY_9 = {"lr_rule": {"rule": "length_decay", "decay_period": 9}}
TIS = {"custom_tis_function_path": PATH + "tis"}
STEP = {"custom_megatron_before_train_step_hook_path": PATH + "before_train_step"}
DATA = {"rollout_data_postprocess_path": PATH + "rollout_data", "get_mismatch_metrics": True, **TIS}
WATCH = {"custom_megatron_before_log_prob_hook_path": PATH + "before_log_prob"}
BATCH, ROUTES = {"preset": "token-tis", "normalize": "batch"}, {"correction": "token-tis", "routes": True}
SET = {*HOOKS.values()} - {"custom_megatron_init_path"} | {
    *("use_tis", "get_mismatch_metrics", "use_rollout_logprobs", "loss_type", "use_rollout_entropy")
}
NEGATIVE = {"reject": [{"statistic": "k3", "upper": 0.1, "when": "negative_advantage"}]}


def with_hooks(*hooks: str, key: Any, **changes: Any) -> Namespace:
    """Arguments that name these hooks of ours, and switch them on."""
    on = {"use_tis": "tis" in hooks, "loss_type": "custom_loss" if "loss" in hooks else "policy_loss"}
    on["get_mismatch_metrics"] = "rollout_data" in hooks
    return arguments(**{HOOKS[hook]: PATH + hook for hook in hooks}, megatron_rc=key, **{**on, **changes})


def test_a_correction_is_a_preset_name_or_fields_over_a_preset() -> None:
    for given in ("icepop", {"preset": "icepop"}, RolloutCorrection.preset("icepop").to_dict()):
        assert read(arguments(megatron_rc={"correction": given})).correction == RolloutCorrection.preset("icepop")
    found = read(arguments(megatron_rc=yaml.safe_load("{correction: {preset: icepop, weight: {upper: .inf}}}")))
    assert found.correction.weight is not None
    assert (found.correction.weight.lower, found.correction.weight.upper) == (0.5, float("inf"))
    assert read(arguments()).correction == RolloutCorrection()


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        (None, "^megatron_rc must be a mapping in the YAML file of --custom-config-path, got None$"),
        ({"correction": "ice-pop"}, "^unknown preset 'ice-pop'; did you mean 'icepop'"),
        ({"correction": {"weight": {"uper": 3}}}, "^unknown field 'megatron_rc.correction.weight.uper'"),
        ({"lr_rule": {"rule": "mismatch", "floor": 2}}, "^megatron_rc.lr_rule: floor must be between 0 and 1"),
        ({"aggregation": "sum"}, "^megatron_rc.aggregation"),
        ({"max_nonfinite_share": 2}, r"max_nonfinite_share must be in \[0, 1\], got 2"),
        ({"lr_rule_start": -1}, "lr_rule_start must be >= 0, got -1"),
    ],
)
def test_a_wrong_key_is_one_sentence_that_names_it(key: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read(arguments(megatron_rc=key))


@pytest.mark.parametrize(
    ("changes", "recorded"),
    [
        ({"save_debug_train_data": "{rollout_id}.pt"}, True),
        ({"dump_details": "details"}, True),
        ({}, False),
        # slime takes the entropy of the whole vocabulary and the log-probs of the kept ids
        ({"dump_details": "details", "rollout_top_p": 0.9}, False),
    ],
)
def test_check_lets_a_dump_hold_the_entropy_of_the_policy(changes: dict[str, Any], recorded: bool) -> None:
    args = with_hooks("check", key={}, **{"use_rollout_entropy": False, **changes})
    slime.check(args)
    assert args.use_rollout_entropy is recorded


def test_a_hook_refuses_by_itself_where_check_was_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def args(**key: Any) -> Namespace:
        return arguments(use_tis=True, megatron_rc=key)

    alone(monkeypatch, args())
    nothing: dict[str, Any] = dict.fromkeys(("pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks"))
    nothing |= dict.fromkeys(("total_lengths", "response_lengths"))
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("by the sign of an advantage in tis", lambda: slime.tis(args(correction=NEGATIVE), **nothing)),
        ("--use-tis must be off for loss", lambda: slime.loss(args(), {}, torch.zeros(1), torch.sum)),
        ("--use-tis must be off with rollout_data", lambda: slime.rollout_data(args(), 0, {})),
        ("megatron_rc.aggregation must be set", lambda: slime.pg_loss_reducer([], [], [], False)),
        ("megatron_rc.routes must be true", lambda: slime.before_log_prob(args(), [], "")),
        ("must not depend on", lambda: slime.before_train_step(args(lr_rule="length_decay"), 0, 0, [], None, None)),
    ]
    for sentence, call in calls:
        with pytest.raises(ValueError, match=sentence):
            call()


@pytest.mark.parametrize(
    ("hooks", "key", "changes"),
    [
        (("tis",), TOKEN_TIS, {"advantage_estimator": "gspo", "allgather_cp": True, "context_parallel_size": 2}),
        (("loss", "pg_loss_reducer"), {**TOKEN_TIS, "aggregation": "seq-mean-token-sum"}, {}),
        (("rollout_data",), {"correction": {**BATCH, **NEGATIVE}}, {}),
        (("rollout_data", "tis"), {"correction": {**BATCH, **NEGATIVE}}, {}),
        (("rollout_data", "loss"), {"correction": BATCH}, {}),
        (("rollout_data", "before_train_step"), {"lr_rule": "length_decay"}, {"release_train": True}),
        (("tis", "before_train_step"), EVERY_9, {"release_train": True}),
        (("rollout_data",), TOKEN_TIS, {"get_mismatch_metrics": False, "num_steps_per_rollout": 2}),
        (("rollout_data",), TOKEN_TIS, {"get_mismatch_metrics": False, "advantage_estimator": "gspo"}),
        (("tis",), TOKEN_TIS, {"true_on_policy_mode": True}),
    ],
)
def test_what_the_hooks_can_do_passes(hooks: tuple[str, ...], key: Any, changes: dict[str, Any]) -> None:
    slime.check(with_hooks(*hooks, key=key, **changes))


def parsed(found: Recipe, *, whole_rollouts: bool) -> Namespace:
    """The host's arguments after its command line, its YAML file and `enable`."""
    words = " ".join(found.flags).split("--")[1:]
    given = {name.replace("-", "_"): value or True for name, _, value in (w.strip().partition(" ") for w in words)}
    assert given.pop("custom_config_path") == "rc.yaml"
    args = arguments(**given, **yaml.safe_load(yaml.safe_dump(found.config)))
    vars(args).update(assignments(args, whole_rollouts=whole_rollouts))
    return args


@pytest.mark.parametrize("whole_rollouts", [True, False])
@pytest.mark.parametrize("decay", [None, LengthDecaySettings(), LengthDecaySettings(decay_period=204)])
def test_the_recipe_of_every_correction_passes_the_check(whole_rollouts: bool, decay: Any) -> None:
    corrections: list[RolloutCorrection | None] = [each.correction for each in PRESETS.values() if each.loss == {}]
    if not whole_rollouts:
        corrections.remove(PRESETS["standardized"].correction)
    for correction in (*corrections, None) if decay else corrections:
        args = parsed(recipe(correction, decay, whole_rollouts=whole_rollouts), whole_rollouts=whole_rollouts)
        slime.check(args)
        settings = read(args)
        assert settings.correction == (correction or RolloutCorrection()) and settings.lr_rule == decay
    for pooled, sentence in (
        ({"preset": "token-tis", "normalize": "batch"}, "normalize must be 'none'"),
        ({"preset": "token-tis", "max_k3": 0.1}, "max_k3 must be unset"),
        ({"preset": "standardized"}, "reject must not use 'standardized'"),
    ):
        batch = RolloutCorrection.from_dict(pooled)
        if whole_rollouts:
            slime.check(parsed(recipe(batch, decay, whole_rollouts=True), whole_rollouts=True))
        else:
            with pytest.raises(ValueError, match=f"{sentence}: no hook of this host"):
                recipe(batch, decay, whole_rollouts=False)


def test_the_recipe_of_a_rule_by_mismatch_sees_whole_rollouts_or_is_refused() -> None:
    token_tis, rule = RolloutCorrection.preset("token-tis"), MismatchSettings()
    args = parsed(recipe(token_tis, rule, whole_rollouts=True), whole_rollouts=True)
    slime.check(args)
    assert read(args).lr_rule == rule and args.rollout_data_postprocess_path and not args.use_tis
    by_length = MismatchSettings(signal="length", target=9.0)
    for whole_rollouts in (True, False):
        slime.check(parsed(recipe(None, by_length, whole_rollouts=whole_rollouts), whole_rollouts=whole_rollouts))
    for whole_rollouts, old in ((False, "recompute"), (True, "current")):
        with pytest.raises(ValueError, match="signal of lr_rule must be 'length'"):
            recipe(dataclasses.replace(token_tis, old=old), rule, whole_rollouts=whole_rollouts)
    with pytest.raises(ValueError, match="lr_rule must be settings, .* which go into a YAML file, got Mis"):
        recipe(token_tis, rule.build(1.0), whole_rollouts=True)


def inside(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("slime", "miles"):
        monkeypatch.delitem(sys.modules, f"{other}.backends.megatron_utils.initialize", raising=False)
    if host:
        name = f"{host}.backends.megatron_utils.initialize"
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


def command_line(key: Any, **changes: Any) -> Namespace:
    return arguments(megatron_rc=key, custom_megatron_init_path=PATH + "enable", **changes)


@pytest.mark.parametrize(
    ("host", "key", "values"),
    [
        ("slime", {}, {"use_tis": True, **TIS}),
        ("miles", {"correction": "token-tis"}, {"use_tis": True, **TIS}),
        ("slime", {"correction": "icepop", "lr_rule": "length_decay"}, {"use_tis": True, **TIS, **STEP}),
        ("slime", {"correction": BATCH}, DATA),
        ("slime", {"correction": "token-tis", "lr_rule": "mismatch"}, {**DATA, **STEP}),
        ("miles", {"correction": "off-policy-sequence-mask", "aggregation": "seq-mean-token-sum"},
         {"loss_type": "custom_loss", "custom_loss_function_path": PATH + "loss", "use_rollout_logprobs": True,
          "custom_pg_loss_reducer_function_path": PATH + "pg_loss_reducer"}),
        ("slime", {"correction": {"preset": "token-tis", "old": "current"}, "lr_rule": "length_decay"},
         {"loss_type": "custom_loss", "custom_loss_function_path": PATH + "loss", **STEP}),
        # routes need the hook that watches them, and one that compares them
        ("slime", ROUTES, {**WATCH, **DATA}),
        ("slime", {**ROUTES, "lr_rule": "length_decay"}, {**WATCH, **DATA, **STEP}),
        ("miles", ROUTES, {**WATCH, "use_tis": True, **TIS, **STEP}),
        ("miles", {**ROUTES, "lr_rule": "length_decay"}, {**WATCH, "use_tis": True, **TIS, **STEP}),
    ],
)  # fmt: skip
def test_one_flag_sets_what_the_settings_need_and_nothing_else(
    host: str, key: Any, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    inside(host, monkeypatch)
    args, before = (command_line(key, use_rollout_routing_replay="routes" in key) for _ in range(2))
    slime.enable(args)
    assert vars(args) == {**vars(before), **values}
    # a process of the host that runs it twice, and a user who names the same hooks, change nothing
    slime.enable(args)
    assert vars(args) == {**vars(before), **values}


@pytest.mark.parametrize(
    ("host", "key", "changes", "sentence"),
    [
        ("", {}, {}, "^enable must be named by --custom-megatron-init-path of slime or miles"),
        ("slime", None, {}, "^megatron_rc must be a mapping"),
        ("slime", {}, {"custom_tis_function_path": "my.tis"}, "^--custom-tis-function-path must be unset with enable"),
        ("slime", {"correction": "none"}, {"use_tis": True, "tis_clip": 5.0, "tis_clip_low": 0.5},
         "^--use-tis must be unset with enable, .*weight: {mode: clip, lower: 0.5, upper: 5.0} has the same ones$"),
        ("miles", {"correction": "icepop"}, {"use_tis": True}, "^--use-tis must be unset .*weight: {upper: 2.0} has"),
        ("slime", {"correction": "none"}, {"use_tis": True, "use_critic": True}, "^--use-tis must be unset with"),
        ("miles", {}, {"rollout_top_p": 0.9}, "^--rollout-top-p=0.9 draws from a part"),
        ("slime", {}, {"loss_type": "sft_loss"}, "^--loss-type must be policy_loss with enable, got sft_loss"),
        ("slime", {}, {"use_rollout_logprobs": True}, "^--use-rollout-logprobs must be unset with enable unless"),
        ("slime", {"correction": {"old": "current"}}, {"loss_type": "sft_loss"}, "^--loss-type must be unset with"),
        ("miles", {"correction": BATCH}, {}, "^normalize must be 'none': no hook of this host sees a whole rollout"),
        ("miles", {"correction": "token-tis", "lr_rule": "mismatch"}, {}, "^signal of lr_rule must be 'length'"),
        ("miles", {"lr_rule": "length_decay"}, {**MILES, "skip_actor_forward_only": True},
         "^--skip-actor-forward-only must be"),
        ("slime", {}, {"rollout_top_k": 20}, "^--rollout-top-k=20 draws from a part"),
        ("slime", {"aggregation": "token-mean"}, {}, "^--calculate-per-token-loss must be set exactly"),
        ("slime", {"routes": True}, {}, "^megatron_rc.routes needs --use-rollout-routing-replay"),
        ("miles", {"routes": True, "correction": {"old": "current"}}, {"use_rollout_routing_replay": True},
         "^megatron_rc.correction.old must be 'recompute' with megatron_rc.routes"),
    ],
)  # fmt: skip
def test_what_enable_cannot_do_is_refused_and_doctor_says_the_same(
    host: str, key: Any, changes: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside(host, monkeypatch)
    args = command_line(key, **changes)
    with pytest.raises(ValueError, match=sentence) as refusal:
        slime.enable(args)
    if host:
        args = command_line(key, **changes)
        found = WithDefaults(args, DEFAULTS)
        problems = [rule.mistake(found) for rule in HOSTS[host].flag_rules if rule.severity == "error"]
        assert any(problem and str(refusal.value).startswith(problem) for problem in problems), problems


def test_doctor_finds_no_mistake_in_the_one_line_recipe() -> None:
    for key in ({"correction": "token-tis", "lr_rule": "mismatch"}, {"correction": BATCH}, {"correction": "token-mis"}):
        args = command_line(key)
        assert names(args, "enable") and flag("enable").endswith(PATH + "enable")
        found = WithDefaults(args, DEFAULTS)
        assert [rule.name for rule in HOSTS["slime"].flag_rules if rule.wrong(found)] == []


@pytest.mark.parametrize("host", ["slime", "miles"])
def test_the_real_sources_read_what_enable_sets_after_it_or_only_to_refuse(host: str) -> None:
    folder = sources.tree(host)
    reads = re.compile(rf"args\.({'|'.join(SET)})\b")
    readers = {str(p.relative_to(folder)) for p in Path(folder, host).rglob("*.py") if reads.search(p.read_text())}
    early = {path for path in readers if not path.startswith(f"{host}/backends/")}
    # the driver's checks of flags, and miles's display of them
    assert early <= {f"{host}/utils/arguments.py", "miles/dashboard/args.py"}
    actor = (folder / f"{host}/backends/megatron_utils/actor.py").read_text()
    # the call that leads to enable; the class's own method of that name stands before it
    assert not reads.search(actor[: actor.index("\n        init(")])
