"""Every known trap in the flags of a host, with the flags that have it and with those that do not."""

import os
import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flag_traps import traps
from hosts.slime.host import inside

from megatron_rc import RolloutCorrection, schema
from megatron_rc.doctor.host.checks import flag_checks
from megatron_rc.doctor.host.flags import Arguments, Flags
from megatron_rc.integrations import slime
from megatron_rc.integrations.hosts import HOSTS
from megatron_rc.integrations.megatron_lm.flag_rules import check_arguments
from megatron_rc.integrations.slime.flag_rules import DEFAULTS
from megatron_rc.integrations.slime.settings import ENABLE

LM, TRAINING, SWIFT = "megatron-lm", "megatron-training", "ms-swift"
SWIFT_PATCHED = "-m megatron_rc patch --rc-host ms-swift --rc-preset token-tis rlhf.py"
REPLAY = "--moe-enable-routing-replay"
STEP = "--perform-rl-step --rl-inference-logprobs-is-correction"
RL = f"{STEP} --rl-importance-sampling-truncation-coef 2"
PATCHED = f"-m megatron_rc patch --rc-preset token-tis train_rl.py {STEP}"
PROCESSED = "--inference-dynamic-batching-logprobs-mode processed_logprobs"
TIS = "--custom-tis-function-path my.tis"
STAGES = "--num-virtual-stages-per-pipeline-rank 2"
ENTROPY = "--dump-details details --use-rollout-entropy"
CENTERED = "--loss-type score_centering --use-rollout-logprobs --rollout-top-logprobs-num 128"


def arguments(host: str, flags: str) -> Any:
    return Arguments(Flags(flags.split()), HOSTS[host].flag_defaults, HOSTS[host].config_flag)


