"""Two nodes on this machine, 127.0.0.1 and 127.0.0.2, that run the templates of Slurm: with Slurm, or without it."""

import getpass
import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
from cluster_nodes import LAUNCH, environment, free_port
from launch_scripts import write_script

NODES = ("127.0.0.1", "127.0.0.2")
SLURM_CONF = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/spool/-D
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
KillWait=5
NodeName={nodes[0]} NodeAddr={nodes[0]} NodeHostname={host} Port={first} CPUs={cores}
NodeName={nodes[1]} NodeAddr={nodes[1]} NodeHostname={host} Port={second} CPUs={cores}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


class Loopback:
    """Nodes on which a stand-in for srun starts the steps of a template."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.jobs = folder, list[subprocess.Popen[str]]()
        write_script(folder / "bin/scontrol", "#!/bin/sh\nprintf '127.0.0.1\\n127.0.0.2\\n'\n")
        (folder / "bin/srun").symlink_to(Path(__file__).with_name("srun"))
        path = f"{folder}/bin:{os.environ['PATH']}"
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "127.0.0.[1-2]"}
        self.environment = environment(**job, PATH=path, TEST_FOLDER=str(folder), PORT=str(free_port()))

    def submit(self, template: Path, *words: object, **extra: str) -> subprocess.Popen[str]:
        """A job that runs; `ended` says what it wrote."""
        with open(self.folder / "said", "w") as said:
            command, environ = [*self.command(template), *map(str, words)], {**self.environment, **extra}
            job = subprocess.Popen(command, env=environ, cwd=LAUNCH.parent, stdout=said, stderr=said, text=True)
        self.jobs.append(job)
        return job

    def command(self, template: Path) -> list[str]:
        return ["bash", str(template)]

    def ended(self, job: subprocess.Popen[str]) -> tuple[int, str]:
        """(exit status, all that was written), once the job has ended and nothing of it is left."""
        while self.processes():
            time.sleep(0.1)
        return job.wait(600), (self.folder / "said").read_text()

    def processes(self, node: str = "") -> list[int]:
        """The processes of all steps, or of those on one node, by the environment that they were given."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                given = process.environ()
                of_job = given.get("TEST_FOLDER") == str(self.folder) and "SLURMD_NODENAME" in given
                if of_job and given["SLURMD_NODENAME"].startswith(node):
                    found.append(process.pid)
        return found

    def close(self) -> None:
        for job in self.jobs:
            job.kill()
            job.wait()
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


class Slurm(Loopback):
    """The same nodes with Debian's Slurm: a controller and two slurmd."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        config = folder / "slurm.conf"
        config.write_text(
            SLURM_CONF.format(
                folder=folder, nodes=NODES, user=getpass.getuser(), host=socket.gethostname().split(".")[0],
                controller=free_port(), first=free_port(), second=free_port(), cores=os.cpu_count(),
            )
        )  # fmt: skip
        # no cgroups: a plugin that finds none does without
        (folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={folder}\n")
        own = {**environment(), "SLURM_CONF": str(config)}
        self.environment = {**own, "TEST_FOLDER": str(folder), "PORT": str(free_port())}
        self.daemons = []
        for number, words in enumerate((["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in NODES))):
            (folder / f"spool/{words[-1]}").mkdir(parents=True)
            with open(folder / f"daemon{number}.log", "w") as log:
                self.daemons.append(subprocess.Popen(words, env=own, stdout=log, stderr=log))
        deadline = time.monotonic() + 60
        while self._states(own) != ["idle", "idle"]:
            if time.monotonic() > deadline:
                self.close()
                logs = sorted(folder.glob("daemon*.log"))
                raise AssertionError("Slurm does not start:\n" + "\n".join(log.read_text()[-2000:] for log in logs))
            time.sleep(0.2)

    def _states(self, environ: dict[str, str]) -> list[str]:
        asked = ["sinfo", "--noheader", "--Node", "--format=%t"]
        return subprocess.run(asked, env=environ, capture_output=True, text=True).stdout.split()

    def command(self, template: Path) -> list[str]:
        said = ["--output", f"{self.folder}/said", "--open-mode=append"]
        return ["sbatch", "--wait", "--gpus-per-node=0", *said, str(template)]

    def close(self) -> None:
        # a daemon that ends before its steps leaves processes behind that wait for it
        subprocess.run(["scancel", f"--user={getpass.getuser()}"], env=self.environment)
        super().close()
        asked, deadline = ["squeue", "--noheader"], time.monotonic() + 60
        while subprocess.run(asked, env=self.environment, capture_output=True).stdout and time.monotonic() < deadline:
            time.sleep(0.2)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait(600)
