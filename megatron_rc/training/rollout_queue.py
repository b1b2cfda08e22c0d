"""The queue of the asynchronous loop: rollouts of later steps, which a thread samples while the loop trains."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_rc.engine import Sample
from megatron_rc.settings.job import JobSettings
from megatron_rc.training.groups import SharedError
from megatron_rc.training.progress import Progress
from megatron_rc.training.step.sampling import Part, Request, SampledBatch, Sampler


@dataclass
class Rollout:
    """One entry of the queue."""

    request: Request
    part: Part | None = None
    """What this process sampled of it; None until it has."""


@dataclass
class _Window:
    """The time in which the engine may sample, between two changes of its weights."""

    opened: float
    waited_s: float = 0.0
    """Time in which the trainer waited for a rollout."""
    sampled_s: float = 0.0

    def metrics(self) -> dict[str, float]:
        length = time.perf_counter() - self.opened
        return {
            "asynchronous/trainer_idle": self.waited_s / length,
            "asynchronous/engine_idle": max(0.0, 1 - self.sampled_s / length),
        }


class RolloutQueue:
    """Rollouts of the next steps in their order; a thread samples one at a time while the loop does other work.

    While the engine has the weights of step t, the thread starts the rollouts of the steps up to t + ahead. Weights
    change between two rollouts only: `pause`, update the engine, `resume`.
    """

    def __init__(self, sampler: Sampler, settings: JobSettings) -> None:
        self._sampler, self._groups = sampler, sampler.groups
        self._ahead, self._steps = settings.train.asynchronous, settings.train.steps
        self._size = settings.rollout.prompts_per_step, settings.rollout.samples_per_prompt
        self._rollouts: deque[Rollout] = deque()
        self._taken: list[Rollout] = []
        """What the step in progress trains."""
        self._interrupted = False
        """That step was given up because the engine has ended, not for what it trains."""
        self._cursor, self._limit = 0, 0
        """First prompt of an empty queue; most rollouts that the queue may hold."""
        self._changed = threading.Condition()
        self._paused, self._sampling, self._ended = True, False, False
        self._error: BaseException | None = None
        self._window = _Window(time.perf_counter())
        self._oldest = 0
        self._thread = threading.Thread(target=self._sample, name="rollouts", daemon=True)

    def resume(self, progress: Progress) -> None:
        """Sample on: the engine has the weights of ``progress``, and the next rollout taken is that of its step."""
        with self._changed:
            self._taken, self._cursor = [], progress.cursor
            self._limit = min(self._ahead + 1, self._steps - progress.step)
            self._window, self._paused = _Window(time.perf_counter()), False
            self._changed.notify_all()
        if not self._thread.is_alive():
            self._thread.start()

    def take(self, version: int) -> tuple[Request, SampledBatch]:
        """The rollout of the next step, once every process has its part of it.

        Args:
            version: of the weights that are about to be trained.

        Raises:
            SharedError: an engine or a reward failed on some process, too many responses are damaged, or a token is
                older than the bound.
        """
        rollouts = self._groups.gather(self._take)
        request = rollouts[0].request
        sampled = self._sampler.joined(request, [r.part for r in rollouts if r.part is not None])
        self._oldest = age(sampled.samples, version)
        if self._oldest > self._ahead:
            bound = f"train.asynchronous allows {self._ahead}"
            raise SharedError(f"a token was sampled by weights {self._oldest} versions before its update, {bound}")
        return request, sampled

    def check(self) -> None:
        """Give the step in progress up if the engine of any process has ended; a collective, for between two passes.

        Raises:
            SharedError: it has; the rollout that the step trains is saved with its samples.
        """

        def check_engine() -> None:
            with self._changed:
                if self._error is not None:
                    raise self._error
            self._sampler.engine.check()

        try:
            self._groups.together(check_engine)
        except ValueError:
            self._interrupted = True
            raise

    def pause(self) -> dict[str, float]:
        """Wait for the rollout that is being sampled and start no other; metrics since `resume`, the mean of all ranks.

        Raises:
            SharedError: an engine or a reward failed on some process.
        """

        def at_rest() -> dict[str, float]:
            self._paused = True
            self._wait(lambda: not self._sampling)
            return self._window.metrics()

        shares = self._groups.gather(at_rest)
        metrics = {name: sum(share[name] for share in shares) / len(shares) for name in shares[0]}
        return metrics | {"asynchronous/max_lag": float(self._oldest)}

    def end(self) -> None:
        """Start no other rollout; closing the engine ends the one that is being sampled."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def save(self, folder: Path) -> None:
        """Write this rank's rollouts to ``folder``, those without samples by their prompts.

        That of a step that failed goes without its samples, too, unless `check` gave it up: they may be what was wrong.
        """
        with self._changed:
            taken = self._taken if self._interrupted else [Rollout(taken.request) for taken in self._taken]
            held = [*taken, *self._rollouts]
            plain = [None if r.part is None else ([*map(vars, r.part.samples)], r.part.rewards) for r in held]
            rollouts = [(tuple(r.request), part) for r, part in zip(held, plain, strict=True)]
        torch.save({"drawn": self._drawn(), "rollouts": rollouts}, folder / self._file)

    def load(self, folder: Path, progress: Progress) -> None:
        """Read what `save` wrote, if the job was asynchronous then, before the first `resume`.

        Rollouts that ``progress`` has trained are left out. Those that were drawn in another way, or would be older
        than the bound at their update, are sampled again.
        """
        if not (folder / self._file).exists():
            return
        saved: dict[str, Any] = torch.load(folder / self._file, weights_only=True)
        if saved["drawn"] != self._drawn():
            return
        for request, part in saved["rollouts"]:
            sampled = part and Part([Sample(**fields) for fields in part[0]], part[1])
            rollout = Rollout(Request(*request), sampled)
            if rollout.request.first < progress.cursor:
                continue
            version = progress.weight_version + len(self._rollouts)
            if rollout.part and age(rollout.part.samples, version) > self._ahead:
                return
            self._rollouts.append(rollout)

    def _drawn(self) -> dict[str, Any]:
        """What samples depend on besides their weights and prompts."""
        return {"size": self._size, **asdict(self._sampler.params)}

    @property
    def _file(self) -> str:
        return f"rollouts-{self._groups.rank}.pt"

    def _take(self) -> Rollout:
        self._wait(lambda: bool(self._rollouts) and self._rollouts[0].part is not None)
        with self._changed:
            rollout = self._rollouts.popleft()
            self._taken = [rollout]
            self._cursor += rollout.request.prompts
            self._limit -= 1
        return rollout

    def _wait(self, ready: Callable[[], bool]) -> None:
        started = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or ready())
            self._window.waited_s += time.perf_counter() - started
            if self._error is not None:
                raise self._error

    def _sample(self) -> None:
        """Sample one rollout after the other; the thread's work."""
        while (rollout := self._next()) is not None:
            started = time.perf_counter()
            part, error = None, None
            try:
                part = self._sampler.part(rollout.request)
            except BaseException as raised:  # the loop raises it
                error = raised
            with self._changed:
                rollout.part, self._error, self._sampling = part, error, False
                self._window.sampled_s += time.perf_counter() - started
                self._changed.notify_all()
            if error is not None:
                return

    def _next(self) -> Rollout | None:
        """Wait for a rollout that may be sampled; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or (not self._paused and self._startable() > 0))
            if self._ended:
                return None
            self._sampling = True
            for rollout in self._rollouts:
                if rollout.part is None:
                    return rollout
            last = self._rollouts[-1].request if self._rollouts else None
            first = last.first + last.prompts if last else self._cursor
            self._rollouts.append(Rollout(Request(first, *self._size)))
            return self._rollouts[-1]

    def _startable(self) -> int:
        return self._limit - sum(rollout.part is not None for rollout in self._rollouts)


def age(samples: Sequence[Sample], version: int) -> int:
    """Versions from the oldest weights that sampled a token to ``version``; 0 without samples."""
    return max((version - v for sample in samples for v, _, _ in sample.weight_versions), default=0)
