"""A stand-in for Slurm's srun on one machine: node n is 127.0.0.(n + 1), and a task that fails ends the others."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from typing import Any, NoReturn

parser = argparse.ArgumentParser()
for name in ("--nodes", "--ntasks", "--ntasks-per-node", "--relative", "--kill-on-bad-exit"):
    parser.add_argument(name, type=int, default=0 if name == "--relative" else 1)
parser.add_argument("--cpu-bind")
parser.add_argument("command", nargs=argparse.REMAINDER)
options = parser.parse_args()
tasks: dict[int, str] = {}
asked_to_end, started = False, False


def end(status: int) -> NoReturn:
    for process in tasks:
        os.killpg(process, signal.SIGTERM)
    sys.exit(status)


def asked(number: int, frame: Any) -> None:
    """A signal while tasks are being started must not miss one of them."""
    global asked_to_end
    asked_to_end = True
    if started:
        end(128 + number)


signal.signal(signal.SIGTERM, asked)
for number in range(options.ntasks):
    node, local = divmod(number, options.ntasks_per_node)
    address = f"127.0.0.{1 + options.relative + node}"
    place = {"SLURMD_NODENAME": address, "SLURM_LOCALID": str(local), "SLURM_PROCID": str(number)}
    task = subprocess.Popen(options.command, env={**os.environ, **place}, start_new_session=True)
    tasks[task.pid] = f"{address}: task {number}"
started = True
if asked_to_end:
    end(128 + signal.SIGTERM)
while tasks:
    process, status = os.wait()
    ended = tasks.pop(process)
    if status:
        print(f"srun: error: {ended}: {os.waitstatus_to_exitcode(status)}", file=sys.stderr)
        end(1)
