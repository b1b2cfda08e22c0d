"""Training jobs through the command line, and what they write.

Command lines run in processes forked from one that has imported everything, which start at once. Each has the
environment, arguments and exit status of ``python -m megatron_rc``, and the ranks of a job have the environment that
torchrun gives them. The process of a worker engine is forked, too. `typed_job` runs what a user types instead.
"""

import fcntl
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import forked
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import refusals
from launch_scripts import free_port
from process_groups import until

from megatron_rc import schema
from megatron_rc.report.log import read_metrics

ROOT = Path(__file__).parents[2]
LIMIT = 800.0
"""Seconds after which command lines are killed."""
GRACE = 60.0
"""Seconds that the other ranks of a job have to end once one has failed."""
TASK: dict[str, Any] = {"options": {"levels": {"2x1": 1.0}, "held_out": 3}}
DENSE: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 20, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
MOE = {**DENSE, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS = {"dense": DENSE, "moe": MOE}


def environment() -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}


class Job(AbstractContextManager["Job"]):
    """A running command line of megatron-rc, which is killed at the end of its block."""

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
            given = (list(arguments), ranked, folder, f"{self._written.name}/{rank}", freeze_before)
            process = multiprocessing.get_context(forked.METHOD).Process(target=_run, args=given)
            process.start()
            self._processes.append(process)

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self._processes[0].pid

    def running(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def wait_until_frozen(self) -> None:
        """Wait for the step of ``freeze_before``, which the job must reach."""
        first = psutil.Process(self.pid)
        frozen = until(lambda: first.status() == psutil.STATUS_STOPPED, self.running, LIMIT)
        assert frozen, "the job ended before the step that it freezes at"

    def kill(self) -> None:
        """Kill every rank with signal 9, children included."""
        for process in self._processes:
            if process.is_alive():
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
    # a shell that starts the tests in the background has ignored it
    signal.signal(signal.SIGINT, signal.default_int_handler)
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
    answers.send([refusals.run(*arguments)[::2] for arguments in commands])


def _become(environment: dict[str, str], folder: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, str(folder))
    from megatron_rc.rollout import worker

    worker.START_METHOD = forked.METHOD
    # it asks the server that it comes from for further processes, instead of starting another
    vars(forkserver._forkserver)["ensure_running"] = lambda: None  # type: ignore[attr-defined]


def settings_file(folder: Path, data: dict[str, Any]) -> Path:
    path = folder / "settings.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(schema.dump_yaml(data))
    return path


def script_environment() -> dict[str, str]:
    """Environment of a script that a user starts by its path: Python finds the modules beside it."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"} | {"OMP_NUM_THREADS": "1"}


def started(config: Path, *arguments: str, processes: int = 1, freeze_before: tuple[str, int] | None = None) -> Job:
    return Job(["train", str(config), *arguments], config.parent, processes, freeze_before)


def finished_job(config: Path, *arguments: str, processes: int = 1) -> list[dict[str, Any]]:
    """Run a job that must succeed; its metrics."""
    status, said = started(config, *arguments, processes=processes).wait()
    assert status == 0, said[-4000:]
    return metrics_of(arguments)


def typed_job(config: Path, *arguments: str, processes: int = 1) -> list[dict[str, Any]]:
    """`finished_job` by the command that a user types."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command += ["-m", "megatron_rc", "train", str(config), *arguments]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-4000:]
    return metrics_of(arguments)


def metrics_of(arguments: Sequence[str]) -> list[dict[str, Any]]:
    output = next(a.partition("=")[2] for a in arguments if a.startswith("output="))
    return read_metrics(Path(output) / "metrics.jsonl")


REWARDS = """
calls = evaluations = 0

def by_length(prompt, response, answer):
    return float(len(response) % 3)

def raises_later(prompt, response, answer):
    global calls
    calls += 1
    if calls > 9:
        raise KeyError("no such grade")
    return float(len(response) % 3)

def raises_at_the_second_evaluation(prompt, response, answer):
    global evaluations
    evaluations += answer == "held out"
    if evaluations > 1:
        raise KeyError("no such grade")
    return float(len(response) % 3)
"""
"""Reward functions for a module that the jobs import."""


def save_tokenizer(path: Path) -> None:
    """A tokenizer of 19 ids: letters between spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnop"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    fast.save_pretrained(path)


def save_tiny_checkpoint(path: Path, model: dict[str, Any] = DENSE) -> None:
    """A random Qwen3 of transformers, the same every time, with a tokenizer of letters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    save_tokenizer(path)
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**{k: v for k, v in model.items() if k != "model_type"})).save_pretrained(path)


def letters_task(folder: Path) -> dict[str, Any]:
    """Prompts of three letters, rewarded by the length of the answer; writes its files."""
    (folder / "grading.py").write_text(REWARDS)
    lines = [json.dumps({"prompt": " ".join("abcdefghijklmnop"[i : i + 3]), "answer": "a"}) for i in range(12)]
    (folder / "data.jsonl").write_text("\n".join(lines))
    return {"kind": "jsonl", "options": {"path": str(folder / "data.jsonl"), "reward": "grading:by_length"}}


def train(config: Path, output: Path, *assignments: str) -> list[str]:
    return ["train", str(config), *(w for a in (f"output={output}", *assignments) for w in ("--set", a))]


def tiny_job(folder: Path, job: dict[str, Any]) -> Path:
    """Settings of a job on the tiny checkpoint and the letters, whose files are written beside them."""
    save_tiny_checkpoint(folder / "hf")
    return settings_file(folder, {**job, "model": {"hf_path": str(folder / "hf")}, "task": letters_task(folder)})


def warm_model(kind: str, factory: pytest.TempPathFactory) -> Path:
    """The session's checkpoint of that kind, for jobs that need no warm-up: whoever comes first trains it."""
    folder = factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else factory.getbasetemp()
    output = folder / f"warm-{kind}"
    with open(folder / f"warm-{kind}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (output / "hf/config.json").exists():
            warmup = {"steps": 100, "lr": 5e-3, "batch_size": 64}
            settings = {"model": {"config": MODELS[kind]}, "task": TASK, "warmup": warmup, "train": {"steps": 0}}
            finished_job(settings_file(folder / f"warm-{kind}-settings", settings), "--set", f"output={output}")
    return output / "hf"


def timeless(records: list[dict[str, Any]], *others: str) -> list[dict[str, Any]]:
    """The records without their times, and without ``others``."""
    left_out = ("tokens_per_second", *others)
    return [{k: v for k, v in r.items() if not k.startswith("time/") and k not in left_out} for r in records]


def doctored(folder: Path, name: str, change: Callable[[list[float]], list[float]]) -> str:
    """A recording of a good run in which the log-probs of one response of step 2 were changed."""
    target = folder / name
    target.mkdir()
    for file in sorted((folder / "good" / "dump").glob("*.parquet")):
        table = pq.read_table(file)
        if file.name == "step-000002.parquet":
            column = table["rollout_logprobs"].to_pylist()
            column[1] = change(column[1])
            place = table.schema.get_field_index("rollout_logprobs")
            table = table.set_column(place, table.schema.field(place), pa.array(column, table.schema.field(place).type))
        pq.write_table(table, target / file.name)
    return str(target)
