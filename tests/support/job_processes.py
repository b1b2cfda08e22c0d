"""Command lines of megatron-rc in processes forked from one that has imported everything, which start at once.

Each has the environment, arguments and exit status of ``python -m megatron_rc``, and the ranks of a job have the
environment that torchrun gives them. The process of a worker engine is forked, too. `jobs.typed_job` runs what a user
types instead.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import forked
import psutil
from cluster_nodes import free_port
from refusals import outcome

ROOT = Path(__file__).parents[2]
LIMIT = 800.0
"""Seconds after which command lines are killed."""
GRACE = 60.0
"""Seconds that the other ranks of a job have to end once one has failed."""


def environment() -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}


class Job:
    """A running command line of megatron-rc."""

    def __init__(
        self, arguments: Sequence[str], folder: Path, processes: int = 1, freeze_before: tuple[str, int] | None = None
    ) -> None:
        """Start the command line on ``processes`` ranks, in ``folder``, whose modules can be imported.

        With ``freeze_before`` = (phase, step), the first rank freezes when it has computed that step, and before it
        records it, until it is killed.
        """
        forked.start_server()
        self._written = tempfile.TemporaryDirectory()
        shared = environment()
        if processes > 1:
            shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(processes)}
        self._processes = []
        for rank in range(processes):
            ranked = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else shared
            process = multiprocessing.get_context(forked.METHOD).Process(
                target=_run, args=(list(arguments), ranked, folder, f"{self._written.name}/{rank}", freeze_before)
            )
            process.start()
            self._processes.append(process)

    def running(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def wait_until_frozen(self) -> None:
        """Wait for the step of ``freeze_before``, which the job must reach."""
        first = psutil.Process(self._processes[0].pid)
        deadline = time.monotonic() + LIMIT
        while first.status() != psutil.STATUS_STOPPED:
            assert self.running() and time.monotonic() < deadline, "the job ended before the step that it freezes at"
            time.sleep(0.01)

    def kill(self) -> None:
        """Kill every rank with signal 9, children included."""
        for process in self._processes:
            if process.is_alive():
                assert process.pid
                with suppress(ProcessLookupError):  # it has not made itself the leader of a group yet
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()

    def wait(self) -> tuple[int, str]:
        """The worst exit status, and what all ranks wrote; ranks that run too long are killed."""
        deadline = time.monotonic() + LIMIT
        try:
            for process in self._processes:
                process.join(max(0.0, deadline - time.monotonic()))
                if process.exitcode != 0:
                    deadline = min(deadline, time.monotonic() + GRACE)
        finally:
            self.kill()
        statuses = [process.exitcode or 0 for process in self._processes]
        said = "".join(Path(f"{self._written.name}/{rank}").read_text() for rank in range(len(statuses)))
        self._written.cleanup()
        return max(statuses, key=abs), said


def run_together(commands: list[list[str]], folder: Path, missing: Sequence[str] = ()) -> list[tuple[int, str]]:
    """(exit status, stderr) of command lines that run one after the other in one process.

    Args:
        folder: modules in it can be imported.
        missing: packages that are not installed, as that process sees it.
    """
    forked.start_server()
    context = multiprocessing.get_context(forked.METHOD)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_outcomes, args=(commands, environment(), folder, list(missing), theirs))
    process.start()
    theirs.close()
    try:
        assert ours.poll(LIMIT), "the command lines take too long"
        ended: list[tuple[int, str]] = ours.recv()
        process.join()
    finally:
        process.kill()
    return ended


def _run(
    arguments: list[str], environment: dict[str, str], folder: Path, written: str, freeze_before: tuple[str, int] | None
) -> None:
    os.setsid()
    output = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    _become(environment, folder)
    os.chdir(folder)
    sys.argv = ["megatron-rc", *arguments]
    from megatron_rc.cli import main
    from megatron_rc.report.log import MetricsLog

    write = MetricsLog.write

    def write_or_freeze(log: MetricsLog, record: Mapping[str, Any]) -> None:
        if (record["phase"], record["step"]) == freeze_before:
            os.kill(os.getpid(), signal.SIGSTOP)
        write(log, record)

    if freeze_before:
        MetricsLog.write = write_or_freeze  # type: ignore[method-assign]
    main()


def _outcomes(
    commands: list[list[str]], environment: dict[str, str], folder: Path, missing: list[str], answers: Connection
) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    _become(environment, folder)
    sys.modules.update(dict.fromkeys(missing))  # type: ignore[arg-type]
    answers.send([outcome(arguments) for arguments in commands])


def _become(environment: dict[str, str], folder: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, str(folder))
    from megatron_rc.rollout import worker

    worker.START_METHOD = forked.METHOD
    forked.share_server()
