"""One recorded rollout file trained under every parallel layout gives the numbers of one process."""

from pathlib import Path
from typing import Any

import pytest
from distributed import run_ranks
from jobs import finished_job, settings_file
from warm_models import TASK, warm_model

from megatron_rc.batch import TokenBatch
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.dump.schema import read_dump
from megatron_rc.dump.writer import sample_of
from megatron_rc.engine import SamplingParams
from megatron_rc.settings.loss import LossSettings
from megatron_rc.settings.model import ModelSettings, ParallelSettings
from megatron_rc.settings.train import TrainSettings
from megatron_rc.training import groups
from megatron_rc.training.policy import Policy
from megatron_rc.training.step.reinforce import StepSettings, reinforce_step

STEPS = 10
JOB: dict[str, Any] = {
    "task": TASK,
    "rollout": {"prompts_per_step": 6, "samples_per_prompt": 4, "max_new_tokens": 6},
    "correction": "geo-mask-token-tis",
    "train": {
        "optimizer": "sgd",
        "lr": 0.05,
        "steps": STEPS,
        "micro_batches": 2,
        "eval_interval": 100,
        "grad_cosine": True,
    },
}


class Recording:
    """Ten steps of the rollouts of a policy that answers some problems, trained by one process."""

    def __init__(self, folder: Path, hf: Path) -> None:
        self.config = settings_file(folder, JOB)
        self.hf, self.folder = hf, folder
        self.metrics = self.train("one")
        self.dump = folder / "one" / "dump"

    def train(self, name: str, *assignments: str, processes: int = 1) -> list[dict[str, Any]]:
        chosen = [f"output={self.folder / name}", f"model.hf_path={self.hf}", *assignments]
        # one supervised step first: its cross-entropy is compared too
        chosen += ["warmup.steps=1", "warmup.batch_size=32", "warmup.lr=0.01"]
        return finished_job(self.config, "--dump", *(w for a in chosen for w in ("--set", a)), processes=processes)

    def replay(self, name: str, *assignments: str, processes: int = 1) -> list[dict[str, Any]]:
        return self.train(
            name, "rollout.engine=recorded", f"rollout.recorded_path={self.dump}", *assignments, processes=processes
        )

    def assert_same_as_one_process(self, name: str, metrics: list[dict[str, Any]]) -> None:
        ours = {(r["phase"], r["step"]): r for r in metrics}
        theirs = {(r["phase"], r["step"]): r for r in self.metrics}
        warm, warm_one = ours["warmup", 1], theirs["warmup", 1]
        assert warm["cross_entropy"] == pytest.approx(warm_one["cross_entropy"], rel=1e-5)
        norms = []
        for step in range(1, STEPS + 1):
            a, b = ours["rl", step], theirs["rl", step]
            assert a["reward/mean"] == b["reward/mean"] and a["updates"] == b["updates"]
            if b["updates"] and b["grad_norm"]:  # the gate may drop every sequence of the few groups that are trained
                norms.append(abs(a["grad_norm"] / b["grad_norm"] - 1))
                assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4), step
                cosines = [r.get("grad_cosine") for r in (a, b)]
                assert cosines[0] == pytest.approx(cosines[1], abs=1e-3, nan_ok=True), step
            for metric in ("old/k3", "old/chi2_seq", "old/ess_seq", "old/log_ppl_abs_diff", "entropy"):
                assert a[metric] == pytest.approx(b[metric], rel=1e-3, abs=1e-6), (step, metric)
        assert sum("grad_cosine" in record for record in metrics) >= 4
        assert len(norms) >= 5, "too few steps had a group of unequal rewards for the comparison to mean anything"
        worst = 0.0
        for step, (mine, one) in enumerate(
            zip(read_dump(self.folder / name / "dump"), read_dump(self.dump), strict=True), start=1
        ):
            for a, b in zip(mine, one, strict=True):
                assert a["output_ids"] == b["output_ids"] and a["mask"] == b["mask"], step
                for column in ("old_logprobs", "entropy", "top1_prob"):
                    worst = max(worst, *(abs(x - y) for x, y in zip(a[column], b[column], strict=True)))
        assert worst < 1e-5


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return Recording(tmp_path_factory.mktemp("dense"), warm_model("dense", tmp_path_factory))


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return Recording(tmp_path_factory.mktemp("moe"), warm_model("moe", tmp_path_factory))


