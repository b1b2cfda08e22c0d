"""The megatron-rc command: train, report, tasks."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_rc import schema

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_rc.engine import RolloutEngine
    from megatron_rc.tasks import Task
    from megatron_rc.training.arguments import JobSettings
    from megatron_rc.training.policy import Policy

app = typer.Typer(
    help="Rollout correction for Megatron.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

EXIT_USER_ERROR = 2


def main() -> None:
    """Run a command; what a user can mend is one sentence on stderr and exit status 2."""
    try:
        app()
    except ValueError as error:
        if os.environ.get("MEGATRON_RC_TRACEBACK"):
            raise
        if os.environ.get("RANK", "0") == "0":
            print(f"megatron-rc: error: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_USER_ERROR)


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="YAML with the fields of JobSettings; docs/settings.md lists them.")],
    assignments: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a field, such as train.steps=20.")
    ] = [],  # noqa: B006 - typer reads the default
    fresh: Annotated[bool, typer.Option(help="Start anew, deleting the earlier run in the output folder.")] = False,
    dump: Annotated[bool, typer.Option(help="Write every training batch to OUTPUT/dump as Parquet.")] = False,
) -> None:
    """Train a policy with rollout correction; resumes from the newest checkpoint of the output folder.

    Several processes: torchrun --standalone --nproc_per_node 2 -m megatron_rc train CONFIG
    """
    from megatron_rc.config import RolloutCorrection
    from megatron_rc.training.arguments import JobSettings

    data = schema.load_yaml(config)
    if isinstance(data.get("correction"), str):
        data["correction"] = {"preset": data["correction"]}  # so that --set correction.old=... keeps the rest
    for assignment in assignments:
        schema.set_field(data, assignment)
    if "correction" in data:
        data["correction"] = RolloutCorrection.expand(data["correction"])
    _train(schema.from_dict(JobSettings, data), fresh=fresh, dump=dump)


@app.command()
def settings() -> None:
    """Print every field of the YAML with its type, default and meaning (Markdown)."""
    from megatron_rc import describe
    from megatron_rc.training.arguments import JobSettings

    print("# Settings of `megatron-rc train`\n\nPrinted by `megatron-rc settings`.\n")
    print(describe.sections(JobSettings), end="")


@app.command()
def presets() -> None:
    """Print the correction presets with their settings and sources (Markdown)."""
    from megatron_rc import describe
    from megatron_rc.config import PRESETS

    print("# Correction presets\n\nPrinted by `megatron-rc presets`.\n")
    rows = [(f"`{name}`", describe.changed(p.correction), p.source) for name, p in PRESETS.items()]
    print(describe.table(("preset", "settings", "source"), rows), end="")


@app.command()
def metrics() -> None:
    """Print every metric of a pair of policies with its formula (Markdown)."""
    from megatron_rc import describe
    from megatron_rc.metrics import METRICS, SHARES

    print("# Metrics\n\nPrinted by `megatron-rc metrics`. `old/` is the trainer before the update against the sampler,")
    print("`current/` the trainer during the update against the sampler, `current_old/` the former two.\n")
    print("l = log pi - log mu of a token, rho = e^l; rho(y) = exp sum_t l of a sequence; p = pi, q = mu; w: the final")
    print("weights.\n")
    formulas = {**{name: metric.formula for name, metric in METRICS.items()}, **SHARES}
    print(describe.table(("metric", "formula"), [(f"`{name}`", text) for name, text in formulas.items()]), end="")


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Output folder of a training job.")],
    png: Annotated[Path | None, typer.Option(help="Also draw the main curves to this PNG; needs matplotlib.")] = None,
) -> None:
    """Write report.html from the metrics of a training job, finished or not."""
    from megatron_rc.report.html import write_report
    from megatron_rc.report.picture import write_curves_png

    if not (folder / "metrics.jsonl").is_file():
        raise ValueError(f"{folder} holds no metrics.jsonl; give the output folder of a training job")
    print(write_report(folder))
    if png is not None:
        print(write_curves_png(folder, png))


OUTPUTS = (
    "settings.yaml",
    "fingerprint.json",
    "metrics.jsonl",
    "report.html",
    "checkpoints",
    "reference",
    "hf",
    "dump",
    "tensorboard",
)


def _train(settings: JobSettings, *, fresh: bool, dump: bool) -> None:
    """Build everything and run the job on this process."""
    # one a missing optional library, a module and a process; the report lists what is installed
    for category in (UserWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category, module=r"megatron|torch\.distributed")
    from megatron_rc.backend import set_debug_checks
    from megatron_rc.training import emulation

    set_debug_checks(settings.train.debug_checks)
    emulation.emulate_cuda_on_cpu()
    from megatron_rc.rollout.perturb import perturbed
    from megatron_rc.training import groups as parallel
    from megatron_rc.training.loop import Job
    from megatron_rc.training.model import hf_config_dict
    from megatron_rc.training.observers import Observers
    from megatron_rc.training.policy import Policy
    from megatron_rc.training.reinforce import check_modes

    check_modes(settings.correction, settings.loss, settings.train)
    task = _task(settings, hf_config_dict(settings.model))
    folder, rollout = Path(settings.output), settings.rollout
    with parallel.initialized(settings.parallel, settings.train.seed) as groups:
        if fresh and groups.is_writer:
            _delete_outputs(folder)
        policy = Policy(settings.model, settings.parallel, settings.train, groups)
        engine = _engine(settings, policy)

        def export(version: int) -> Iterable[tuple[str, Tensor]]:
            return perturbed(policy.export(), quantize=rollout.quantize, amplify=rollout.amplify, version=version)

        with Observers(settings, writer=groups.is_writer, dumps=dump) as observers:
            Job(settings, groups, policy, engine, task, observers, export=export).run(resume=not fresh)
        engine.close()


def _delete_outputs(folder: Path) -> None:
    """Delete what a job writes, and nothing else that lies in its folder."""
    for name in OUTPUTS:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _task(settings: JobSettings, hf_config: dict[str, Any]) -> Task:
    from megatron_rc.tasks.registry import build_task

    chosen = settings.task
    task = build_task(chosen.kind, chosen.options, seed=settings.train.seed, tokenizer=settings.model.hf_path)
    if task.vocab_size > hf_config["vocab_size"]:
        raise ValueError(
            f"the tokenizer of task {chosen.kind!r} has {task.vocab_size} ids, the model's vocab_size is "
            f"{hf_config['vocab_size']}"
        )
    return task


def _engine(settings: JobSettings, policy: Policy) -> RolloutEngine:
    from megatron_rc.rollout.hf import HFEngine
    from megatron_rc.rollout.perturb import StaleEngine
    from megatron_rc.rollout.replay import ReplayEngine

    rollout = settings.rollout
    if rollout.engine == "replay":
        assert rollout.replay_path is not None
        return ReplayEngine(rollout.replay_path)
    engine = HFEngine(policy.hf_config, dtype=rollout.dtype, device=policy.device)
    return StaleEngine(engine, rollout.staleness) if rollout.staleness else engine