TRAPPED = [
    (LM, "router-fusion", f"{RL} --moe-router-fusion {REPLAY}", "error", "silently ignored"),
    ("slime", "router-fusion", "--moe-router-fusion --use-rollout-routing-replay", "error", "silently ignored"),
    ("slime", "router-fusion", f"--moe-router-fusion {REPLAY}", "error", "silently ignored"),
    (TRAINING, "replay-and-recompute", f"{REPLAY} --recompute-granularity full", "warning", "routes again"),
    (TRAINING, "replay-and-recompute", f"{REPLAY} --recompute-granularity=full {STAGES}", "error", "first in, first"),
    (TRAINING, "replay-and-mtp", f"{REPLAY} --mtp-num-layers 1", "warning", "--mtp-num-layers"),
    ("miles", "router-dtype", "--num-experts 128", "warning", "ties"),
    ("miles", "shell-variables", "${MODEL_ARGS[@]} --lr 1", "note", "${MODEL_ARGS[@]}"),
    (TRAINING, "full-iteration-graph", "--cuda-graph-impl full_iteration", "error", "without calling it"),
    (TRAINING, "full-iteration-graph", "--cuda-graph-impl local --cuda-graph-scope full_iteration", "error", "without"),
    (LM, "rl-step", "", "error", "no rollout"),
    (LM, "rollout-logprobs", "--perform-rl-step", "note", "neither measured nor corrected"),
    (LM, "rollout-logprobs", f"{PATCHED} --no-rl-inference-logprobs-is-correction", "error", "cannot act"),
    (LM, "temperature", f"{RL} --rl-default-temperature 0.7", "error", "sampled at temperature 0.7, while"),
    (LM, "temperature", f"{RL} --rl-default-temperature 0", "error", "greedy"),
    (LM, "logprobs-mode", f"{PATCHED} --rl-default-temperature 0.7", "error", "=raw_logprobs returns log-probs before"),
    (LM, "top-p-top-k", f"{RL} --rl-default-top-p 0.9", "error", "--rl-default-top-p=0.9 draws from a part"),
    (LM, "top-p-top-k", f"{RL} --rl-default-top-k 20", "error", "different sets"),
    (LM, "ratio-bound", "--rl-inference-logprobs-is-correction", "warning", "no upper bound"),
    (LM, "two-corrections", f"{PATCHED} --rl-importance-sampling-truncation-coef 2", "error", "a second time"),
    (LM, "packed-logprobs", f"{RL} --rl-use-sequence-packing", "warning", "log-prob 0"),
    (LM, "gathered-logits", f"{RL} --tensor-model-parallel-size 4", "warning", "each of the 4 tensor-parallel"),
    (LM, "gathered-logits", f"{PATCHED} --tensor-model-parallel-size 4 --batch-invariant-mode", "note", "bit for bit"),
    (LM, "captured-denominator", f"{PATCHED} --cuda-graph-impl full_iteration", "error", "first batch"),
    (LM, "replayed-routes", f"{RL} {REPLAY}", "warning", "never hands the sampler's routes"),
    (LM, "stale-policies", f"{RL} --rl-partial-rollouts", "note", "several versions"),
    (SWIFT, "two-corrections", f"{SWIFT_PATCHED} --rollout_importance_sampling_mode token_mask", "error", "token_mask"),
    (SWIFT, "two-corrections", "--rollout_importance_sampling_mode sequence_mask", "warning", "without a bound"),
    (SWIFT, "loss-type", f"{SWIFT_PATCHED} --loss_type real", "error", "multiplies no weights"),
    (SWIFT, "temperature", "--temperature 0", "error", "greedy"),
    (SWIFT, "top-p-top-k", "--top_p 0.9", "warning", "different sets"),
    (SWIFT, "top-p-top-k", "--top_k 20", "warning", "different sets"),
    ("slime", "ratio-counted-twice", "--use-tis --use-rollout-logprobs", "error", "already is pi / mu"),
    ("slime", "temperature", "--rollout-temperature 0", "error", "greedy"),
    ("slime", "top-p-top-k", "--rollout-top-k 50", "error", "different sets"),
    ("miles", "top-p-top-k", "--rollout-top-p 0.95", "error", "--rollout-top-p=0.95 draws from a part"),
    ("slime", "tis-function", TIS, "error", "never called"),
    ("slime", "tis-function", f"{TIS} --get-mismatch-metrics", "note", "metrics alone"),
    ("miles", "loss-function", "--custom-loss-function-path my.loss", "error", "--loss-type policy_loss"),
    ("slime", "loss-function", "--custom-loss-function-path my.loss", "error", "--loss-type policy_loss"),
    ("slime", "entropy-of-the-dump", "--save-debug-train-data a_{rank}_{rollout_id}.pt", "note", "no entropy"),
    ("miles", "entropy-of-the-dump", "--dump-details details", "note", "no entropy"),
    ("slime", "entropy-of-the-dump", f"{ENTROPY} --rollout-top-p 0.9", "warning", "the whole vocabulary"),
    ("slime", "quantized-rollouts", "--hf-checkpoint $MODELS/Qwen3-4B-FP8/", "warning", "nothing bounds"),
    ("miles", "quantized-rollouts", "--sglang-kv-cache-dtype fp8_e4m3", "warning", "dtype=fp8_e4m3 quant"),
    ("slime", "quantized-rollouts", "--sglang-quantization fp8", "warning", "nothing bounds"),
    ("slime", "asynchronous-rollouts", "python3 train_async.py --lr 1", "warning", "older weights"),
    ("slime", "moe-replay", "--num-experts 128 --moe-router-dtype fp32", "warning", "choose experts"),
    ("miles", "moe-replay", "--hf-checkpoint a/Qwen3-30B-A3B", "warning", "choose experts"),
    ("slime", "megatron-rc-settings", ENABLE, "error", "megatron_rc must be a mapping"),
    ("miles", "score-centering", "--loss-type score_centering", "error", "-num must be above 0"),
    ("miles", "score-centering", f"{CENTERED} --advantage-estimator ppo", "error", "must be grpo, got ppo"),
    ("miles", "score-centering", f"{CENTERED} --rollout-top-p 0.9", "error", "needs a --rollout-top-k"),
    ("miles", "score-centering", f"{CENTERED} --rollout-top-k 200", "error", "--rollout-top-k, 200, or more"),
    ("miles", "score-centering", f"{CENTERED} --sglang-speculative-algorithm EAGLE", "error", "got EAGLE"),
    ("miles", "score-centering", f"{CENTERED} --use-opsm", "error", "--use-opsm must be unset"),
    ("miles", "score-centering", f"{CENTERED} --custom-tis-function-path a.b", "error", "-path must be unset"),
]


@pytest.mark.host(
    "slime", "miles", "megatron-lm", "megatron-training", proof="stand-in", feature="doctor knows its flags"
)
@pytest.mark.parametrize(("host", "check", "flags", "status", "sentence"), TRAPPED)
def test_a_trap_is_found_and_has_a_fix(host: str, check: str, flags: str, status: str, sentence: str) -> None:
    finding = traps(host, flags)[check]
    assert (finding.status, finding.decided) == (status, True)
    assert sentence in finding.found and finding.fix


def with_key(folder: Path, flags: str, key: dict[str, object]) -> str:
    config = folder / "rc.yaml"
    config.write_text(schema.dump_yaml({"megatron_rc": key}))
    return f"{flags} --custom-config-path {config}"


@pytest.fixture
def enabled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """`enable` with these flags of a host, in its process."""

    def enable(host: str, flags: str) -> None:
        with monkeypatch.context() as patch:
            inside(host, patch)
            given = arguments(host, with_key(tmp_path, f"{ENABLE} {flags}", {}))
            # what the host has parsed; megatron_rc reads nothing else
            slime.enable(Namespace(megatron_rc={}, **{name: getattr(given, name) for name in DEFAULTS}))

    return enable


