"""The plugin of verl in processes of a stand-in: what it replaces and refuses, and the correction."""

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hosts.verl import cases, sources
from hosts.verl.stand_in import CONFIG, PPO, V0, V1, corrected, module, nested, patched
from hosts.verl.stand_in import stub as stub

from megatron_rc import RolloutCorrection, patch
from megatron_rc.integrations import verl as host
from megatron_rc.integrations.verl.refusals import refuse
from megatron_rc.integrations.verl.settings import prepared, read
from megatron_rc.learning_rate.length_decay import LengthDecayLR, LengthDecaySettings


def process(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    variables["PYTHONPATH"] = str(sources.STUB)
    environment = {**sources.environment(), "VERL_USE_EXTERNAL_MODULES": "", **variables}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_the_plugin_does_nothing_and_imports_nothing_heavy_without_its_variable() -> None:
    code = "import verl, sys; print([name for name in ('torch', 'yaml', 'pydantic') if name in sys.modules])"
    done = process(code, VERL_STUB_PLUGIN="megatron_rc.integrations.verl.plugin")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_a_plugin_that_fails_ends_the_process_although_verl_hides_failures() -> None:
    plugin = {"VERL_STUB_PLUGIN": "megatron_rc.integrations.verl.plugin", "MEGATRON_RC_CONFIG": "{correction: tis}"}
    done = process("import verl; print('went on')", **plugin)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("megatron_rc: MEGATRON_RC_CONFIG is set, but verl is not patched: unknown preset")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("/no/such/file.yaml", "no such file"), ("{lr_rule: null}", "MEGATRON_RC_CONFIG must have correction, lr_rule")],
)
def test_a_failure_of_the_plugin_is_one_sentence(text: str, sentence: str, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.delenv("MEGATRON_RC_CONFIG", raising=False)
    plugin = module("megatron_rc.integrations.verl.plugin")
    monkeypatch.setenv("MEGATRON_RC_CONFIG", text)
    with pytest.raises(SystemExit):
        plugin.register()
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line


def test_the_main_process_says_that_it_is_on_and_hands_the_settings_to_all_processes() -> None:
    code = f"""
import json, verl
from verl.utils.config import validate_config
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
assert validate_config({CONFIG!r}, False, False) == "validated"
print(json.dumps(get_ppo_ray_runtime_env()["env_vars"]))
"""
    text = "{correction: token-tis, lr_rule: {rule: length_decay, decay_period: 7}}"
    plugin = {"VERL_USE_EXTERNAL_MODULES": "megatron_rc.integrations.verl.plugin", "MEGATRON_RC_CONFIG": text}
    done = process(code, **plugin)
    assert done.returncode == 0, done.stderr
    line, variables = done.stdout.splitlines()
    assert line.startswith("megatron_rc is on in this run of verl: {correction: {weight: {level: token")
    handed = json.loads(variables)
    assert handed["NCCL_DEBUG"] == "WARN" and handed["VERL_USE_EXTERNAL_MODULES"] == plugin["VERL_USE_EXTERNAL_MODULES"]
    assert read(handed["MEGATRON_RC_CONFIG"]) == read(text)


@pytest.mark.host("verl", proof="stand-in", feature="symbols where they are expected")
@pytest.mark.host("verl", proof="stand-in", feature="everything is given back")
def test_functions_are_replaced_as_their_modules_arrive_and_all_are_given_back() -> None:
    module("verl.utils.config")
    with patch("verl", correction=RolloutCorrection.preset("token-tis"), lr_rule=LengthDecaySettings()) as ours:
        report = ours.report()
        assert "verl 0.10.0.dev, patched" in report and "verl.utils.config.validate_config: refuses" in report
        waiting = report.partition("to be replaced once this process imports them: ")[2].splitlines()[0].split(", ")
        # the last four make log-probs, which these settings leave to the host
        assert waiting == [symbol.path for symbol in host.SYMBOLS[1:-4]]
        assert not any(name in sys.modules for name in (V1, f"{PPO}core_algos"))
        during = module(V1).compute_rollout_correction_and_add_to_batch
        worker = module("verl.workers.engine_workers").TrainingWorker
        assert hasattr(during, "__wrapped__")
        assert worker.train_mini_batch.dispatch == "nd", "Ray finds methods by the attributes of their decorators"
        assert "TrainingWorker.train_mini_batch: steps" in ours.report()
    helper = module(f"{PPO}rollout_corr_helper").compute_rollout_correction_and_add_to_batch
    assert module(V1).compute_rollout_correction_and_add_to_batch is helper is not during
    assert not hasattr(worker.train_mini_batch, "__wrapped__")
    assert not hasattr(module(f"{PPO}core_algos").get_policy_loss_fn, "__wrapped__")
    assert ours.report().startswith("verl 0.10.0.dev, restored")


def test_what_settings_do_not_need_is_left_alone() -> None:
    with patched("{correction: none}"):
        assert hasattr(module(f"{PPO}core_algos").get_policy_loss_fn, "__wrapped__")
        for name, symbol in ((V1, "PPOTrainer"), (V0, "RayPPOTrainer")):
            assert not hasattr(getattr(module(name), symbol)._update_actor, "__wrapped__")
    with patched("{lr_rule: length_decay}"):
        helper = module(f"{PPO}rollout_corr_helper").compute_rollout_correction_and_add_to_batch
        assert not hasattr(helper, "__wrapped__")


def test_a_patch_in_this_process_refuses_a_rule_that_no_other_process_could_be_given() -> None:
    with pytest.raises(ValueError, match="lr_rule must be settings, .* which go to other processes"):
        patch("verl", lr_rule=LengthDecayLR(1e-3))


@pytest.mark.host("verl", proof="refused", feature="bounds by lag")
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{correction: {weight: {upper: measured}}}", "upper must be a number in verl"),
        ("{correction: {reject: [{statistic: lag, level: token, upper: 4}]}}", "lag must not be used in verl"),
        ("{correction: {reject: [{statistic: entropy, upper: 4}]}}", "statistic 'entropy' is not known to verl"),
        ("{correction: {old: current}}", "old must be 'recompute' or 'rollout' in verl"),
        ("{correction: {old: rollout, weight: {upper: 2}}}", "weight must be None when old is 'rollout'"),
        ("{correction: {old: rollout, max_k3: 1}}", "max_k3 must be unset when old is 'rollout'"),
        ("{correction: {old: rollout}, denominator: kept}", "denominator must be 'original' when old is 'rollout'"),
        ("{correction: {old: rollout, reject: [{statistic: standardized, upper: 3}]}}",
         "reject must not use 'standardized' in loss_mode=megatron_rc"),
        ("{correction: centered}", "centering must be 'none' in verl, which gets no top log-probs from its sampler"),
        ("{correction: cispo}", "surrogate must be null or 'ppo' in verl, which has its own, got 'cispo'"),
        ("{correction: {old: rollout}, surrogate: cispo}", "surrogate must not be 'cispo' with verl, whose own loss"),
        ("{correction: none, surrogate: reinforce}", "surrogate must be 'ppo' unless old is 'rollout'"),
        ("{correction: {reject: [{upper: 4, when: negative_advantage}]}}", "must be 'always' unless old is 'rollout'"),
        ("{correction: icepop, denominator: kept, lr_rule: length_decay}",
         "denominator must be 'original' for a learning rate"),
        ("{correction: {old: rollout}, lr_rule: {rule: mismatch, signal: k3, target: 1}}",
         "signal of lr_rule must be 'length'"),
        ("{correction: none, inner: bypass_mode}", "inner must be a loss_mode of verl that takes weights"),
        ("{correction: token-tis, denominator: kept}", "denominator must be 'original' with a correction that drops"),
        ("{head: linear, vocab_parallel_logprobs: true}", "vocab_parallel_logprobs must be False with head: linear"),
        ("{correction: none, max_nonfinite_share: 2}", "max_nonfinite_share must be in"),
        ("{corection: none}", "corection"),
    ],
)  # fmt: skip
def test_settings_that_verl_cannot_honour_are_refused_by_name(text: str, sentence: str) -> None:
    with pytest.raises(ValueError) as refused:
        prepared(read(text))
    assert sentence in str(refused.value)


