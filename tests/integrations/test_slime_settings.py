"""The key megatron_rc of slime's YAML file, `enable`, which sets the hooks by it, and what it refuses."""

import dataclasses
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hosts.slime import sources
from hosts.slime.host import MILES as MILES_FLAGS
from hosts.slime.host import arguments, inside, naming

from megatron_rc import RolloutCorrection
from megatron_rc.correction.settings import PRESETS
from megatron_rc.integrations import slime
from megatron_rc.integrations.flag_rules import WithDefaults
from megatron_rc.integrations.hosts import HOSTS
from megatron_rc.integrations.slime.chosen_hooks import recipe
from megatron_rc.integrations.slime.settings import ENABLE, HOOKS, MILES, SLIME, read
from megatron_rc.integrations.symbols import Recipe
from megatron_rc.learning_rate.length_decay import LengthDecaySettings
from megatron_rc.learning_rate.mismatch import MismatchSettings

TIS, STEP, WATCH = naming("tis"), naming("before_train_step"), naming("before_log_prob")
DATA = {**naming("rollout_data", "tis"), "get_mismatch_metrics": True}
BATCH, ROUTES = {"preset": "token-tis", "normalize": "batch"}, {"correction": "token-tis", "routes": True}
SET = {*HOOKS.values(), "use_tis", "get_mismatch_metrics", "use_rollout_logprobs", "loss_type", "use_rollout_entropy"}


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
def test_enable_lets_a_dump_hold_the_entropy_of_the_policy(
    changes: dict[str, Any], recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside("slime", monkeypatch)
    args = command_line({}, **{"use_rollout_entropy": False, **changes})
    slime.enable(args)
    assert args.use_rollout_entropy is recorded


def enabled(found: Recipe, host: str, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """The host's arguments after its command line, its YAML file and `enable`."""
    words = " ".join(found.flags).split("--")[1:]
    given = {name.replace("-", "_"): value or True for name, _, value in (w.strip().partition(" ") for w in words)}
    assert given.pop("custom_config_path") == "rc.yaml"
    args = arguments(**given, **yaml.safe_load(yaml.safe_dump(found.config)))
    inside(host, monkeypatch)
    slime.enable(args)
    return args


@pytest.mark.parametrize("host", [SLIME, MILES])
@pytest.mark.parametrize("decay", [None, LengthDecaySettings(), LengthDecaySettings(decay_period=204)])
def test_the_recipe_of_every_correction_can_be_enabled(host: str, decay: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    corrections: list[RolloutCorrection | None] = [each.correction for each in PRESETS.values() if each.loss == {}]
    if host != SLIME:
        corrections.remove(PRESETS["standardized"].correction)
    for correction in (*corrections, None) if decay else corrections:
        args = enabled(recipe(correction, decay, host=host), host, monkeypatch)
        settings = read(args)
        assert settings.correction == (correction or RolloutCorrection()) and settings.lr_rule == decay
    for pooled, sentence in (
        ({"preset": "token-tis", "normalize": "batch"}, "normalize must be 'none'"),
        ({"preset": "token-tis", "max_k3": 0.1}, "max_k3 must be unset"),
        ({"preset": "standardized"}, "reject must not use 'standardized'"),
    ):
        batch = RolloutCorrection.from_dict(pooled)
        if host == SLIME:
            assert not enabled(recipe(batch, decay, host=host), host, monkeypatch).use_tis
        else:
            with pytest.raises(ValueError, match=f"^{sentence} with miles .*a hook that sees a whole rollout"):
                recipe(batch, decay, host=host)


def test_the_recipe_of_a_rule_by_mismatch_sees_whole_rollouts_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    token_tis, rule = RolloutCorrection.preset("token-tis"), MismatchSettings()
    args = enabled(recipe(token_tis, rule, host=SLIME), SLIME, monkeypatch)
    assert read(args).lr_rule == rule and args.rollout_data_postprocess_path and not args.use_tis
    by_length = MismatchSettings(signal="length", target=9.0)
    for host in (SLIME, MILES):
        enabled(recipe(None, by_length, host=host), host, monkeypatch)
    for host, old in ((MILES, "recompute"), (SLIME, "current")):
        with pytest.raises(ValueError, match=f"^signal of lr_rule must be 'length' with {host} and old '{old}'"):
            recipe(dataclasses.replace(token_tis, old=old), rule, host=host)
    with pytest.raises(ValueError, match="lr_rule must be settings, .* which go into a YAML file, got Mis"):
        recipe(token_tis, rule.build(1.0), host=SLIME)


def command_line(key: Any, **changes: Any) -> Namespace:
    return arguments(megatron_rc=key, custom_megatron_init_path=ENABLE.split()[1], **changes)


@pytest.mark.parametrize(
    ("host", "key", "values"),
    [
        ("slime", {}, {"use_tis": True, **TIS}),
        ("miles", {"correction": "token-tis"}, {"use_tis": True, **TIS}),
        ("slime", {"correction": "icepop", "lr_rule": "length_decay"}, {"use_tis": True, **TIS, **STEP}),
        ("slime", {"correction": BATCH}, DATA),
        ("slime", {"correction": "token-tis", "lr_rule": "mismatch"}, {**DATA, **STEP}),
        ("miles", {"correction": "off-policy-sequence-mask", "aggregation": "seq-mean-token-sum"},
         {"loss_type": "custom_loss", "use_rollout_logprobs": True, **naming("loss", "pg_loss_reducer")}),
        ("slime", {"correction": {"preset": "token-tis", "old": "current"}, "lr_rule": "length_decay"},
         {"loss_type": "custom_loss", **naming("loss"), **STEP}),
        ("miles", {"inplace_backward": True}, {"loss_type": "custom_loss", **naming("loss")}),
        ("slime", {"max_nonfinite_share": 0.1}, DATA),
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


NEGATIVE = {"reject": [{"statistic": "k3", "upper": 0.1, "when": "negative_advantage"}]}
OLD_ROLLOUT, CURRENT = {"correction": {"old": "rollout"}}, {"correction": {"old": "current"}}
SUMS, REPLAYED = {"aggregation": "seq-mean-token-sum"}, {"use_rollout_routing_replay": True}
DECAY = {"lr_rule": "length_decay"}


@pytest.mark.host("slime", "miles", proof="refused", feature="bounds by lag")
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
        ("slime", CURRENT, {"loss_type": "sft_loss"}, "^--loss-type must be unset with"),
        ("miles", {"correction": BATCH}, {}, "^normalize must be 'none' with miles"),
        ("slime", {**CURRENT, "max_nonfinite_share": 0.1}, {}, "^max_nonfinite_share must be unset with slime and old"),
        ("miles", {"max_nonfinite_share": 0.1}, {}, "^max_nonfinite_share must be unset with miles"),
        ("miles", {"correction": "token-tis", "lr_rule": "mismatch"}, {}, "^signal of lr_rule must be 'length'"),
        ("slime", {**CURRENT, **DECAY}, {"release_train": True}, "^lr_rule must have decay_period under --rel"),
        ("miles", DECAY, {**MILES_FLAGS, "skip_actor_forward_only": True}, "^--skip-actor-forward-only must be"),
        ("miles", CURRENT, {"skip_actor_forward_only": True}, "^--skip-actor-forward-only must be off"),
        ("slime", DECAY, {"no_save_optim": True}, "whose checkpoints hold no state of it"),
        ("miles", DECAY, {"indep_dp": True}, "share no process group"),
        ("slime", {}, {"rollout_top_k": 20}, "^--rollout-top-k=20 draws from a part"),
        ("slime", {}, {"train_backend": "fsdp"}, "must be megatron, got fsdp"),
        ("slime", {"correction": {"reject": [{"statistic": "mine", "upper": 1}]}}, {}, "'mine'.*ratio, k2"),
        ("slime", {"correction": {"weight": {"upper": "measured"}}}, {}, "keeps no bound"),
        ("slime", {"correction": "centered"}, {}, "centering must be 'none' in a hook, which gets no top"),
        ("miles", {}, {"loss_type": "score_centering"}, "--loss-type must be policy_loss.*got score_centering"),
        ("slime", {"correction": "cispo"}, {}, "surrogate must be null or 'ppo' in a hook"),
        ("miles", {"correction": {"weight": {"growth": "sqrt_lag"}}}, {}, "growth must not be used in"),
        ("slime", {"correction": {"preset": "token-tis", "old": "rollout"}}, {}, "count it twice"),
        ("slime", OLD_ROLLOUT, {"advantage_estimator": "gspo"}, "gspo with the loss .* because old is 'rollout'"),
        ("slime", {"correction": NEGATIVE}, {"advantage_estimator": "cispo"}, "because a rejection reads advantages"),
        ("slime", OLD_ROLLOUT, {"allgather_cp": True, "context_parallel_size": 2}, "zigzag"),
        ("miles", {"inplace_backward": True}, {"true_on_policy_mode": True}, "because inplace_backward is true: there"),
        ("slime", OLD_ROLLOUT, {"use_opsm": True}, "--use-opsm must be off.*off-policy-sequence-mask"),
        ("slime", CURRENT, {"global_batch_size": 1}, "--global-batch-size.*got 4 of them"),
        ("slime", CURRENT, {"num_steps_per_rollout": 2}, "got 2 of them"),
        ("slime", CURRENT, {"custom_pg_loss_reducer_function_path": "my.own"}, "which does not call it"),
        ("slime", SUMS, {"custom_pg_loss_reducer_function_path": "my.own"}, "must be unset with enable, which sets it"),
        ("slime", SUMS, {"calculate_per_token_loss": True}, "^--calculate-per-token-loss must be set exactly"),
        ("slime", {"aggregation": "token-mean"}, {}, "^--calculate-per-token-loss must be set exactly"),
        ("miles", SUMS, {"qkv_format": "bshd", "context_parallel_size": 2}, "must be thd"),
        ("slime", {"routes": True}, {}, "^megatron_rc.routes needs --use-rollout-routing-replay"),
        ("slime", {"routes": True, **CURRENT}, REPLAYED, "^routes must be false with slime and old 'current'"),
        ("miles", {"routes": True, **CURRENT}, REPLAYED, "^megatron_rc.correction.old must be 'recompute' with"),
        ("slime", {"routes": True}, {**REPLAYED, "qkv_format": "bshd"}, "packed zigzag slices"),
        ("miles", {"routes": True}, {**REPLAYED, "recompute_loss_function": True}, "every micro-batch once"),
    ],
)  # fmt: skip
def test_what_enable_cannot_do_is_refused_and_doctor_says_the_same(
    host: str, key: Any, changes: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside(host, monkeypatch)
    args = command_line(key, **changes)
    with pytest.raises(ValueError, match=sentence) as refusal:
        slime.enable(args)
    assert "\n" not in str(refusal.value)
    if host:
        found = WithDefaults(command_line(key, **changes), HOSTS[host].flag_defaults)
        problems = [rule.mistake(found) for rule in HOSTS[host].flag_rules if rule.severity == "error"]
        assert any(problem and str(refusal.value).startswith(problem) for problem in problems), problems


@pytest.mark.parametrize(
    ("host", "key", "changes"),
    [
        ("slime", {"correction": "token-tis", "lr_rule": "mismatch"}, {}),
        ("slime", {"correction": {**BATCH, **NEGATIVE}}, {}),
        ("slime", {"correction": "token-mis"}, {"true_on_policy_mode": True, "advantage_estimator": "gspo"}),
        ("slime", {"correction": "token-tis"}, {"allgather_cp": True, "context_parallel_size": 2}),
        ("slime", {"correction": BATCH}, {"use_tis": True, "use_critic": True}),
        ("slime", DECAY, {"release_train": True}),
        ("miles", {"lr_rule": {"rule": "length_decay", "decay_period": 9}}, {"release_train": True}),
        ("slime", {"correction": "token-tis"}, {"custom_pg_loss_reducer_function_path": "my.own"}),
    ],
)
def test_what_enable_can_do_is_no_mistake_for_doctor(
    host: str, key: Any, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = command_line(key, **changes)
    found = WithDefaults(args, HOSTS[host].flag_defaults)
    assert [rule.name for rule in HOSTS[host].flag_rules if rule.wrong(found)] == []
    inside(host, monkeypatch)
    slime.enable(args)


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