@pytest.mark.parametrize(
    ("host", "flags"), [(host, flags) for host, check, flags, status, _ in TRAPPED
                        if host in ("slime", "miles") and status == "error" and check != "megatron-rc-settings"],
)  # fmt: skip
def test_enable_refuses_what_doctor_calls_an_error(host: str, flags: str, enabled: Any, tmp_path: Path) -> None:
    found = traps(host, with_key(tmp_path, f"{ENABLE} {flags}", {})).values()
    errors = [finding.found for finding in found if finding.status == "error"]
    with pytest.raises(ValueError) as refusal:
        enabled(host, flags)
    assert any(str(refusal.value).startswith(error) for error in errors) and "\n" not in str(refusal.value)


FREE = [
    (LM, f"{RL} {REPLAY}", {"replayed-routes"}),
    (LM, f"{RL} --moe-router-fusion --recompute-granularity full --mtp-num-layers 1 --num-experts 8", {"router-dtype"}),
    (LM, f"{RL} --num-experts 8 --moe-router-dtype fp32 --rl-default-top-p 1 --rl-default-top-k 0", set()),
    (LM, f"{PATCHED} --rl-use-sequence-packing --tensor-model-parallel-size 8", set()),
    (LM, f"{PATCHED} --rl-default-temperature 0.7 {PROCESSED} --rl-default-top-p 1", set()),
    (LM, f"{RL} --cuda-graph-impl full_iteration --no-rl-partial-rollouts", set()),
    (TRAINING, f"{REPLAY} --recompute-granularity selective", set()),
    ("slime", f"--use-tis {TIS} --rollout-top-p 0.95 --rollout-temperature 0.8", set()),
    ("slime", "--dump-details details --use-rollout-entropy", set()),
    ("miles", "--loss-type custom_loss --custom-loss-function-path my.loss --use-rollout-logprobs", set()),
    ("miles", f"python3 train_async.py {CENTERED} --rollout-top-p 0.9 --rollout-top-k 64", set()),
]


@pytest.mark.parametrize(("host", "flags", "trapped"), FREE)
def test_flags_without_a_trap_are_good(host: str, flags: str, trapped: set[str]) -> None:
    found = traps(host, flags)
    assert {name for name, f in found.items() if f.status != "good"} == trapped


@pytest.mark.parametrize(
    ("host", "flags"),
    [
        ("verl", "python3 -m verl.trainer.main_generation actor_rollout_ref.rollout.top_p=0.9"),
        ("verl", "torchrun -m verl.trainer.fsdp_sft_trainer actor_rollout_ref.rollout.top_p=0.9"),
        ("slime", "train_async.py --loss-type sft_loss --num-experts 128 --rollout-top-p 0.9"),
        ("miles", "train_async.py --loss-type=sft_loss --num-experts 128"),
        ("nemo-rl", "uv run examples/run_dpo.py policy.generation.temperature=0"),
        ("nemo-rl", "uv run examples/run_xtoken_off_policy_distillation.py policy.generation.temperature=0"),
    ],
)
def test_a_program_without_a_policy_gradient_has_no_trap(host: str, flags: str) -> None:
    assert {finding.status for finding in traps(host, flags).values()} == {"good"}
    flags = re.sub("main_generation|fsdp_sft_trainer", "main_ppo", flags)
    flags = re.sub("run_dpo|run_xtoken_off_policy_distillation", "run_grpo", flags.replace("sft_loss", "policy_loss"))
    assert {finding.status for finding in traps(host, flags).values()} > {"good"}


def test_every_trap_is_tried() -> None:
    tried = {check for _, check, *_ in TRAPPED} | {"batch-normalised-weights", "key-without-enable"}
    hosts = [host for host in HOSTS.values() if not host.reads_overrides]
    assert {check.name for host in hosts for check in flag_checks(host)} == tried


@pytest.mark.parametrize(
    "flags", ["", "--perform-rl-step", f"{RL} --moe-router-fusion {REPLAY}", f"{PATCHED} --rl-default-top-p 0.9",
              *(flags for host, _, flags, status, _ in TRAPPED if (host, status) == (LM, "error") and PATCHED in flags)]
)  # fmt: skip
def test_the_patch_refuses_what_doctor_calls_an_error_of_a_patched_run(flags: str) -> None:
    given = f"--rc-preset token-tis {flags}"
    errors = [finding.found for finding in traps(LM, given).values() if finding.status == "error"]
    with pytest.raises(ValueError, match="^megatron-lm: ") as refusal:
        check_arguments(arguments(LM, given), RolloutCorrection())
    assert errors[0] in str(refusal.value)


