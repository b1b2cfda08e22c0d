"""`megatron-rc launch`: the servers and the trainer of a job on one machine, which end together."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from megatron_rc.launch import layout, processes, server
from megatron_rc.launch.layout import Command, Options, Server
from megatron_rc.launch.processes import say
from megatron_rc.models.config import config_file
from megatron_rc.settings import job as job_settings
from megatron_rc.settings.job import JobSettings
from megatron_rc.versions import link

GRACE = 30.0
"""Seconds that the trainer has to end before it is killed."""


def launch(options: Options, *, dry_run: bool = False) -> None:
    """Start a job and stay until it ends, or print what would start; raises ValueError saying why it could not."""
    settings = job_settings.load(options.recipe, options.assignments)
    cluster = settings.cluster
    # transformers, which fills in the fields of a model, takes seconds to import
    if dry_run:
        from megatron_rc.launch.dry_run import print_dry_run

        return print_dry_run(settings, options)
    if cluster.nodes > 1:
        where = f"a template of the repository's launch/, submitted by sbatch, starts several{link('docs/launch.md')}"
        problem = f"megatron-rc launch starts one machine, and cluster.nodes is {cluster.nodes}"
        raise ValueError(f"{problem}: {where}; --dry-run prints how")
    options = replace(options, visible=visible_gpus(cluster.gpus_per_node))
    if not cluster.serve_gpus:
        # only torchrun is needed, so this process turns into it
        trainer = layout.starts_of(settings, options).trainer
        os.execvpe(trainer.words[0], trainer.words, _trainer_environment(trainer))
    say("checking the layout")
    from megatron_rc.launch.dry_run import divided

    divided(settings)
    run(settings, options)


def visible_gpus(wanted: int) -> list[str]:
    """CUDA's names of ``wanted`` GPUs of this machine; empty where it has none, and the trainer computes on the CPU."""
    names: list[str] = []
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        names = [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name]
    elif shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
        names = [str(number) for number in range(sum(line.startswith("GPU ") for line in listed.splitlines()))]
    if names and len(names) < wanted:
        raise ValueError(f"this node shows {len(names)} GPUs, cluster.gpus_per_node is {wanted}")
    return names[:wanted]


def run(settings: JobSettings, options: Options) -> None:
    """Warm up, serve, check the servers, train, and end everything together."""
    if settings.model.hf_path:
        config_file(settings.model.hf_path)
    warm_up, servers, doctor, trainer = layout.starts_of(settings, options)
    warm = layout.warm_folder(settings)
    processes.exit_on_signals()
    if warm_up and (options.fresh or not Path(f"{warm}/hf/config.json").is_file()):
        say(f"warming up, into {warm}")
        train(warm_up)
    say(f"starting {len(servers)} servers")
    with serving(servers):
        if doctor and subprocess.run(doctor.words, env=processes.child_environment()).returncode:
            why = "the servers and the job do not go together; each error above names its fix"
            raise ValueError(f"{why} (--no-doctor skips the check)")
        train(trainer)


@contextlib.contextmanager
def serving(servers: Sequence[Server]) -> Iterator[None]:
    """Start the servers, all at once, and wait until they answer; they end with this block, and with this process."""
    starting = []
    try:
        for one in servers:
            words = [*one.command.words, "--background", "--stop-with", str(os.getpid())]
            starting.append(subprocess.Popen(words, env=processes.child_environment() | one.command.environment))
        for one, starter in zip(servers, starting, strict=True):
            if starter.wait():
                raise ValueError(f"the server {one.url} did not start; its own message is above")
        yield
    finally:
        processes.ignore_signals()
        for starter in starting:
            if starter.poll() is None:
                starter.terminate()
        for starter in starting:
            starter.wait()
        running = [Path(one.log) for one in servers if server.pid_file(Path(one.log)).exists()]
        with ThreadPoolExecutor() as pool:
            list(pool.map(server.stop, running))


def train(command: Command) -> None:
    """Run torchrun until it ends; whatever ends this process ends it, too. Raises ValueError when it fails."""
    trainer = subprocess.Popen(command.words, env=_trainer_environment(command), start_new_session=True)
    leader = processes.Process.now(trainer.pid)
    processes.start_keeper(leader, [processes.Process.now(os.getpid())], GRACE)
    try:
        status = trainer.wait()
    except SystemExit:
        processes.ignore_signals()
        processes.end_group(leader, GRACE)  # torchrun passes it on to its workers
        say("stopped; the same command without --fresh goes on from the newest checkpoint")
        raise
    if status:
        raise ValueError("the trainer failed; its own error is above the launcher's traceback")


def _trainer_environment(command: Command) -> dict[str, str]:
    # Megatron orders its communication before its matrix products by the second
    defaults = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return processes.child_environment(**defaults) | command.environment
