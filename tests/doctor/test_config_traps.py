"""Every known trap in verl's overrides and NeMo-RL's YAML, with settings that have it and others that do not."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from flag_traps import traps

from megatron_rc.doctor.host.checks import flag_checks
from megatron_rc.integrations.hosts import HOSTS

VERL, NEMO = "verl", "nemo-rl"
ROLLOUT, CORRECTION = "actor_rollout_ref.rollout", "algorithm.rollout_correction"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
OURS = 'MEGATRON_RC_CONFIG={"correction":"token-tis"}'
MOE = "actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B model_engine=megatron"
ACTOR = "actor_rollout_ref.actor.megatron"
REPLAY = f"{ACTOR}.router_replay.mode=R3"
BYPASS, K1 = f"{CORRECTION}.bypass_mode=True", f"{CORRECTION}.rollout_rs=seq_mean_k1"
PATCHED = "-m megatron_rc patch --rc-host nemo-rl --rc-preset token-tis examples/run_grpo.py"
IS = "loss_fn.use_importance_sampling_correction=true"
HEAD = 'MEGATRON_RC_CONFIG={"head":"linear"}'
SHARDED_LOGPROBS = 'MEGATRON_RC_CONFIG={"vocab_parallel_logprobs":true}'
STRATEGY = "actor_rollout_ref.actor.strategy=megatron"
FUSED, MTP = "actor_rollout_ref.model.use_fused_kernels=True", "actor_rollout_ref.model.mtp.enable=True"
SHARDED = f"model_engine=megatron {ACTOR}.sequence_parallel=False {ACTOR}.tensor_model_parallel_size=2"
FULLY_ASYNC = "verl.experimental.fully_async_policy.fully_async_main"
MCORE = "policy.megatron_cfg.enabled=true"
RAW = "policy.generation.vllm_cfg.logprobs_mode=raw_logprobs"
TIS = "loss_fn.truncated_importance_sampling_type=tis"
FP8 = "policy.generation.vllm_cfg.precision=fp8"
NVFP4 = "policy.generation.quant_cfg=NVFP4"
ASYNC, PPO_ASYNC, SAMPLER = "grpo.async_grpo.enabled=true", "ppo.async_ppo.enabled=true", "async_rl.sampler"
EIGHT_EXPERTS = "policy.megatron_cfg.expert_model_parallel_size=8"
MASKS = "grpo.seq_logprob_error_threshold=2"
SIDES = (CORRECTION, "actor_rollout_ref.actor.policy_loss.rollout_correction")
CENTERED = " ".join(
    [f"{side}.{name}" for side in SIDES for name in ("bypass_mode=True", "loss_type=reinforce", "score_centering=True")]
    + [f"{LOSS}=bypass_mode", f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.topk_log_probs=128"]
)
"""What verl's own example of score centering sets."""
TOKEN_IS = " ".join(f"{side}.rollout_is=token" for side in SIDES)