WITHOUT_POLICY_LOSS = {"enabled": True, "distillation_loss": {"use_task_rewards": False, "use_policy_gradient": False}}
LOSS_MODE, OWN = "actor_rollout_ref.actor.policy_loss.loss_mode", "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("text", "path", "value", "sentence"),
    [
        ("{lr_rule: length_decay}", "actor_rollout_ref.actor.strategy", "fsdp2", "actor.strategy=megatron"),
        ("{lr_rule: length_decay}", LOSS_MODE, "megatron_rc", "needs a correction in"),
        ("{correction: none}", OWN, None, "must not be null: verl then never calls"),
        ("{correction: none}", f"{OWN}.rollout_is", "token", "rollout_is must be null"),
        ("{correction: none}", f"{OWN}.rollout_rs", "token_k1", "rollout_rs must be null"),
        ("{correction: none}", f"{OWN}.bypass_mode", True, "bypass_mode must be True exactly"),
        ("{correction: {old: rollout}}", f"{OWN}.bypass_mode", False, "bypass_mode must be True"),
        ("{correction: {old: rollout}}", f"{OWN}.bypass_mode", True, "loss_mode must be megatron"),
        ("{correction: none}", "actor_rollout_ref.rollout.calculate_log_probs", False, "there is no log mu"),
        ("{correction: none}", LOSS_MODE, "bypass_mode", "must not be bypass_mode"),
        ("{correction: none, inner: gspo}", LOSS_MODE, "vanilla", "inner acts only"),
        ("{correction: token-tis}", LOSS_MODE, "geo_mean", "not be geo_mean"),
        ("{correction: icepop}", LOSS_MODE, "clip_cov", "not be clip_cov with a correction that drops tokens"),
        ("{correction: token-tis}", f"{OWN}.rollout_is_threshold", 5.0, "must be 2.0, its default"),
        ("{correction: none}", f"{OWN}.rollout_is_batch_normalize", True, "must be False, its"),
        ("{correction: none}", f"{OWN}.loss_type", "reinforce", "must be ppo_clip, its default"),
        ("{correction: none}", f"{OWN}.score_centering", True, "must be False, its default"),
        ("{correction: none}", "actor_rollout_ref.rollout.temperature", 0.0, "a greedy sampler has no log-prob"),
        ("{correction: none}", "actor_rollout_ref.rollout.top_p", 0.9, "top_p=1 and"),
        ("{correction: none}", "actor_rollout_ref.rollout.top_k", 20, "draws from a part of the vocabulary"),
        ("{correction: token-tis}", "distillation", WITHOUT_POLICY_LOSS, "distillation without a policy loss"),
    ],
)
def test_configurations_that_disable_settings_are_refused(text: str, path: str, value: Any, sentence: str) -> None:
    config = json.loads(json.dumps(CONFIG))
    *folders, last = path.split(".")
    section = config
    for folder in folders:
        section = section[folder]
    section[last] = value
    with pytest.raises(ValueError) as refused:
        refuse(prepared(read(text)), config)
    assert sentence in str(refused.value)


