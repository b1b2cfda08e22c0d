"""`megatron-rc launch`: the same command on every node, its place in a Slurm job, and its dry run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rc import settings as job_settings
from megatron_rc.cluster import node
from megatron_rc.cluster.layout import FIRST_PORT, Places, rendezvous_of
from megatron_rc.jobs.run import quiet_imports

if TYPE_CHECKING:
    from megatron_rc.cluster.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The options of `megatron-rc launch`."""

    recipe: Path
    assignments: Sequence[str] = ()
    """key=value changes of the recipe."""
    words: Sequence[str] = ()
    """The command line after `megatron-rc launch`; other nodes start with it, too."""
    node_rank: int | None = None
    hosts: Sequence[str] = ()
    """An address of every node, where Slurm or the user names them."""
    master_addr: str | None = None
    """Address of node 0."""
    master_port: int = 29500
    """Port of torchrun on node 0; the nodes find each other at the next one."""
    rdzv_endpoint: str | None = None
    """HOST:PORT of a c10d rendezvous on node 0, in place of master_addr and master_port."""
    timeout: float = 600
    """Seconds to wait for the other nodes."""
    server_timeout: int = 1800
    """Seconds to wait for a server."""
    server_port: int = FIRST_PORT
    """Port of a node's first server; 0: every server gets a free port."""
    server_python: str = "python3"
    """An interpreter with SGLang."""
    server_flags: Sequence[str] = ()
    """More options of `megatron-rc serve` and flags of SGLang, for every server."""
    fresh: bool = False
    dump: bool = False

    def places(self, nodes: int, hosts: Sequence[str], visible: Sequence[str] | None = None) -> Places:
        rendezvous = rendezvous_of(nodes, hosts[0], self.master_port)
        if self.rdzv_endpoint:
            rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", self.rdzv_endpoint]
            rendezvous += ["--rdzv-id", self.recipe.stem]
        arguments = [word for assignment in self.assignments for word in ("--set", assignment)]
        return Places(
            recipe=str(self.recipe),
            hosts=hosts,
            rendezvous=rendezvous,
            arguments=[*arguments, *["--fresh"] * self.fresh, *["--dump"] * self.dump],
            server_flags=["--timeout", str(self.server_timeout), *self.server_flags],
            python=sys.executable,
            server_python=self.server_python,
            first_port=self.server_port,
            visible=visible,
        )


def launch(given: Launch, *, dry_run: bool = False) -> None:
    """Start this node's part of a job and stay until the job ends, or print what would start.

    Raises:
        ValueError: why the job cannot start, or why it ended.
    """
    if given.rdzv_endpoint:
        host, colon, port = given.rdzv_endpoint.rpartition(":")
        if not (host and colon and port.isdigit()):
            raise ValueError(f"--rdzv-endpoint takes HOST:PORT, got {given.rdzv_endpoint!r}")
        given = replace(given, master_addr=host, master_port=int(port))
    settings = job_settings.load(given.recipe, given.assignments)
    cluster = settings.cluster
    if cluster.nodes > 1:
        given = _in_slurm(given, cluster.nodes, dry_run)
    if cluster.nodes == 1 and not cluster.serve_gpus and not dry_run:
        node.become_the_trainer(settings, given)
    quiet_imports()
    from megatron_rc.cluster.plan import make_plan

    plan = make_plan(settings)
    if dry_run:
        print_plan(plan, given)
    else:
        node.run(settings, given)


def print_plan(plan: Plan, given: Launch) -> None:
    from megatron_rc.cluster.plan import describe

    nodes = plan.settings.cluster.nodes
    hosts = given.hosts or [given.master_addr or "node0", *(f"node{rank}" for rank in range(1, nodes))]
    if len(hosts) != nodes:
        raise ValueError(f"--host must name all of the {nodes} nodes or none, got {len(hosts)}")
    print(describe(plan, given.places(nodes, hosts)))
    if nodes > 1:
        print("\non every node, unless Slurm does it:")
        rest = [word for word in given.words if word != "--dry-run"]
        for rank in range(nodes):
            place = ["--node-rank", str(rank), "--master-addr", hosts[0]]
            print(f"  {shlex.join(['megatron-rc', 'launch', *place, *rest])}")
    plan.check_memory()


def _in_slurm(given: Launch, nodes: int, dry_run: bool) -> Launch:
    """Inside a Slurm job: become the step with one task per node, or take this task's place from Slurm."""
    environment = os.environ
    if "SLURM_JOB_ID" not in environment or given.node_rank is not None:
        return given
    size = int(environment.get("SLURM_JOB_NUM_NODES", environment.get("SLURM_NNODES", "1")))
    if size != nodes:
        raise ValueError(f"the Slurm job has {size} nodes, cluster.nodes is {nodes}")
    nodelist = environment.get("SLURM_JOB_NODELIST", "")
    named = subprocess.run(["scontrol", "show", "hostnames", nodelist], capture_output=True, text=True)
    hosts = named.stdout.split()
    if named.returncode or not hosts:
        raise ValueError(f"scontrol does not name the nodes of the Slurm job: {named.stderr.strip()}")
    given = replace(given, hosts=hosts, master_addr=given.master_addr or hosts[0])
    if environment.get("SLURM_STEP_NUM_TASKS") == str(nodes):
        return replace(given, node_rank=int(environment["SLURM_PROCID"]))
    step = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    step += [sys.executable, "-m", "megatron_rc", "launch", *given.words]
    if dry_run:
        print(f"inside this Slurm job: {shlex.join(step)}\n")
        return given
    os.execvp(step[0], step)