TRAPPED = [
    (VERL, "rollout-logprobs", f"{ROLLOUT}.calculate_log_probs=False", "note", "neither measured nor corrected"),
    (VERL, "rollout-logprobs", f"{ROLLOUT}.calculate_log_probs=False {OURS}", "error", "cannot act"),
    (VERL, "logprobs-mode", f"{ROLLOUT}.logprobs_mode=raw_logprobs {ROLLOUT}.temperature=0.7", "error", "before th"),
    (VERL, "temperature", f"{ROLLOUT}.temperature=0", "error", "greedy"),
    (VERL, "top-p-top-k", f"{ROLLOUT}.top_p=0.9", "error", "part of the vocabulary"),
    (VERL, "top-p-top-k", f"++{ROLLOUT}.top_k=20", "error", "part of the vocabulary"),
    (VERL, "correction-section", f"{CORRECTION}=null", "error", "never calls"),
    (VERL, "megatron-rc-settings", f"{OURS} {CORRECTION}.rollout_is=token", "error", "rollout_is must be null"),
    (VERL, "megatron-rc-settings", f"{OURS} {LOSS}=geo_mean", "error", "geo_mean"),
    (VERL, "megatron-rc-settings", f"-m {FULLY_ASYNC} {OURS}", "error", "bypass_mode must be True exactly"),
    (VERL, "megatron-rc-settings", 'MEGATRON_RC_CONFIG={"lr_rule":"length_decay"}', "error", "strategy=megatron"),
    (VERL, "megatron-rc-settings", f"{SHARDED_LOGPROBS} {FUSED} model_engine=megatron", "error", "must be False"),
    (VERL, "megatron-rc-settings", SHARDED_LOGPROBS, "error", f"vocab_parallel_logprobs needs {STRATEGY}, got None"),
    (VERL, "megatron-rc-settings", HEAD, "error", f"head: linear needs {STRATEGY}, got None"),
    (VERL, "megatron-rc-settings", f"{HEAD} model_engine=megatron", "error", "use_fused_kernels must be True"),
    (VERL, "megatron-rc-settings", f"{HEAD} {FUSED} {SHARDED} actor_rollout_ref.model.use_remove_padding=False",
     "error", "use_remove_padding must be True with head: linear"),
    (VERL, "megatron-rc-settings", f"{HEAD} {FUSED} model_engine=megatron {MTP}", "error", "mtp.enable must be False"),
    (VERL, "megatron-rc-settings", 'MEGATRON_RC_CONFIG={"corection":"none"}', "error", "corection"),
    (VERL, "fused-head-gradient", f"{FUSED} {SHARDED}", "error", "nothing adds the parts up"),
    (VERL, "bypass-reaches-workers", f"{BYPASS} {CORRECTION}.loss_type=reinforce", "error", "drop"),
    (VERL, "bypass-reaches-workers", f"trainer.use_v1=False {BYPASS} {K1}", "error", "4912"),
    (VERL, "bypass-reaches-workers", f"{BYPASS} {CORRECTION}.rollout_is=token", "warning", "never applies rollout_is"),
    (VERL, "bypass-reaches-workers", f"-m {FULLY_ASYNC} {CORRECTION}.rollout_is=token", "warning", "never applies"),
    (VERL, "bypass-reaches-workers", f"-m {FULLY_ASYNC} {K1}", "error", "4912"),
    (VERL, "loss-mode", f"{LOSS}=megatron_rc", "error", "MEGATRON_RC_CONFIG alone"),
    (VERL, "loss-mode", f"{LOSS}=geo_mean {CORRECTION}.rollout_is=token", "error", "one rejected token"),
    (VERL, "k1-bounds", f"{K1} {CORRECTION}.rollout_rs_threshold=0.9_1.2", "note", "mu / pi"),
    (VERL, "rejection-denominator", f"{CORRECTION}.rollout_rs=token_k1 trainer.use_v1=False", "warning", "step grows"),
    (VERL, "rejection-denominator", f"-m {FULLY_ASYNC} {K1} {CORRECTION}.bypass_mode=False", "warning", "step grows"),
    (VERL, "quantized-rollouts", f"+{ROLLOUT}.quantization=fp8", "warning", "nothing bounds"),
    (VERL, "quantized-rollouts", f"+{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype=fp8", "warning", "nothing bounds"),
    (VERL, "quantized-rollouts", f"+{ROLLOUT}.engine_kwargs.sglang.quantization=fp8", "warning", "nothing bounds"),
    (VERL, "quantized-checkpoint", "actor_rollout_ref.model.path=a/B-FP8", "warning", "a/B-FP8"),
    (VERL, "asynchronous-rollouts", "trainer.v1.trainer_mode=separate_async", "warning", "older weights"),
    (VERL, "two-policies", f"-m {FULLY_ASYNC}", "note", "PPO's clip"),
    (VERL, "moe-replay", MOE, "warning", "choose experts"),
    (VERL, "moe-replay", f"{MOE.replace('megatron', 'veomni')}", "warning", "choose experts"),
    (VERL, "moe-replay", MOE.replace("Qwen/", "$DATA/models/"), "warning", "choose experts"),
    (VERL, "moe-replay", f"{MOE} {REPLAY}", "error", "does not return"),
    (VERL, "moe-replay", f"{ROLLOUT}.enable_rollout_routing_replay=True", "error", "does not replay"),
    (VERL, "dtypes", f"model_engine=megatron {ROLLOUT}.dtype=float16", "warning", "float16"),
    (VERL, "score-centering", f"{CORRECTION}.score_centering=True", "error", "must both be True"),
    (VERL, "score-centering", f"{CENTERED} model_engine=megatron", "error", "must be fsdp or fsdp2"),
    (VERL, "score-centering", f"{CENTERED} {FUSED}", "error", "use_fused_kernels must be False"),
    (VERL, "score-centering", f"{CENTERED} distillation.enabled=True", "error", "distillation.enabled must be False"),
    (VERL, "score-centering", f"{CENTERED} {LOSS}=vanilla", "error", "loss_mode must be bypass_mode"),
    (VERL, "score-centering", f"{CENTERED} {ROLLOUT}.topk_log_probs=0", "error", "topk_log_probs must be above 0"),
    (VERL, "score-centering", f"{CENTERED} {ROLLOUT}.name=sglang", "error", "name must be vllm"),
    (VERL, "score-centering", f"{CENTERED} {ROLLOUT}.logprobs_mode=raw_logprobs", "error", "be processed_logprobs"),
    (VERL, "score-centering", f"{CENTERED} {ROLLOUT}.top_p=0.9", "error", "top_p=1 and"),
    (VERL, "score-centering", f"{CENTERED} {TOKEN_IS.replace('=token', '=sequence')}", "error", "token or null"),
    (VERL, "score-centering", f"{CENTERED} {TOKEN_IS} {SIDES[1]}.rollout_is=null", "error", "is must be that of"),
    (VERL, "score-centering", f"{CENTERED} {SIDES[1]}.loss_type=ppo_clip", "error", "loss_type must be that of"),
    (NEMO, "temperature", "policy.generation.temperature=0", "error", "greedy"),
    (NEMO, "logprobs-mode", f"{RAW} policy.generation.temperature=0.7", "error", "before the temp"),
    (NEMO, "quantized-rollouts", FP8, "error", "refuses to start"),
    (NEMO, "quantized-rollouts", f"{FP8} {IS}", "warning", "nothing bounds"),
    (NEMO, "quantized-rollouts", f"policy.generation.real_quant=true {NVFP4}", "warning", "quant_cfg=NVFP4 quantises"),
    (NEMO, "quantized-checkpoint", "policy.model_name=a/B-FP8", "warning", "a/B-FP8"),
    (NEMO, "asynchronous-rollouts", ASYNC, "error", "refuses to start"),
    (NEMO, "asynchronous-rollouts", f"{ASYNC} {IS}", "warning", "nothing bounds"),
    (NEMO, "asynchronous-rollouts", f"examples/run_ppo.py {PPO_ASYNC}", "error", "refuses to start"),
    (NEMO, "asynchronous-rollouts", f"examples/run_ppo.py {PPO_ASYNC} {IS}", "warning", "nothing bounds"),
    (NEMO, "asynchronous-rollouts", f"{SAMPLER}.max_lookahead_versions=1", "warning", "nothing bounds"),
    (NEMO, "asynchronous-rollouts", f"{SAMPLER}.max_staleness_versions=1 {IS}", "warning", "nothing bounds"),
    (NEMO, "asynchronous-rollouts", f"{SAMPLER}.name=ready_first", "error", "refuses to start"),
    (NEMO, "trajectory-age", f"{ASYNC} grpo.async_grpo.max_trajectory_age_steps=4", "note", "4 steps old"),
    (NEMO, "trajectory-age", f"{ASYNC} grpo.async_grpo.max_trajectory_age_steps=8 "
     "grpo.async_grpo.in_flight_weight_updates=true", "note", "8 steps old"),
    (NEMO, "trajectory-age", f"{PPO_ASYNC} ppo.async_ppo.max_trajectory_age_steps=4", "note", "4 steps old"),
    (NEMO, "moe-replay", f"{MCORE} policy.model_name=openai/gpt-oss-20b", "warning", "choose experts"),
    (NEMO, "moe-replay", f"{MCORE} policy.model_name=/path/to/model {EIGHT_EXPERTS}", "warning", "choose experts"),
    (NEMO, "router-dtype",
     "policy.model_name=a/moe policy.megatron_cfg.enabled=true policy.megatron_cfg.moe_router_dtype=null", "warning",
     "ties"),
    (NEMO, "sequence-weights", f"{IS} loss_fn.sequence_level_importance_ratios=true", "warning", "exp(sum"),
    (NEMO, "ratio-of-one", "loss_fn.force_on_policy_ratio=true", "note", "not measured"),
    (NEMO, "ratio-of-one", f"{PATCHED} loss_fn.force_on_policy_ratio=true", "error", "no gap to correct"),
    (NEMO, "data-plane", f"{PATCHED} data_plane.enabled=true", "error", "no rollout is on"),
    (NEMO, "two-corrections", f"{PATCHED} {TIS}", "error", "_type=tis counts"),
    (NEMO, "two-corrections", f"{PATCHED} {IS}", "error", "second time"),
]  # fmt: skip