def test_raw_log_probs_are_refused_only_at_another_temperature_than_one() -> None:
    state, config = prepared(read("{correction: none}")), json.loads(json.dumps(CONFIG))
    config["actor_rollout_ref"]["rollout"]["logprobs_mode"] = "raw_logprobs"
    refuse(state, config)
    config["actor_rollout_ref"]["rollout"]["temperature"] = 0.7
    with pytest.raises(ValueError, match="returns log-probs before the temperature"):
        refuse(state, config)


def test_the_asynchronous_program_with_its_bypass_is_refused_where_it_starts_and_at_its_first_update() -> None:
    config = json.loads(json.dumps(CONFIG))
    config["algorithm"]["rollout_correction"]["bypass_mode"] = True
    with patched("{correction: token-tis}"):
        with pytest.raises(ValueError, match="bypass_mode must be True exactly .* asynchronous programs of verl"):
            module("verl.trainer.constants_ppo").get_ppo_ray_runtime_env(config)
        batch = SimpleNamespace(batch={"rollout_log_probs": torch.zeros(1)})
        with pytest.raises(ValueError, match="bypass_mode must be True exactly when correction.old is 'rollout'"):
            module(f"{PPO}rollout_corr_helper").apply_bypass_mode(batch, {}, {})
    with patched("{correction: {old: rollout}}"):
        module(f"{PPO}rollout_corr_helper").apply_bypass_mode(batch, {}, {})
    assert batch.batch["old_log_probs"] is batch.batch["rollout_log_probs"]


def test_padding_rows_count_nowhere() -> None:
    batch = cases.rollout(0)
    padded = cases.Rollout(*(torch.cat([part, torch.zeros_like(part[:4])]) for part in batch))
    settings = json.dumps({"correction": cases.correction("token-tis and seq_mean_k3").to_dict()})
    (one, metrics), (other, same) = corrected(settings, batch), corrected(settings, padded)
    assert same == pytest.approx(metrics, rel=1e-12)
    assert torch.equal(other["rollout_is_weights"][:6], one["rollout_is_weights"])
    assert not other["rollout_is_weights"][6:].any()


@pytest.mark.host("verl", proof="stand-in", feature="turns as units (`level: segment`)")
def test_turns_are_the_runs_of_the_response_mask() -> None:
    batch = cases.rollout(0)
    batch.rollout[0] = batch.old[0]
    batch.rollout[0, 0] -= 2.0  # the first turn of the first response is this token
    gate = {"correction": {"reject": [{"statistic": "ratio", "level": "segment", "reduce": "mean", "upper": 2.0}]}}
    weights = corrected(json.dumps(gate), batch)[0]["rollout_is_weights"]
    assert weights[0, 0] == 0 and (weights[0, 1:] == batch.mask[0, 1:]).all()


