"""The hook enable: one flag sets the arguments that name the other hooks, and refuses what it would overwrite."""

import re
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hosts.slime import sources
from hosts.slime.host import MILES, PATH, arguments

from megatron_rc.integrations import slime
from megatron_rc.integrations.flag_rules import _WithDefaults
from megatron_rc.integrations.hosts import HOSTS
from megatron_rc.integrations.slime.flag_rules import DEFAULTS
from megatron_rc.integrations.slime.settings import HOOKS, flag, names

TIS = {"custom_tis_function_path": PATH + "tis"}
STEP = {"custom_megatron_before_train_step_hook_path": PATH + "before_train_step"}
DATA = {"rollout_data_postprocess_path": PATH + "rollout_data", "get_mismatch_metrics": True, **TIS}
BATCH = {"preset": "token-tis", "normalize": "batch"}
SET = {*HOOKS.values()} - {"custom_megatron_init_path"} | {
    *("use_tis", "get_mismatch_metrics", "use_rollout_logprobs", "loss_type", "use_rollout_entropy")
}


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
    ],
)  # fmt: skip
def test_one_flag_sets_what_the_settings_need_and_nothing_else(
    host: str, key: Any, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    inside(host, monkeypatch)
    args, before = command_line(key), command_line(key)
    slime.enable(args)
    assert vars(args) == {**vars(before), **values}
    # a process of the host that runs it twice, and a user who names the same hooks, change nothing
    slime.enable(args)
    assert vars(args) == {**vars(before), **values}


@pytest.mark.parametrize("host", ["slime", "miles"])
@pytest.mark.parametrize("rule", [{}, {"lr_rule": "length_decay"}])
def test_routes_bring_the_hook_that_watches_them_and_the_one_that_compares_them(
    host: str, rule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside(host, monkeypatch)
    args = command_line({"correction": "token-tis", "routes": True, **rule}, use_rollout_routing_replay=True)
    before = {**vars(args)}
    slime.enable(args)
    watched = {"custom_megatron_before_log_prob_hook_path": PATH + "before_log_prob"}
    compared = {**DATA, **(STEP if rule else {})} if host == "slime" else {"use_tis": True, **TIS, **STEP}
    assert vars(args) == {**before, **watched, **compared}


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
        ("miles", {}, {"rollout_top_p": 0.9}, "^--rollout-top-p must be 1 on miles, which records no kept ids, got"),
        ("slime", {}, {"loss_type": "sft_loss"}, "^--loss-type must be policy_loss with enable, got sft_loss"),
        ("slime", {}, {"use_rollout_logprobs": True}, "^--use-rollout-logprobs must be unset with enable unless"),
        ("slime", {"correction": {"old": "current"}}, {"loss_type": "sft_loss"}, "^--loss-type must be unset with"),
        ("miles", {"correction": BATCH}, {}, "^normalize must be 'none': no hook of this host sees a whole rollout"),
        ("miles", {"correction": "token-tis", "lr_rule": "mismatch"}, {}, "^signal of lr_rule must be 'length'"),
        ("miles", {"lr_rule": "length_decay"}, {**MILES, "skip_actor_forward_only": True},
         "^--skip-actor-forward-only must be"),
        ("slime", {}, {"rollout_top_k": 20}, "^--rollout-top-k must be -1, got 20"),
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
        found = _WithDefaults(args, DEFAULTS)
        problems = [rule.mistake(found) for rule in HOSTS[host].flag_rules if rule.severity == "error"]
        assert any(problem and str(refusal.value).startswith(problem) for problem in problems), problems


def test_doctor_finds_no_mistake_in_the_one_line_recipe() -> None:
    for key in ({"correction": "token-tis", "lr_rule": "mismatch"}, {"correction": BATCH}, {"correction": "token-mis"}):
        args = command_line(key)
        assert names(args, "enable") and flag("enable").endswith(PATH + "enable")
        found = _WithDefaults(args, DEFAULTS)
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