DENSE = {
    "tensor=2": ["parallel.tensor=2"],
    # of which one micro-batch may hold no token with a loss
    "pipeline=2, the fused head": ["parallel.pipeline=2", "train.head=linear", "train.micro_batches=7"],
    "data=2": ["train.micro_batches=1"],
}


@pytest.mark.parametrize("layout", DENSE)
def test_a_dense_model_trains_the_same_under_every_layout(dense: Recording, layout: str) -> None:
    dense.assert_same_as_one_process(layout, dense.replay(layout, *DENSE[layout], processes=2))
    if layout == "data=2":
        assert_the_dump_says_which_rank_trained_on_which_response(dense.folder / layout / "dump")


def assert_the_dump_says_which_rank_trained_on_which_response(dump: Path) -> None:
    for records in read_dump(dump):
        for rank in (0, 1):
            positions = sorted(r["pack_position"] for r in records if r["train_rank"] == rank)
            # one micro-batch for the update, and one for the responses whose groups had equal rewards
            assert positions and positions[0] == 0 and max(positions) < len(positions)
        assert {r["train_rank"] for r in records} == {0, 1}


MOE = {
    "expert=2": ["parallel.expert=2"],
    "tensor=2 expert=2, the fused head": ["parallel.tensor=2", "parallel.expert=2", "train.head=linear"],
}


@pytest.mark.parametrize("layout", MOE)
def test_experts_on_two_processes_train_the_same_as_on_one(moe: Recording, layout: str) -> None:
    """With the fused head also where ranks split the rows."""
    moe.assert_same_as_one_process(layout, moe.replay(layout, *MOE[layout], processes=2))


@pytest.mark.full
@pytest.mark.parametrize("layout", [("tensor=2", "pipeline=2"), ("tensor=2",), ("pipeline=2",)], ids="+data=2 ".join)
def test_a_dense_model_trains_the_same_under_combined_layouts(dense: Recording, layout: tuple[str, ...]):
    name = "4-" + "-".join(layout)
    metrics = dense.replay(name, *(f"parallel.{part}" for part in layout), processes=4)
    dense.assert_same_as_one_process(name, metrics)


def gradient_norms(rank: int, hf_path: str, dump: str) -> list[float]:
    found = []
    records = max(read_dump(Path(dump)), key=lambda step: len({(r["group"], r["reward"]) for r in step}))
    samples, rewards = [sample_of(r) for r in records], [r["reward"] for r in records]
    groups_of = [r["group"] for r in records]
    batch = TokenBatch.from_samples(samples, SamplingParams(), rewards=rewards, groups=groups_of)
    place = groups.initialize(ParallelSettings(), 1)
    for micro_batches in (1, 2, 4, 40):  # 40: more than there are sequences, so some hold one that must not count
        train = TrainSettings(optimizer="sgd", micro_batches=micro_batches)
        policy = Policy(ModelSettings(hf_path=hf_path), ParallelSettings(), train, place)
        policy.start_phase(lr=0.1, min_lr=0.0, warmup_steps=0, total_steps=10, decay_style="constant")
        chosen = RolloutCorrection.preset("token-tis")
        settings = StepSettings(correction=chosen, loss=LossSettings(), train=train, max_nonfinite_share=0.0)
        result = reinforce_step(policy, batch, settings)
        found.append(result.metrics["grad_norm"])
    return found


def test_the_gradient_norm_does_not_depend_on_the_number_of_micro_batches(dense: Recording):
    (norms,) = run_ranks(1, gradient_norms, str(dense.hf), str(dense.dump))
    assert norms[0] > 0
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-5)