def test_correction_none_measures_and_hands_verl_no_weights() -> None:
    batch = cases.rollout(0)
    data, metrics = corrected("{correction: none}", batch)
    assert "rollout_is_weights" not in data and torch.equal(data["response_mask"], batch.mask)
    assert metrics["rc/k3"] == metrics["rollout_corr/k3_kl"] > 0


def test_too_many_corrupt_log_probs_stop_the_run_before_its_update() -> None:
    batch = cases.rollout(0)
    batch.rollout[0, 0] = float("nan")
    with pytest.raises(ValueError, match="nonfinite_share must be <= 0.01, got 1 of"):
        corrected("{correction: token-tis}", batch)
    metrics = corrected("{correction: token-tis, max_nonfinite_share: 0.1}", batch)[1]
    assert metrics["rc/nonfinite_share"] == pytest.approx(1 / 49)


def test_a_nan_of_the_trainer_at_a_dropped_token_reaches_the_update_of_neither_trainer() -> None:
    batch = cases.rollout(0)
    batch.old[0, 0] = float("nan")
    data, _ = corrected("{correction: token-tis, max_nonfinite_share: 0.1}", batch)
    assert data["rollout_is_weights"][0, 0] == 0 and data["old_log_probs"][0, 0] == batch.rollout[0, 0]
    assert torch.equal(data["old_log_probs"].flatten()[1:], batch.old.flatten()[1:])
    with patched("{correction: token-tis, max_nonfinite_share: 0.1}"):
        v1, whole = module(V1), {"old_log_probs": batch.old, "rollout_log_probs": batch.rollout}
        v1.PPOTrainer.correct(SimpleNamespace(batch={**whole, "response_mask": batch.mask}), {})
        rows = {"old_log_probs": [[float("nan"), -1.0], [-2.0]], "rollout_log_probs": [[-3.0, -1.0], [-2.0]]}
        rows |= {"response_mask": [[1, 1], [1]], "rollout_is_weights": [[0.0, 1.0], [1.0]]}
        v1.tq.fields.update({name: nested(values) for name, values in rows.items()})
        v1.PPOTrainer()._update_actor(v1.Batch(), {})
        assert [row.tolist() for row in v1.tq.fields["old_log_probs"].unbind()] == [[-3.0, -1.0], [-2.0]]


@pytest.mark.parametrize("denominator", ["original", "kept"])
def test_rejected_tokens_leave_the_update_of_both_trainers_only_for_denominator_kept(denominator: str) -> None:
    weights, mask = [[1.0, 0.0, 2.0], [0.0, 0.5]], [[1, 1, 1], [1, 1]]
    expected = [[1, 0, 1], [0, 1]] if denominator == "kept" else mask
    with patched(f"{{correction: icepop, denominator: {denominator}}}"):
        v1, v0 = module(V1), module(V0)
        v1.tq.fields.update(response_mask=nested(mask), loss_mask=nested(mask), rollout_is_weights=nested(weights))
        v1.PPOTrainer()._update_actor(v1.Batch(), {})
        for name in ("response_mask", "loss_mask"):
            assert [row.tolist() for row in v1.tq.fields[name].unbind()] == expected
        trainer = v0.RayPPOTrainer()
        padded = {"response_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]), "rollout_is_weights": torch.zeros(2, 3)}
        padded["rollout_is_weights"][0], padded["rollout_is_weights"][1, 1] = torch.tensor(weights[0]), 0.5
        trainer._update_actor(SimpleNamespace(batch=padded))
        assert trainer.updated_with["response_mask"].tolist() == [expected[0], [*expected[1], 0]]


@pytest.mark.parametrize(
    ("text", "metric"),
    [("{lr_rule: length_decay}", "lr_rule/scale"),
     ("{lr_rule: {rule: mismatch, signal: length, target: 1000}}", "lr_rule/scale"),
     ("{correction: {old: rollout}}", "rc/k3")],
)  # fmt: skip
def test_workers_that_never_loaded_the_plugin_are_noticed_after_their_first_update(text: str, metric: str) -> None:
    with patched(text):
        v1, v0 = module(V1).PPOTrainer(), module(V0).RayPPOTrainer()
        updates = (lambda: v1._update_actor(None, {}), lambda: v0._update_actor(SimpleNamespace(batch={})))
        for update in updates:
            with pytest.raises(ValueError, match="the workers of verl report no .* run without megatron_rc"):
                update()
        v1.reported = v0.reported = {f"actor/{metric}": 1.0}
        for update in updates:
            update()
