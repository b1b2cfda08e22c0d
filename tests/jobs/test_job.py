"""Whole jobs on a checkpoint written by transformers: every knob changes what it says, and nothing else."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import letters_task, run_together, settings_file, tiny_job, train
from safetensors.torch import load_file

from megatron_rc.dump.schema import read_dump
from megatron_rc.report.log import read_metrics

JOB: dict[str, Any] = {
    "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 6},
    "train": {"steps": 2, "lr": 1e-3, "eval_interval": 100, "save_interval": 100},
}
EVALUATED = ["rollout.dtype=fp32", "train.lr=3e-3", "train.eval_interval=2", "train.eval_samples=256"]
GAP = ["rollout.lag=2", "rollout.amplify=2", "rollout.hidden.temperature=2", "train.steps=4"]
CASES: dict[str, list[str]] = {
    "untouched": ["train.steps=0"],
    "fp32": ["rollout.dtype=fp32"],
    "bf16": [],
    "fp16": ["rollout.dtype=fp16"],
    "int8": ["rollout.quantize=int8"],
    "fp8": ["rollout.quantize=fp8"],
    "amplified": ["rollout.amplify=0.3"],
    "new noise": (noise := ["rollout.amplify=3", "train.lr=1e-9", "train.eval_samples=256"]),
    "fixed noise": [*noise, "rollout.amplify_fixed=true"],
    "another draw": [*noise, "rollout.amplify_fixed=true", "rollout.amplify_seed=5"],
    "draw of the job": [*noise, "rollout.amplify_fixed=true", "rollout.amplify_seed=1"],
    "hidden temperature": ["rollout.hidden.temperature=0.5", "rollout.dtype=fp32"],
    "masked": (mask := ["rollout.amplify=0.3", "correction={preset: token-mis, weight: {upper: 1.02}}"]),
    "masked at random": [*mask, "train.control=random-mask"],
    "stale": ["rollout.lag=2", "train.steps=4", "rollout.dtype=fp32", "train.keep_sampling_weights=true"],
    "evaluates what serves": [*GAP, *EVALUATED],
    "evaluates what trains": [*GAP, *EVALUATED, "train.eval_weights=trained"],
    "top-p": ["rollout.top_p=0.7", "rollout.dtype=fp32", "dump={varentropy: true, kept_mass: true}"],
    "top-k": ["rollout.top_k=3", "rollout.dtype=fp32", "rollout.temperature=0.7"],
    "temperature": ["rollout.temperature=0.5", "rollout.dtype=fp32", "dump.varentropy=true"],
    "trainer bf16": ["train.dtype=bf16", "rollout.dtype=fp32"],
    "trainer fp16": ["train.dtype=fp16", "rollout.dtype=fp32"],
    "current": ["correction={preset: token-tis, old: current}"],
    "rollout": ["correction.old=rollout"],
    "rollout reinforce": ["correction={preset: seq-mis, old: rollout}", "loss.surrogate=reinforce"],
    "mini-batches": ["train.mini_batches_per_rollout=2", "train.lr_decay_style=linear"],
    "penalties": ["loss.kl_coef=0.1", "loss.entropy_coef=0.01", "loss.dual_clip=3.0", "loss.advantage=grpo"],
    "sequence sums": ["loss.aggregation=seq-mean-token-sum-norm", "loss.denominator=kept", "correction=seq-mask-tis"],
    "normalised": ["correction={preset: seq-tis, normalize: batch}", "train.micro_batches=2"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jobs")
    config = tiny_job(folder, JOB)
    commands = [[*train(config, folder / name, *chosen), "--dump"] for name, chosen in CASES.items()]
    last = ("train.steps=4", "dump.keep=2", "dump.kept_mass=true", "rollout.top_p=0.7")
    commands += [train(config, folder / "last steps", *last)]
    for name, (status, said) in zip([*CASES, "last steps"], run_together(commands, folder), strict=True):
        assert status == 0, f"{name}: {said}"
    return folder


def metrics(runs: Path, name: str) -> list[dict[str, Any]]:
    return [r for r in read_metrics(runs / name / "metrics.jsonl") if r["step"] > 0]


def mean_k3(runs: Path, name: str, prefix: str = "old/") -> float:
    values = [r[f"{prefix}k3"] for r in metrics(runs, name)]
    return sum(values) / len(values)


@pytest.mark.parametrize("name", [n for n in CASES if n != "untouched"])
def test_every_job_learns_from_what_it_sampled(runs: Path, name: str):
    for record in metrics(runs, name):
        assert record["updates"] >= 1 and record["grad_norm"] > 0
        assert torch.tensor([v for v in record.values() if isinstance(v, int | float)]).isfinite().all(), record


def test_a_schedule_counts_mini_batches(runs: Path):
    # the rate of the second of two updates, in two steps
    assert [r["lr"] for r in metrics(runs, "mini-batches")] == pytest.approx([0.75e-3, 0.25e-3])


def test_a_checkpoint_that_was_not_trained_is_exported_bitwise_unchanged(runs: Path):
    before, after = (load_file(folder / "model.safetensors") for folder in (runs / "hf", runs / "untouched" / "hf"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_trained_checkpoint_is_read_by_transformers_and_has_the_log_probs_of_the_trainer(runs: Path):
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(runs / "fp32" / "hf", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    original = load_file(runs / "hf" / "model.safetensors")
    moved = [float((p - original[name]).abs().max()) for name, p in model.state_dict().items() if name in original]
    assert all(0 < m < 0.01 for m in moved)
    # two steps of Adam at 1e-3 later the log-probs of the recorded tokens have moved, but not far
    record = next(read_dump(runs / "fp32" / "dump"))[0]
    ids = torch.tensor([record["prompt_ids"] + record["output_ids"]])
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    moved_by = logprobs[len(record["prompt_ids"]) - 1 :] - torch.tensor(record["old_logprobs"])
    assert 1e-4 < float(moved_by.abs().max()) < 1.0


def test_equal_precision_leaves_no_gap_and_less_precision_a_larger_one(runs: Path):
    assert mean_k3(runs, "fp32") < 1e-11
    assert mean_k3(runs, "fp32") < mean_k3(runs, "fp16") < mean_k3(runs, "bf16")
    assert mean_k3(runs, "bf16") < mean_k3(runs, "fp8") < mean_k3(runs, "amplified")
    assert mean_k3(runs, "trainer bf16") > 1e-11


def test_fixed_noise_is_the_same_at_every_sync(runs: Path):
    for name in ("fixed noise", "new noise", "another draw"):
        first, last = (r["eval/accuracy"] for r in read_metrics(runs / name / "metrics.jsonl") if "eval/accuracy" in r)
        assert (first == last) == (name != "new noise")
    # train.seed is 1
    assert mean_k3(runs, "draw of the job") == mean_k3(runs, "fixed noise") != mean_k3(runs, "another draw")


def test_hidden_sampling_draws_other_tokens_and_k3_does_not_see_it(runs: Path):
    assert mean_k3(runs, "hidden temperature") < 1e-11
    hidden, honest = (next(read_dump(runs / name / "dump")) for name in ("hidden temperature", "fp32"))
    assert [r["output_ids"] for r in hidden] != [r["output_ids"] for r in honest]
    assert {r["temperature"] for r in hidden} == {1.0}


def test_a_random_mask_drops_other_tokens_of_the_same_batch_at_the_same_rate(runs: Path):
    chosen, random = (next(read_dump(runs / name / "dump")) for name in ("masked", "masked at random"))
    assert [r["output_ids"] for r in chosen] == [r["output_ids"] for r in random]
    dropped = [sum(not kept for r in records if r["advantage"] for kept in r["mask"]) for records in (chosen, random)]
    assert 0 < dropped[0] == dropped[1] and [r["mask"] for r in chosen] != [r["mask"] for r in random]
    assert metrics(runs, "masked")[0]["old/k3"] == metrics(runs, "masked at random")[0]["old/k3"]
    assert metrics(runs, "masked")[0]["grad_norm"] != metrics(runs, "masked at random")[0]["grad_norm"]


def test_stale_weights_are_as_old_as_asked(runs: Path):
    assert [r["lag"] for r in metrics(runs, "stale")] == [0.0, 1.0, 2.0, 2.0]
    by_lag = [{name: r[name] for name in r if name.startswith("old/tokens_lag_")} for r in metrics(runs, "stale")]
    assert by_lag == [{}, {"old/tokens_lag_1": 1.0}, *[{"old/tokens_lag_2_3": 1.0}] * 2]
    assert metrics(runs, "stale")[3]["old/k3"] > 3 * mean_k3(runs, "bf16")
    for record in metrics(runs, "stale")[1:]:
        assert abs(record["old/mismatch_k3"]) < 1e-10
        assert record["old/staleness_k3"] == pytest.approx(record["old/k3"], rel=1e-3)


def test_an_evaluation_of_the_trained_weights_is_exact_and_leaves_the_rollouts_as_they_are(runs: Path):
    served, trained = (metrics(runs, f"evaluates what {which}") for which in ("serves", "trains"))
    assert [r["reward/mean"] for r in served] == [r["reward/mean"] for r in trained]
    assert [r["old/k3"] for r in served] == [r["old/k3"] for r in trained]
    trained_checkpoint = runs / "with tokenizer"
    shutil.copytree(runs / "hf", trained_checkpoint)
    shutil.copy(runs / "evaluates what trains/hf/model.safetensors", trained_checkpoint)
    again_folder = runs / "evaluates again"
    settings = {**JOB, "model": {"hf_path": str(trained_checkpoint)}, "task": letters_task(runs)}
    command = train(settings_file(again_folder, settings), again_folder, *EVALUATED, "train.steps=0")
    [(status, said)] = run_together([command], runs)
    assert status == 0, said
    [again] = read_metrics(again_folder / "metrics.jsonl")
    assert trained[-1]["eval/accuracy"] == again["eval/accuracy"]
    assert [r.get("eval/accuracy") for r in served] != [r.get("eval/accuracy") for r in trained]


def test_two_policy_modes_measure_current_against_mu_without_an_old_pass(runs: Path):
    for name in ("current", "rollout", "rollout reinforce"):
        record = metrics(runs, name)[0]
        assert record["current/k3"] > 0 and "old/k3" not in record


def test_several_optimizer_steps_a_rollout_move_current_away_from_old(runs: Path):
    record = metrics(runs, "mini-batches")[0]
    assert record["updates"] == 2
    assert record["current_old/k3"] > 100 * metrics(runs, "bf16")[0]["current_old/k3"]


def test_the_dump_holds_what_was_trained_on(runs: Path):
    for record in next(read_dump(runs / "normalised" / "dump")):
        length = len(record["output_ids"])
        assert {len(record[k]) for k in ("rollout_logprobs", "old_logprobs", "weights", "mask")} == {length}
        assert all(w > 0 for w in record["weights"]) and all(record["mask"])
        gap = [a - b for a, b in zip(record["old_logprobs"], record["rollout_logprobs"], strict=True)]
        assert all(abs(g) < 0.1 for g in gap)
    kept = [w for step in read_dump(runs / "normalised" / "dump") for r in step for w in r["weights"]]
    assert sum(kept) / len(kept) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("name", ["fp32", "temperature", "top-p", "top-k"])
def test_columns_of_the_policy_are_those_of_the_same_weights_in_transformers(runs: Path, name: str):
    """Every row is compared at its own position, so a column that is shifted by one token differs."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(runs / "hf").double()
    records = next(read_dump(runs / name / "dump"))
    assert max(len(r["output_ids"]) for r in records) > 3 and mean_k3(runs, name) < 1e-11
    for record in records:
        assert (record["support"] is None) == (name in ("fp32", "temperature"))
        ids = torch.tensor([record["prompt_ids"] + record["output_ids"]])
        with torch.no_grad():
            logits = model(ids).logits[0, record["prompt_length"] - 1 : -1] / record["temperature"]
        full = logits.softmax(-1)
        kept = torch.ones_like(full, dtype=torch.bool)
        if record["support"] is not None:
            for row, allowed in zip(kept, record["support"], strict=True):
                row[:] = False
                row[allowed] = True
        logp = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
        p, surprise = logp.exp(), torch.where(kept, -logp, 0)
        entropy = (p * surprise).sum(-1)
        expected = {
            "old_logprobs": logp.gather(-1, ids[0, record["prompt_length"] :, None])[:, 0],
            "entropy": entropy,
            "top1_prob": p.amax(-1),
            "kept_mass": (full * kept).sum(-1) if name == "top-p" else None,
            "varentropy": (p * (surprise - entropy[:, None]) ** 2).sum(-1)
            if name in ("temperature", "top-p")
            else None,
        }
        for column, values in expected.items():
            if values is None:
                assert record[column] is None, column
            else:
                torch.testing.assert_close(torch.tensor(record[column]).double(), values, atol=1e-5, rtol=1e-4)


def test_columns_of_the_engine_and_the_trainer_say_what_happened(runs: Path):
    for step, records in enumerate(read_dump(runs / "fp32" / "dump")):
        assert {(r["server"], r["syncs"], r["trainer_version"]) for r in records} == {("embedded-0", step + 1, step)}
        assert {r["weight_versions"][0]["version"] for r in records} == {step}
        assert {r["train_rank"] for r in records} == {0}
        assert sorted(r["pack_position"] for r in records) == [*range(len(records))]
        assert all(r["prompt_length"] == len(r["prompt_ids"]) and not any(r["turn"]) for r in records)


def test_every_run_keeps_its_last_steps_without_token_ids(runs: Path):
    steps = list(read_dump(runs / "last steps" / "dump"))
    assert [records[0]["step"] for records in steps] == [3, 4]
    for record in (r for records in steps for r in records):
        assert record["prompt_ids"] is record["output_ids"] is record["support"] is None
        assert len(record["old_logprobs"]) == len(record["entropy"]) == len(record["kept_mass"]) > 0
