"""An engine in a process of its own, which samples while the trainer trains."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_rc.engine import OnFinished, Prompts, RolloutEngine, Sample, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

START_METHOD = "spawn"
"""A fork would inherit threads and devices of the trainer."""
_END_S = 5.0  # from a closed pipe to the exit status, which an error names


class _Generate(NamedTuple):
    prompts: list[list[int]]
    params: SamplingParams
    n: int
    seeds: list[int]


class _Update(NamedTuple):
    """Weights follow, one message (name, tensor) each, then None."""

    version: int


class _Finished(NamedTuple):
    """Responses finished since the last message; the request is not done yet."""

    responses: int


class _Done(NamedTuple):
    value: Any


class _Failed(NamedTuple):
    sentence: str


class WorkerEngine(RolloutEngine):
    """RolloutEngine that runs another engine in a child process, which ends with it.

    There is one request at a time: ``generate`` and ``update_weights`` wait for its end, in whatever thread they are
    called. Only one thread may call at a time.
    """

    def __init__(self, build: Callable[[], RolloutEngine], *, agree: Callable[[str | None], None]) -> None:
        """Start the process and build its engine.

        Args:
            build: makes the engine in the new process; a function or partial that can be pickled.
            agree: every trainer process calls it at the end of an update; it raises on all when one passes a sentence.

        Raises:
            ValueError: the engine refuses its arguments, or the process ended.
        """
        self.weight_version = -1
        self._agree = agree
        self._waiting = threading.Lock()
        context = multiprocessing.get_context(START_METHOD)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(  # type: ignore[attr-defined]
            target=_serve, args=(theirs, build), name="rollout-engine", daemon=True
        )
        # it inherits that it ignores Ctrl-C, which reaches all processes of a terminal: it ends with its parent
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._process.start()
        finally:
            signal.signal(signal.SIGINT, before)
        theirs.close()
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        assert self._process.pid is not None
        return int(self._process.pid)

    def generate(
        self, prompts: Prompts, params: SamplingParams, *, n: int, seeds: Sequence[int], on_finished: OnFinished = None
    ) -> list[Sample]:
        """Sample ``n`` responses per prompt; the contract is RolloutEngine.generate.

        Raises:
            ValueError: the engine refused or failed, or its process ended.
        """
        self._send(_Generate([list(map(int, prompt)) for prompt in prompts], params, n, list(seeds)))
        samples: list[Sample] = self._answer(on_finished)
        return samples

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy ``weights`` to the process, one at a time, and serve them as ``version``.

        Raises:
            ValueError: the engine refused or failed, or its process ended; on every trainer process.
        """
        error, remaining = None, iter(weights)
        try:
            self._send(_Update(version))
            for name, tensor in remaining:
                # a view would be sent with all of its storage
                self._send((name, tensor.detach().to("cpu", copy=True)))
            self._send(None)
            self._answer()
        except ValueError as failure:
            error = str(failure)
        # the export gathers across processes: leaving it unread would leave the other ranks waiting
        for _ in remaining:
            pass
        self._agree(error)
        self.weight_version = version

    def check(self) -> None:
        """Raises ValueError once the process has ended, whether or not a request is waiting for it."""
        with self._waiting:
            alive = self._process.is_alive()
        if not alive:
            raise ValueError(self._end())

    def close(self) -> None:
        """End the process; a ``generate`` in another thread raises ValueError."""
        self._process.terminate()
        if self._exit_code() is None:
            self._process.kill()
            self._exit_code()
        self._pipe.close()

    def _send(self, message: Any) -> None:
        try:
            _send(self._pipe, message)
        except OSError:
            raise ValueError(self._end()) from None

    def _answer(self, on_finished: OnFinished = None) -> Any:
        while True:
            try:
                message = _receive(self._pipe)
            except (EOFError, OSError):
                raise ValueError(self._end()) from None
            match message:
                case _Done(value):
                    return value
                case _Failed(sentence):
                    raise ValueError(sentence)
                case _Finished(responses) if on_finished is not None:
                    on_finished(responses)

    def _exit_code(self) -> int | None:
        """Exit status of the process, after a wait of a few seconds; None if it still runs."""
        with self._waiting:  # when two threads wait for a process, only one learns its exit status
            self._process.join(_END_S)
            return self._process.exitcode

    def _end(self) -> str:
        code = self._exit_code()
        if code is None or code >= 0:
            return f"the process of the rollout engine ended with exit status {code}; its last words are on stderr"
        by = signal.Signals(-code).name
        hint = ", as the system does when memory runs out" if by == "SIGKILL" else ""
        return f"the process of the rollout engine was ended by {by}{hint}"


def _serve(pipe: Connection, build: Callable[[], RolloutEngine]) -> None:
    """The process of the engine: it answers one request after the other until its parent ends it, or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    engine: RolloutEngine | None = None
    with suppress(EOFError, ConnectionError):
        with _failures_sent(pipe):
            engine = build()
            _send(pipe, _Done(None))
        while engine is not None:
            request = _receive(pipe)
            with _failures_sent(pipe):
                _send(pipe, _Done(_result(engine, request, pipe)))


def _result(engine: RolloutEngine, request: _Generate | _Update, pipe: Connection) -> list[Sample] | None:
    if isinstance(request, _Generate):
        prompts, params, n, seeds = request
        return engine.generate(
            prompts, params, n=n, seeds=seeds, on_finished=lambda count: _send(pipe, _Finished(count))
        )
    weights = iter(partial(_receive, pipe), None)
    try:
        engine.update_weights(weights, request.version)
    finally:
        for _ in weights:  # the rest of a refused update
            pass
    return None


@contextmanager
def _failures_sent(pipe: Connection) -> Iterator[None]:
    """Send an error's message to the parent; print its traceback too if no setting can fix it."""
    try:
        yield
    except Exception as error:
        sentence = str(error)
        if not isinstance(error, ValueError):
            traceback.print_exc()
            sentence = f"the rollout engine failed with {type(error).__name__}: {sentence.partition(chr(10))[0]}"
        _send(pipe, _Failed(sentence))


def end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _send(pipe: Connection, message: Any) -> None:
    # Connection.send would move tensors into shared memory, even the trainer's own weights
    pipe.send_bytes(pickle.dumps(message))


def _receive(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())
