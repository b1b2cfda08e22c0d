"""The options of a node, and what Slurm says of them."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megatron_rc.cluster.layout import FIRST_PORT


class Refusal(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; --help lists the options")


def _recipe_of(script: str) -> str:
    return str(Path(script).parent / "recipes" / f"{Path(script).stem.removeprefix('train_')}.yaml")


def parser(script: str, defaults: dict[str, str]) -> argparse.ArgumentParser:
    environment = os.environ
    found = Refusal(
        prog=f"bash {script}",
        description="Train on a cluster with rollouts from SGLang on GPUs of its own. Run it on every node, or once "
        "inside a Slurm job. Everything it starts ends with it.",
        epilog="What stands after -- goes to every SGLang server. Environment: PYTHON (with megatron_rc; default "
        "python3), SGLANG_PYTHON (with SGLang; default python3), and MASTER_ADDR, MASTER_PORT, NODE_RANK and "
        "NNODES for the options of these names.",
        allow_abbrev=False,
    )
    add = found.add_argument
    add(
        "--config",
        default=_recipe_of(script),
        help="YAML of the job (default %(default)s)",
    )
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="override a field of it; may be repeated")
    add("--nodes", type=int, help="machines (default %(default)s)")
    add("--gpus-per-node", type=int, help="GPUs of each (default %(default)s)")
    add("--serve-gpus", type=int, help="the last so many GPUs serve, the others train (default %(default)s)")
    add("--server-tp", type=int, help="GPUs that share one server's model (default %(default)s)")
    add("--server-share", type=float, default=0.85, help="of a serving GPU that SGLang takes (default %(default)s)")
    add("--gpu-memory", type=float, help="GiB of one GPU, for the estimate (default %(default)s)")
    add("--node-rank", type=int, default=environment.get("NODE_RANK"), help="this machine's number, from 0")
    add("--master-addr", default=environment.get("MASTER_ADDR"), help="address of node 0")
    add("--master-port", type=int, default=environment.get("MASTER_PORT", 29500),
        help="of torchrun; the next one is used too (default %(default)s)")  # fmt: skip
    add("--rdzv-endpoint", metavar="HOST:PORT", help="torchrun's c10d rendezvous on node 0, instead of the two above")
    add("--server-port", type=int, default=FIRST_PORT, help="of a node's first server (default %(default)s)")
    add("--timeout", type=float, default=600, help="seconds to wait for the other nodes (default %(default)g)")
    add("--server-timeout", type=int, default=1800, help="seconds to wait for a server (default %(default)s)")
    add("--fresh", action="store_true", help="start anew, deleting the earlier run in the output folder")
    add("--dump", action="store_true", help="write every training batch to OUTPUT/dump")
    add("--dry-run", action="store_true", help="check the layout, estimate memory, print the commands, start nothing")
    found.set_defaults(**defaults)
    return found


def read_options(words: Sequence[str], script: str, defaults: str) -> argparse.Namespace:
    """What the user of ``script`` wrote.

    Args:
        defaults: of this script, such as "nodes=2 gpus_per_node=8".
    """
    words = list(words)
    cut = words.index("--") if "--" in words else len(words)
    pairs = (default.split("=") for default in defaults.split())
    options = parser(script, {name: value for name, value in pairs}).parse_args(words[:cut])
    options.server_flags, options.words = words[cut + 1 :], words
    options.backend = []
    if options.rdzv_endpoint:
        host, colon, port = options.rdzv_endpoint.rpartition(":")
        if not (host and colon and port.isdigit()):
            raise ValueError(f"--rdzv-endpoint takes HOST:PORT, got {options.rdzv_endpoint!r}")
        options.master_addr, options.master_port = host, int(port)
        name = Path(options.config).stem
        options.backend = ["--rdzv-backend", "c10d", "--rdzv-endpoint", options.rdzv_endpoint, "--rdzv-id", name]
    return options


def take_slurms_place(options: argparse.Namespace, script: str) -> None:
    """Inside a Slurm job: become the step with one task a node, or take this task's place from Slurm."""
    environment = os.environ
    if "SLURM_JOB_ID" not in environment or options.nodes == 1 or options.node_rank is not None:
        return
    given = int(environment.get("SLURM_JOB_NUM_NODES", environment.get("SLURM_NNODES", "1")))
    if given != options.nodes:
        raise ValueError(f"the Slurm job has {given} nodes, --nodes is {options.nodes}")
    nodelist = environment.get("SLURM_JOB_NODELIST", "")
    hosts = subprocess.run(["scontrol", "show", "hostnames", nodelist], capture_output=True, text=True)
    if hosts.returncode or not hosts.stdout.split():
        raise ValueError(f"scontrol does not name the nodes of the Slurm job: {hosts.stderr.strip()}")
    options.hosts = hosts.stdout.split()
    options.master_addr = options.master_addr or options.hosts[0]
    if environment.get("SLURM_STEP_NUM_TASKS") == str(options.nodes):
        options.node_rank = int(environment["SLURM_PROCID"])
        return
    step = ["srun", f"--nodes={options.nodes}", f"--ntasks={options.nodes}", "--ntasks-per-node=1"]
    step += ["--kill-on-bad-exit=1", "bash", script, *options.words]
    if options.dry_run:
        print(f"inside this Slurm job: {shlex.join(step)}\n")
        return
    os.execvp(step[0], step)