@pytest.mark.host("verl", "nemo-rl", proof="stand-in", feature="doctor knows its flags")
@pytest.mark.parametrize(("host", "check", "text", "status", "sentence"), TRAPPED)
def test_a_trap_is_found_and_has_a_fix(host: str, check: str, text: str, status: str, sentence: str) -> None:
    finding = traps(host, text)[check]
    assert (finding.status, finding.decided) == (status, True)
    assert sentence in finding.found and finding.fix


@pytest.mark.parametrize(
    ("host", "text"),
    [
        (VERL, "algorithm.adv_estimator=grpo"),
        (VERL, f"{ROLLOUT}.logprobs_mode=raw_logprobs"),
        (NEMO, f"{RAW} policy.model_name=openai/gpt-oss-20b"),
        (VERL, f"{OURS} +{ROLLOUT}.quantization=fp8 trainer.v1.trainer_mode=separate_async {LOSS}=megatron_rc"),
        (VERL, f"{MOE} {REPLAY} {ROLLOUT}.enable_rollout_routing_replay=True {CORRECTION}.rollout_is=token"),
        (VERL, f"actor_rollout_ref.actor.veomni.router_replay.mode=R3 {ROLLOUT}.enable_rollout_routing_replay=True"),
        (VERL, f"{HEAD} {FUSED} {SHARDED}"),
        (VERL, f"{SHARDED_LOGPROBS} model_engine=megatron"),
        (VERL, f"{FUSED} {SHARDED[:-1]}1"),
        (VERL, CENTERED),
        (VERL, f"{CENTERED} {TOKEN_IS} trainer.use_v1=False"),
        (NEMO, "examples/run_grpo.py"),
        (NEMO, f"{FP8} {IS} {TIS}"),
        (NEMO, f"{FP8} {IS} {ASYNC} {MASKS} loss_fn.force_on_policy_ratio=true"),
        (NEMO, f"examples/run_grpo_single_controller.py {SAMPLER}.max_lookahead_versions=0"),
        (NEMO, f"{PATCHED} {FP8} {IS} {ASYNC}"),
    ],
)
def test_settings_without_a_trap_are_good(host: str, text: str) -> None:
    assert not {name: finding for name, finding in traps(host, text).items() if finding.status != "good"}