def test_the_patch_and_enable_take_the_flags_in_which_doctor_finds_no_error(enabled: Any) -> None:
    for host, flags, _ in FREE:
        if PATCHED in flags:
            check_arguments(arguments(host, flags), RolloutCorrection())
    enabled("slime", "--rollout-top-p 0.95 --rollout-temperature 0.8 --dump-details details")


def test_a_length_decay_alone_does_not_ask_for_rollout_logprobs() -> None:
    check_arguments(arguments(LM, "--perform-rl-step --rl-default-top-p 0.9"), None)


def test_keys_of_the_yaml_file_of_slime_are_read(tmp_path: Path) -> None:
    (config := tmp_path / "rc.yaml").write_text("tis_batch_normalize: true\nmegatron_rc: {correction: token-tis}\n")
    assert traps("slime", f"--use-tis --custom-config-path {config}")["batch-normalised-weights"].status == "warning"
    given = f"{ENABLE} --custom-config-path {config}"
    # our hook does not read it
    assert not {name for name, found in traps("slime", given).items() if found.status in ("error", "warning")}
    config.write_text("megatron_rc: {correction: {preset: token-tis, normalize: batch}}\n")
    found = traps("miles", given)
    assert found["batch-normalised-weights"].status == "good"
    assert found["megatron-rc-settings"].status == "error" and "normalize" in found["megatron-rc-settings"].found
    config.unlink()
    assert not traps("slime", given)["megatron-rc-settings"].decided


@pytest.mark.parametrize("host", ["slime", "miles"])
def test_settings_that_enable_does_not_read_are_an_error(host: str, tmp_path: Path) -> None:
    given = with_key(tmp_path, "--dump-details details", {"correction": "token-tis"})
    found = traps(host, given)["key-without-enable"]
    assert found.status == "error" and "nothing is corrected" in found.found
    all_found = traps(host, f"{given} {ENABLE}")
    assert all_found["key-without-enable"].status == "good"
    assert all_found["entropy-of-the-dump"].status == "good", "enable asks for the entropy"


def test_rollouts_that_a_correction_acts_on_may_be_quantised_and_stale(tmp_path: Path) -> None:
    run = "python train_async.py --sglang-quantization fp8"
    for flags, key, status in (
        ("--use-tis", {}, "good"),
        (ENABLE, {"correction": "token-tis"}, "good"),
        (ENABLE, {"correction": "none"}, "warning"),
        (ENABLE, {"correction": "no-such-preset"}, "warning"),
    ):
        found = traps("slime", with_key(tmp_path, f"{run} {flags}", key))
        assert found["quantized-rollouts"].status == found["asynchronous-rollouts"].status == status, flags


def test_a_value_that_the_shell_would_fill_in_is_undecided() -> None:
    finding = traps(LM, f"{RL} --rl-default-temperature $TEMPERATURE")["temperature"]
    assert not finding.decided and "$TEMPERATURE" in finding.found


@pytest.mark.parametrize(("host", "flag"), [(SWIFT, "--config"), ("miles", "--custom-config-path")])
def test_a_setting_that_a_missing_yaml_file_may_hold_is_undecided(host: str, flag: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    assert not traps(host, f"{flag} {file}")["temperature"].decided
    file.write_text("{temperature: 0, rollout_temperature: 0}")
    assert traps(host, f"{flag} {file}")["temperature"].status == "error"


SOURCES = {"MEGATRON_LM_DIR": (LM, TRAINING), "SLIME_DIR": ("slime",), "MILES_DIR": ("miles",)}


@pytest.mark.parametrize("variable", SOURCES)
def test_the_flags_of_the_traps_exist_in_the_host(variable: str) -> None:
    if variable not in os.environ:
        pytest.skip(f"needs {variable}, the folder of a checkout")
    folder = Path(os.environ[variable])
    files = [path for part in ("argument", "config") for path in folder.rglob(f"*{part}*.py")]
    text = "".join(path.read_text() for path in files)
    # slime and miles take Megatron's own flags, too; those of patch are ours
    elsewhere = ("--rc-", "--sglang-", *(("--moe-", "--num-experts") if LM not in SOURCES[variable] else ()))
    # the tree that was read for miles' score centering is newer than the one of the hooks
    known = (row for row in TRAPPED if row[0] in SOURCES[variable] and row[1] != "score-centering")
    flags = " ".join(flags for _, _, flags, *_ in known).split()
    for name in {word.partition("=")[0] for word in flags if word.startswith("--") and not word.startswith(elsewhere)}:
        plain = name.removeprefix("--").removeprefix("no-")
        assert f"--{plain}" in text or plain.replace("-", "_") in text, name
