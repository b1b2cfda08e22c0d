"""The queue of the asynchronous loop: what may be sampled when, what is trained, and what a checkpoint keeps of it."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from process_groups import until
from refusals import refuses
from scripted_engine import ScriptedEngine

from megatron_rc.engine import Sample
from megatron_rc.rollout.worker import WorkerEngine
from megatron_rc.settings import job as job_settings
from megatron_rc.tasks import Prompt
from megatron_rc.training.groups import SharedError
from megatron_rc.training.progress import Progress
from megatron_rc.training.rollout_queue import RolloutQueue
from megatron_rc.training.step.sampling import Sampler
from megatron_rc.training.step.seeds import seed_of

PROMPTS, N, STEPS = 3, 2, 9
ALONE: Any = SimpleNamespace(rank=0, world_size=1, gather=lambda each: [each()], together=lambda each: each())


class Engine:
    """Answers with the seed; holds every rollout back until it may go on, and notes the prompts and versions."""

    def __init__(self) -> None:
        self.version, self.sampled = 0, list[tuple[int, int]]()
        self.may_go_on, self.duration_s = threading.Event(), 0.0
        self.may_go_on.set()
        self.fails: BaseException | None = None
        self.check: Callable[[], None] = lambda: None

    def generate(self, prompts: Sequence[Any], params: Any, *, seeds: Sequence[int], **_: Any) -> list[Sample]:
        version = self.version
        self.sampled.append((prompts[0][0] // PROMPTS, version))
        assert self.may_go_on.wait(600)
        time.sleep(self.duration_s)
        assert self.version == version, "the weights changed within a rollout"
        if self.fails:
            raise self.fails
        routes = torch.full((2, 1, 1), seeds[0] % 7)
        return [Sample([1, 2], [seed], [-0.5], "stop", [(version, 0, 1)], routes=routes) for seed in seeds]


class Task:
    max_turns = 1

    def prompts(self, start: int, count: int) -> list[Prompt]:
        return [Prompt((i,), "", "") for i in range(start, start + count)]

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]]) -> list[float]:
        return [float(ids[0]) for ids in responses]


class Loop:
    """The training loop without a model: the steps that it trained, with the seeds of their samples."""

    def __init__(self, ahead: int, *, progress: Any = None, resume_from: Path | None = None, **rollout: Any) -> None:
        self.engine, self.progress = Engine(), progress or Progress(phase="rl")
        self.engine.version = self.progress.weight_version
        size = {"prompts_per_step": PROMPTS, "samples_per_prompt": N}
        settings = job_settings.load(str({"train": {"asynchronous": ahead, "steps": STEPS}, "rollout": size | rollout}))
        params = settings.rollout.sampling()
        sampler = Sampler(self.engine, Task(), ALONE, params, seed=1, max_discarded_share=0.0)  # type: ignore[arg-type]
        self.queue = RolloutQueue(sampler, settings)
        if resume_from:
            self.queue.load(resume_from, self.progress)
        self.queue.resume(self.progress)
        self.trained: list[list[int]] = []

    def step(self, during: Callable[[], None] = lambda: None) -> dict[str, float]:
        request, sampled = self.queue.take(self.progress.weight_version)
        during()
        self.trained.append(sampled.seeds)
        assert [s.output_ids[0] for s in sampled.samples] == sampled.seeds
        assert sampled.rewards == [float(seed) for seed in sampled.seeds]
        self.progress.step += 1
        self.progress.cursor += request.prompts
        self.progress.weight_version += 1
        metrics = self.queue.pause()
        self.engine.version += 1
        self.queue.resume(self.progress)
        return metrics

    def until_sampled(self, rollouts: int) -> None:
        """Wait until the engine was asked for so many rollouts; it must not be asked for more."""
        until(lambda: len(self.engine.sampled) >= rollouts)
        time.sleep(0.02)
        assert len(self.engine.sampled) == rollouts


@pytest.fixture
def loop() -> Iterator[Callable[..., Loop]]:
    loops: list[Loop] = []

    def start(*arguments: Any, **options: Any) -> Loop:
        loops.append(Loop(*arguments, **options))
        return loops[-1]

    yield start
    for one in loops:
        one.engine.may_go_on.set()
        one.queue.end()


def seeds_of_step(step: int) -> list[int]:
    return [seed_of(1, "rollout", step * PROMPTS * N + i) for i in range(PROMPTS * N)]


@pytest.mark.parametrize("ahead", [1, 3])
def test_an_engine_that_is_fast_fills_the_queue_and_no_token_is_older_than_the_bound(loop: Any, ahead: int) -> None:
    job = loop(ahead)
    job.until_sampled(ahead + 1)
    ages = []
    for step in range(STEPS):
        due = min(step + ahead + 1, STEPS)
        ages.append(job.step(during=lambda due=due: job.until_sampled(due))["asynchronous/max_lag"])
    assert ages == [min(step, ahead) for step in range(STEPS)]
    assert job.engine.sampled == [(step, max(0, step - ahead)) for step in range(STEPS)]
    assert job.trained == [seeds_of_step(step) for step in range(STEPS)]


def test_an_engine_that_is_slow_gets_the_newest_weights_before_every_rollout(loop: Any) -> None:
    job = loop(3)
    job.engine.duration_s = 0.1
    ages = [job.step()["asynchronous/max_lag"] for _ in range(STEPS)]
    assert min(ages[3:]) < 3 and job.trained == [seeds_of_step(step) for step in range(STEPS)]


def test_an_older_token_than_the_bound_stops_the_job(loop: Any) -> None:
    job = loop(1)
    job.step()
    job.progress.weight_version += 2
    bound = "versions before its update, train.asynchronous allows 1"
    with pytest.raises(SharedError, match=f"^a token was sampled by weights 3 {bound}$"):
        job.step()


def test_the_idle_one_of_trainer_and_engine_is_the_faster_one(loop: Any) -> None:
    slow_engine, slow_trainer = loop(1), loop(1)
    slow_engine.engine.duration_s = 0.1
    # the clearest of some steps, because other processes of the machine take time, too
    waits = max((slow_engine.step() for _ in range(5)), key=lambda m: m["asynchronous/trainer_idle"])
    steps = (slow_trainer.step(during=lambda: time.sleep(0.1)) for _ in range(5))
    works = max(steps, key=lambda m: m["asynchronous/engine_idle"])
    assert waits["asynchronous/trainer_idle"] > 0.5 > waits["asynchronous/engine_idle"]
    assert works["asynchronous/engine_idle"] > 0.5 > works["asynchronous/trainer_idle"]


@pytest.mark.parametrize("error", [ValueError("the process of the rollout engine was ended"), KeyError("a defect")])
def test_the_threads_error_is_raised_in_waits_and_between_steps(loop: Any, error: Exception, tmp_path: Path) -> None:
    waiting, training = loop(2), loop(2)
    training.until_sampled(3)
    waiting.engine.fails = error
    with pytest.raises(type(error)) as raised:
        for _ in range(STEPS):
            waiting.step()
    assert raised.value is error
    training.engine.may_go_on.clear()
    training.step()
    training.until_sampled(4)
    training.engine.fails = error
    with pytest.raises(type(error)):
        training.step(during=training.engine.may_go_on.set)
    assert training.progress.step == 2, "the step itself was finished"
    training.queue.save(tmp_path)
    resumed = loop(2, progress=training.progress, resume_from=tmp_path)
    resumed.step()
    assert resumed.trained == [seeds_of_step(2)], "what that step trained is not trained again"


@pytest.mark.parametrize("meanwhile", ["it samples", "it rests"])
def test_an_engine_that_ends_during_a_step_stops_it_before_its_update_and_no_sample_is_lost(
    loop: Any, tmp_path: Path, meanwhile: str
) -> None:
    process = WorkerEngine(ScriptedEngine, agree=lambda error: None)
    job = loop(2)
    job.until_sampled(3)
    job.engine.may_go_on.clear()
    job.step(during=job.queue.check)
    job.until_sampled(4)
    job.queue.take(1)
    job.engine.check = process.check
    job.queue.check()
    os.kill(process.pid, signal.SIGKILL)
    if meanwhile == "it samples":
        job.engine.check, job.engine.fails = lambda: None, ValueError("the process of the rollout engine was ended")
    job.engine.may_go_on.set()
    refuses("^the process of the rollout engine was ended", until, job.queue.check)
    job.queue.save(tmp_path)
    resumed = loop(2, progress=job.progress, resume_from=tmp_path)
    resumed.step()
    assert resumed.trained == [seeds_of_step(1)] and 1 not in {step for step, _ in resumed.engine.sampled}


def test_a_checkpoint_holds_samples_of_finished_rollouts_and_prompts_in_flight(loop: Any, tmp_path: Path) -> None:
    job = loop(3)
    job.until_sampled(4)
    job.engine.may_go_on.clear()
    job.step()
    job.until_sampled(5)
    job.queue.save(tmp_path)
    saved = torch.load(tmp_path / "rollouts-0.pt", weights_only=True)["rollouts"]
    assert [(request, part is None) for request, part in saved] == [
        *(((step * PROMPTS, PROMPTS, N), False) for step in (1, 2, 3)),
        ((4 * PROMPTS, PROMPTS, N), True),
    ]
    _, expected = job.queue.take(1)
    resumed = loop(3, progress=Progress(phase="rl", step=1, cursor=PROMPTS, weight_version=1), resume_from=tmp_path)
    resumed.until_sampled(1)
    assert resumed.engine.sampled == [(4, 1)], "the one in flight, with the weights of the checkpoint"
    _, taken = resumed.queue.take(1)
    for one, other in zip(taken.samples, expected.samples, strict=True):
        assert torch.equal(one.routes, other.routes)
        one.routes = other.routes = None
        assert one == other
    assert taken.rewards == expected.rewards and taken.seeds == seeds_of_step(1)


def test_a_step_that_failed_samples_its_prompts_again_and_keeps_the_later_rollouts(loop: Any, tmp_path: Path) -> None:
    job = loop(2)
    job.until_sampled(3)
    job.engine.may_go_on.clear()
    job.queue.take(0)
    job.queue.save(tmp_path)
    resumed = loop(2, resume_from=tmp_path)
    resumed.until_sampled(1)
    assert resumed.engine.sampled == [(0, 0)]
    assert [resumed.step() and resumed.trained[-1] for _ in range(STEPS)] == [seeds_of_step(s) for s in range(STEPS)]


def test_a_job_killed_after_any_step_and_resumed_trains_every_sample_once(loop: Any, tmp_path: Path) -> None:
    trained: list[list[int]] = []
    progress, folder = Progress(phase="rl"), None
    for number, steps in enumerate((0, 1, 3, 0, 2, 3)):
        job = loop(2, progress=Progress(**vars(progress)), resume_from=folder)
        for _ in range(steps):
            job.step()
        trained += job.trained
        folder, progress = tmp_path / str(number), Progress(**vars(job.progress))
        folder.mkdir()
        job.queue.save(folder)
        if progress.step < STEPS:
            job.step()  # lost: no checkpoint knows it
    assert trained == [seeds_of_step(step) for step in range(STEPS)]


def saved_by_a_full_queue(loop: Any, folder: Path) -> Path:
    job = loop(3)
    job.until_sampled(4)
    job.queue.save(folder)
    return folder


def test_rollouts_too_old_for_a_smaller_bound_are_sampled_anew(loop: Any, tmp_path: Path) -> None:
    resumed = loop(1, resume_from=saved_by_a_full_queue(loop, tmp_path))
    resumed.until_sampled(0)
    for _ in range(4):
        assert resumed.step()["asynchronous/max_lag"] <= 1
    assert resumed.engine.sampled[0][0] == 2, "the first two are young enough"
    assert resumed.trained == [seeds_of_step(step) for step in range(4)]


@pytest.mark.parametrize("changed", [{"temperature": 0.5}, {"samples_per_prompt": N + 1}])
def test_rollouts_of_other_settings_are_sampled_anew(loop: Any, tmp_path: Path, changed: dict[str, Any]) -> None:
    resumed = loop(3, resume_from=saved_by_a_full_queue(loop, tmp_path), **changed)
    resumed.until_sampled(4)
    assert [step for step, _ in resumed.engine.sampled] == [0, 1, 2, 3]