def test_every_trap_is_tried() -> None:
    names = {(host, check.name) for host in (VERL, NEMO) for check in flag_checks(HOSTS[host])}
    assert names == {row[:2] for row in TRAPPED} | {(host, "shell-variables") for host in (VERL, NEMO)}


def test_a_yaml_file_is_read_over_its_parents_and_under_the_overrides(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "policy: {precision: fp8, model_name: a/moe, generation: {vllm_cfg: {precision: '${policy.precision}'}}}\n"
    )
    child = tmp_path / "recipes/child.yaml"
    child.parent.mkdir()
    child.write_text("defaults: ../base.yaml\nloss_fn: {use_importance_sampling_correction: true}\n")
    found = traps(NEMO, f"{child} policy.model_name=a/dense")
    assert found["quantized-rollouts"].status == "warning" and found["moe-replay"].status == "good"
    with pytest.raises(ValueError, match="found none at"):
        traps(NEMO, f"--config {tmp_path}/none.yaml")


def test_the_yaml_of_a_hydra_host_is_read_over_the_files_of_its_folder_and_under_the_overrides(tmp_path: Path) -> None:
    (tmp_path / "sampling").mkdir()
    (tmp_path / "sampling/greedy.yaml").write_text("temperature: 0\ntop_p: 0.9\n")
    (tmp_path / "base.yaml").write_text("algorithm: {rollout_correction: null}\ntrainer: {use_v1: false}\n")
    (tmp_path / "mine.yaml").write_text(
        "hydra: {searchpath: [file://verl/trainer/config]}\n"
        "defaults: [ppo_trainer, base, {sampling@actor_rollout_ref.rollout: greedy}, {override actor: dp}, _self_]\n"
        "algorithm: {rollout_correction: {rollout_rs: token_k1}}\n"
    )
    for named in (f"--config-path={tmp_path} --config-name='mine.yaml'", f"-cp {tmp_path} -cn mine"):
        found = traps(VERL, f"python -m verl.trainer.main_ppo {named.replace(chr(39), '')} {ROLLOUT}.temperature=1")
        assert (found["temperature"].status, found["top-p-top-k"].status) == ("good", "error")
        assert found["correction-section"].status == "good" and found["rejection-denominator"].status == "warning"
    own = traps(VERL, "python -m verl.trainer.main_ppo --config-path=config --config-name=ppo_megatron_trainer.yaml")
    assert {finding.status for finding in own.values()} == {"good"}
    (tmp_path / "ppo_trainer.yaml").write_text("actor_rollout_ref: {rollout: {top_p: 0.9}}\n")
    copied = traps(VERL, f"python -m verl.trainer.main_ppo --config-path={tmp_path} {ROLLOUT}.temperature=1")
    assert copied["top-p-top-k"].status == "error", "a file of the host's own name that is not the host's"
    elsewhere = traps(VERL, f"python -m verl.trainer.main_ppo --config-name=$NAME {ROLLOUT}.top_p=1 {ROLLOUT}.top_k=-1")
    assert not elsewhere["temperature"].decided and elsewhere["top-p-top-k"].status == "good"


