"""Checks in several processes: kernels compile side by side, and one that dies or hangs costs one check."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import IO, Any

from checking.run import Result, part_of
from checking.setting import Check

HANGS = 180.0
"""Seconds without a word from a process, after which it is killed: the slowest check compiles for a minute."""
_MARK = "@check "


def say(event: dict[str, Any]) -> None:
    """One event, from a worker to its parent: {"begins": title} or a result."""
    print(_MARK + json.dumps(event), flush=True)


@dataclass
class Worker:
    """One process at a time, which runs its part of the checks; a new one follows one that died."""

    command: list[str]
    checks: list[Check]
    """The checks of this worker, in order."""
    add: Callable[[Result], None]
    hangs: float = HANGS

    def run(self) -> None:
        done = 0
        while done < len(self.checks):
            done += self._one_process(done)

    def _one_process(self, first: int) -> int:
        """How many of the checks from `first` on have ended."""
        done, began, hung = 0, False, False
        command = [*self.command, "--skip", str(first)]
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
            closing(self._lines(process)) as lines,
        ):
            for line in lines:
                if line is None:
                    hung = True
                elif not line.startswith(_MARK):
                    print(line, end="", flush=True)
                else:
                    event = json.loads(line.removeprefix(_MARK))
                    began = "begins" in event
                    if not began:
                        self.add(event)
                        done += 1
        # a process may end between two checks, but not without having got anywhere
        if began or not done:
            check, why = self.checks[first + done], f"its process ended with status {process.returncode}"
            state, why = ("hung", f"said nothing for {self.hangs:g} s") if hung else ("crashed", why)
            self.add({"group": check.group, "name": check.name, "state": state, "reason": why})
            done += 1
        return done

    def _lines(self, process: subprocess.Popen[str]) -> Generator[str | None]:
        """What the process prints; None when it has printed nothing for too long. Closing it kills the process."""
        assert process.stdout is not None
        said: queue.Queue[str | None] = queue.Queue()

        def read(source: IO[str]) -> None:
            for line in source:
                said.put(line)
            said.put(None)

        reader = threading.Thread(target=read, args=(process.stdout,), daemon=True)
        reader.start()
        try:
            while True:
                line = said.get(timeout=self.hangs)
                if line is None:
                    # it ends by itself, with its own status
                    return
                yield line
        except queue.Empty:
            process.kill()
            yield None
        except GeneratorExit:
            process.kill()
            raise
        finally:
            # the pipe is closed next, which must not happen while it is read
            reader.join()


def run_in_processes(command: list[str], checks: list[Check], count: int, add: Callable[[Result], None]) -> None:
    """Runs the checks in `count` processes of that command; `add` gets each result as it comes, one at a time."""
    lock = threading.Lock()

    def added(result: Result) -> None:
        with lock:
            add(result)

    def work(number: int) -> None:
        Worker([*command, "--part", str(number), str(count)], part_of(checks, number, count), added).run()

    with ThreadPoolExecutor(count) as pool:
        # whatever a worker's thread raises is raised here
        list(pool.map(work, range(count)))
