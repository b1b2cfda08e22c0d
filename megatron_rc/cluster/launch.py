"""`megatron-rc launch`: the same command on every node, its place in a Slurm job, and its dry run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import replace

from megatron_rc import settings as job_settings
from megatron_rc.cluster import node
from megatron_rc.cluster.layout import Options
from megatron_rc.cluster.processes import say
from megatron_rc.settings import JobSettings


def launch(options: Options, *, dry_run: bool = False) -> None:
    """Start this node's part of a job and stay until it ends, or print what would start; errors are ValueErrors."""
    if options.rdzv_endpoint:
        host, colon, port = options.rdzv_endpoint.rpartition(":")
        if not (host and colon and port.isdigit()):
            raise ValueError(f"--rdzv-endpoint takes HOST:PORT, got {options.rdzv_endpoint!r}")
        options = replace(options, master_addr=host, master_port=int(port))
    settings = job_settings.load(options.recipe, options.assignments)
    nodes = settings.cluster.nodes
    if nodes > 1 and "SLURM_JOB_ID" in os.environ and options.node_rank is None:
        options = _in_slurm(options, nodes, dry_run)
    if dry_run:
        return print_plan(settings, options)
    if nodes == 1 and not settings.cluster.serve_gpus:
        node.become_the_trainer(settings, options)
    say("checking the layout")
    # transformers, which fills in the fields of a model, takes seconds to import
    from megatron_rc.cluster.plan import make_plan

    make_plan(settings)
    node.run(settings, options)


def print_plan(settings: JobSettings, options: Options) -> None:
    """Print a job's layout, memory and commands; raises ValueError when it cannot be divided or does not fit."""
    from megatron_rc.cluster.plan import describe, make_plan

    nodes, plan = settings.cluster.nodes, make_plan(settings)
    hosts = options.hosts or [options.master_addr or "node0", *(f"node{rank}" for rank in range(1, nodes))]
    if len(hosts) != nodes:
        raise ValueError(f"--host must name all of the {nodes} nodes or none, got {len(hosts)}")
    print(describe(plan, replace(options, hosts=hosts)))
    if nodes > 1 and options.words:
        print("\non every node, unless Slurm does it:")
        rest = [word for word in options.words if word != "--dry-run"]
        for rank in range(nodes):
            place = ["--node-rank", str(rank), "--master-addr", hosts[0]]
            print(f"  {shlex.join(['megatron-rc', 'launch', *place, *rest])}")
    plan.check_memory()


def _in_slurm(options: Options, nodes: int, dry_run: bool) -> Options:
    """Become the Slurm step with one task per node, or take this task's place from Slurm."""
    environment = os.environ
    size = int(environment.get("SLURM_JOB_NUM_NODES", environment.get("SLURM_NNODES", "1")))
    if size != nodes:
        raise ValueError(f"the Slurm job has {size} nodes, cluster.nodes is {nodes}")
    nodelist = environment.get("SLURM_JOB_NODELIST", "")
    named = subprocess.run(["scontrol", "show", "hostnames", nodelist], capture_output=True, text=True)
    hosts = named.stdout.split()
    if named.returncode or not hosts:
        raise ValueError(f"scontrol does not name the nodes of the Slurm job: {named.stderr.strip()}")
    options = replace(options, hosts=hosts, master_addr=options.master_addr or hosts[0])
    if environment.get("SLURM_STEP_NUM_TASKS") == str(nodes):
        return replace(options, node_rank=int(environment["SLURM_PROCID"]))
    step = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    step += [sys.executable, "-m", "megatron_rc", "launch", *options.words]
    if dry_run:
        print(f"inside this Slurm job: {shlex.join(step)}\n")
        return options
    os.execvp(step[0], step)