@pytest.mark.parametrize(
    ("config", "checks"),
    [
        ({"num_experts": 128}, {"moe-replay"}),
        ({"text_config": {"n_routed_experts": 64}, "quantization_config": {"quant_method": "fp8"}},
         {"moe-replay", "quantized-checkpoint"}),
        ({"num_experts": 0, "quantization_config": None}, set()),
        ({"moe_num_experts": [64, 64]}, {"moe-replay"}),
        ({"thinker_config": {"text_config": {"num_experts": 128}}}, {"moe-replay"}),
    ],
)  # fmt: skip
def test_the_config_of_a_checkpoint_says_more_than_its_name(
    config: dict[str, Any], checks: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named_otherwise = "a/B-FP8-A3B" if not checks else "a/B"
    snapshot = tmp_path / f"models--{named_otherwise.replace('/', '--')}/snapshots/1"
    for folder in (tmp_path / "plain", snapshot):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    flag = {VERL: "model_engine=megatron actor_rollout_ref.model.path=", NEMO: f"{MCORE} policy.model_name="}
    for model, host in product((str(tmp_path / "plain"), named_otherwise), flag):
        found = traps(host, flag[host] + model)
        warned = {name for name in ("moe-replay", "quantized-checkpoint") if found[name].status == "warning"}
        assert warned == checks and all("config.json" in found[name].found for name in checks)


def test_what_another_program_fills_in_is_undecided(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("policy: {generation: {temperature: '${mul:2,3}'}}\n")
    assert not traps(NEMO, f"{tmp_path}/a.yaml")["temperature"].decided
    assert not traps(VERL, f"python -m verl.trainer.main_ppo {ROLLOUT}.temperature=$T")["temperature"].decided
    assert not traps(VERL, "python -m verl.trainer.main_ppo ${EXTRA[@]}")["quantized-rollouts"].decided
