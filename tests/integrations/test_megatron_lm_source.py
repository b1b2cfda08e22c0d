"""Training steps of a real Megatron-LM tree on CPU, its own and patched; MEGATRON_LM_DIR names the tree."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hosts.megatron_lm import sources
from hosts.megatron_lm.own_program import FLAGS, environment_of

pytestmark = pytest.mark.timeout(900)
JOB = Path(sources.__file__).parent / "rl_job.py"
GATHERED_VOCABULARY = 32

TIS = {"correction": {"weight": {"upper": 1.2}}}
LAGS = {"correction": {"reject": [{"statistic": "lag", "level": "token", "upper": 1}]}}
PACKED = {"rl_use_sequence_packing": True}
PER_TOKEN = {"calculate_per_token_loss": True}
TWO_POLICIES = {"correction": {"old": "rollout"}, "lr_rule": {"rule": "length_decay", "decay_period": 1}}
NO_WEIGHT, ITS_TIS = {"rl_inference_logprobs_is_correction": False}, {"rl_importance_sampling_truncation_coef": 1.2}
ROWS: dict[str, dict[str, Any]] = {
    # answers of one length: to the host, too, all tokens weigh the same
    "host": {"args": NO_WEIGHT, "length": 6},
    "none": {"patch": {"correction": {}}, "length": 6},
    "head": {"patch": {**TIS, "head": "linear"}, "length": 6},
    "host, truncation": {"args": ITS_TIS, "length": 6},
    "truncation": {"patch": TIS, "length": 6},
    # answers of several lengths, whose last log-prob the sampler leaves out
    "any length": {"patch": TIS, "missing": 1},
    "host, per token": {"args": {**NO_WEIGHT, **PER_TOKEN}},
    "none, per token": {"patch": {"correction": {}}, "args": PER_TOKEN},
    "stale": {"patch": LAGS, "stale": True},
    "two policies": {"patch": TWO_POLICIES},
}
BINS = {f"{name}, packed": {**case, "args": {**case.get("args", {}), **PACKED}} for name, case in ROWS.items()}
CASES = {**ROWS, **BINS, "host again": ROWS["host"]}
SPLITS = {"TP1": (1, []), "TP2": (2, ["--tensor-model-parallel-size", "2"]), "DP2": (2, [])}
SPLITS["PP2"] = (2, ["--pipeline-model-parallel-size", "2"])


def launch(ranks: int, before: list[str], flags: list[str], cases: dict[str, Any] | None = None) -> dict[str, Any]:
    """What the job wrote; `before` goes between torchrun's own arguments and the job's flags."""
    with TemporaryDirectory() as folder:
        environment = environment_of(sources.tree().resolve()) | {"RL_JOB_OUT": f"{folder}/out"}
        environment |= {"RL_JOB_CASES": json.dumps(cases)} if cases else {}
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        command = [sys.executable, "-W", "ignore", *torchrun, *before, *FLAGS, "--train-iters", "2", *flags]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-4000:]
        return {**json.loads(Path(folder, "out").read_text()), "output": done.stdout}


@cache
def results(split: str) -> dict[str, Any]:
    ranks, flags = SPLITS[split]
    return launch(ranks, [str(JOB)], flags, CASES)


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for left, right in zip(one["steps"], other["steps"], strict=True):
        assert left["log"]["lm loss"] == pytest.approx(right["log"]["lm loss"], rel=1e-5, abs=1e-6)
        assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-5)
    assert one["weights"] == pytest.approx(other["weights"], rel=1e-6)


@pytest.mark.parametrize("split", SPLITS)
def test_patched_training_is_the_hosts_own_where_it_should_be(split: str) -> None:
    found = results(split)
    for name in ("host", "host, packed", "host, truncation", "host, truncation, packed"):
        same(found[name.replace("host, truncation", "truncation").replace("host", "none")], found[name])
    same(found["host again"], found["host"])
    assert found["truncation"]["weights"] != pytest.approx(found["none"]["weights"], rel=1e-6)


@pytest.mark.host("megatron-lm", proof="own code", feature="correction none leaves the loss bit-identical")
@pytest.mark.parametrize("packed", ["", ", packed"], ids=["rows", "packed"])
def test_with_correction_none_the_loss_per_token_is_the_hosts_own_bit_for_bit(packed: str) -> None:
    own, none = (results("TP1")[f"{name}, per token{packed}"] for name in ("host", "none"))
    losses = [[step["log"]["lm loss"] for step in each["steps"]] for each in (own, none)]
    assert losses[0] == losses[1] and len(set(losses[0])) == 2
    same(none, own)


@pytest.mark.parametrize("split", SPLITS)
def test_a_step_without_logits_is_that_with_logits(split: str) -> None:
    found = results(split)
    for packed in ("", ", packed"):
        same(found[f"head{packed}"], found[f"truncation{packed}"])


@pytest.mark.host("megatron-lm", proof="own code", feature="data-parallel ranks")
@pytest.mark.parametrize("split", SPLITS)
def test_packing_and_data_parallelism_do_not_change_the_step(split: str) -> None:
    found = results(split)
    for name in ("any length", "stale", "two policies"):
        same(found[name], found[f"{name}, packed"])
        if split == "DP2":
            same(found[name], results("TP1")[name])
    assert found["any length"]["steps"][0]["log"]["rc/old/missing"] > 0
    for step in found["stale"]["steps"]:
        log = step["log"]
        # eight answers, of which every second begins with one token of the policy two iterations ago
        assert log["rc/old/masked_token"] == pytest.approx(log["rc/old/tokens_lag_2_3"])
        assert 0 < log["rc/old/masked_token"] < 0.15
        assert log["rc/old/tokens_lag_1"] > 0.2 and log["rc/old/k3_lag_1"] > 0
    assert [step["lr"] for step in found["two policies"]["steps"]] == [5e-4, 2.5e-4]


def test_two_rows_per_micro_batch_are_the_step_of_one() -> None:
    cases = {name: CASES[name] for name in ("truncation", "any length")}
    found = launch(1, [str(JOB)], ["--micro-batch-size", "2"], cases)
    for name in cases:
        same(found[name], results("TP1")[name])


@pytest.mark.host("megatron-lm", proof="own code", feature="tensor-parallel ranks")
def test_no_patched_case_gathers_the_vocabulary() -> None:
    for name, found in results("TP2").items():
        if name != "output":
            assert (GATHERED_VOCABULARY in found["gathered"]) == name.startswith("host"), name


def test_a_bf16_model_has_fp32_logprobs_and_trains() -> None:
    found = launch(1, [str(JOB)], ["--bf16"], {"any": {"patch": TIS}, "any, packed": {"patch": TIS, "args": PACKED}})
    for step in (found["any"]["steps"][0], found["any, packed"]["steps"][0]):
        # the policy before the update against itself, in the same precision
        assert step["log"]["rl/pi_over_pi_old"] == pytest.approx(1.0, abs=1e-6)
        assert 0 < step["grad_norm"] < 10


def test_the_command_patches_a_script_that_runs_as_main() -> None:
    options = ["--rc-preset", "token-tis", "--rc-set", "correction.weight.upper=1.2", "--rc-host", "megatron-lm"]
    found = launch(2, ["-m", "megatron_rc", "patch", *options, str(JOB)], SPLITS["TP2"][1])
    assert "megatron-lm 0.20.0, patched" in found["output"].splitlines()
    assert found["alone"]["gathered"] == []
    assert 0 < found["alone"]["steps"][0]["log"]["rc/old/weight_mean"] < 1.2
