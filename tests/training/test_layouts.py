"""One recorded rollout file trained under every parallel layout gives the numbers of one process."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jobs import TASK, finished_job, settings_file, warm_model

from megatron_rc.dump.schema import read_dump

STEPS = 10
JOB: dict[str, Any] = {
    "task": TASK,
    "rollout": {"prompts_per_step": 6, "samples_per_prompt": 4, "max_new_tokens": 6},
    "correction": "geo-mask-token-tis",
    "train": {"optimizer": "sgd", "lr": 0.05, "steps": STEPS, "micro_batches": 2, "eval_interval": 100,
              "grad_cosine": True},
}  # fmt: skip


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
        dumps = zip(read_dump(self.folder / name / "dump"), read_dump(self.dump), strict=True)
        for step, (mine, one) in enumerate(dumps, start=1):
            for a, b in zip(mine, one, strict=True):
                assert a["output_ids"] == b["output_ids"] and a["mask"] == b["mask"], step
                for column in ("old_logprobs", "entropy", "top1_prob"):
                    worst = max(worst, *(abs(x - y) for x, y in zip(a[column], b[column], strict=True)))
        assert worst < 1e-5


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Recording]:
    return cache(lambda kind: Recording(tmp_path_factory.mktemp(kind), warm_model(kind, tmp_path_factory)))


LAYOUTS: dict[str, tuple[str, int, list[str]]] = {
    # more micro-batches than there are sequences, so some hold one that must not count
    "tensor=2": ("dense", 2, ["parallel.tensor=2", "train.micro_batches=25"]),
    # of which one micro-batch may hold no token with a loss
    "pipeline=2, the fused head": ("dense", 2, ["parallel.pipeline=2", "train.head=linear", "train.micro_batches=7"]),
    "data=2": ("dense", 2, ["train.micro_batches=1"]),
    "expert=2": ("moe", 2, ["parallel.expert=2"]),
    # whose ranks split the rows
    "tensor=2 expert=2, the fused head": ("moe", 2, ["parallel.tensor=2", "parallel.expert=2", "train.head=linear"]),
    "tensor=2 pipeline=2": ("dense", 4, ["parallel.tensor=2", "parallel.pipeline=2"]),
    "tensor=2 data=2": ("dense", 4, ["parallel.tensor=2"]),
    "pipeline=2 data=2": ("dense", 4, ["parallel.pipeline=2"]),
}


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=[pytest.mark.full] * (ranks == 4)) for n, (_, ranks, _) in LAYOUTS.items()]
)
def test_a_model_trains_the_same_under_every_layout(recording: Callable[[str], Recording], layout: str) -> None:
    kind, processes, assignments = LAYOUTS[layout]
    one = recording(kind)
    replayed = ["rollout.engine=recorded", f"rollout.recorded_path={one.dump}", *assignments]
    one.assert_same_as_one_process(layout, one.train(layout, *replayed, processes=processes))
    # the dump says which rank trained on which response
    for records in read_dump(one.folder / layout / "dump") if layout == "data=2" else ():
        for rank in (0, 1):
            positions = sorted(r["pack_position"] for r in records if r["train_rank"] == rank)
            # one micro-batch for the update, and one for the responses whose groups had equal rewards
            assert positions and positions[0] == 0 and max(positions) < len(positions)
        assert {r["train_rank"] for r in records} == {0, 1}
