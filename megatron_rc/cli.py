"""The megatron-rc command: train, report, doctor, and what documents them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_rc import job, schema
from megatron_rc.job import quiet_imports

if TYPE_CHECKING:
    from megatron_rc.training.arguments import JobSettings

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
    job.train(job_settings(config, assignments), fresh=fresh, dump=dump)


def job_settings(config: Path, assignments: Iterable[str] = ()) -> JobSettings:
    """The settings of a YAML file with ``key=value`` assignments on top, as `train` takes them."""
    from megatron_rc.config import RolloutCorrection
    from megatron_rc.training.arguments import JobSettings

    data = schema.load_yaml(config)
    if isinstance(data.get("correction"), str):
        data["correction"] = {"preset": data["correction"]}  # so that --set correction.old=... keeps the rest
    for assignment in assignments:
        schema.set_field(data, assignment)
    if "correction" in data:
        data["correction"] = RolloutCorrection.expand(data["correction"])
    return schema.from_dict(JobSettings, data)


@app.command()
def plan(
    config: Annotated[Path, typer.Argument(help="YAML of a training job.")],
    assignments: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a field.")] = [],  # noqa: B006 - typer reads the default
    nodes: Annotated[int, typer.Option(help="Machines.")] = 2,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of each.")] = 8,
    serve_gpus: Annotated[int, typer.Option(help="The last so many GPUs serve, the others train.")] = 8,
    server_tp: Annotated[int, typer.Option(help="GPUs that share one server's model.")] = 1,
    gpu_memory: Annotated[float, typer.Option(help="GiB of one GPU.")] = 80.0,
    server_share: Annotated[float, typer.Option(help="Of a serving GPU that SGLang takes.")] = 0.85,
    host: Annotated[list[str], typer.Option(help="Address of a node, in order; repeat it.")] = [],  # noqa: B006
) -> None:
    """Check a job's layout on a cluster, estimate the memory of its GPUs, and print each node's commands."""
    quiet_imports()
    from megatron_rc.training.cluster import Cluster, Places
    from megatron_rc.training.plan import describe, make_plan

    cluster = Cluster(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        serve_gpus=serve_gpus,
        server_tensor=server_tp,
        gpu_memory=gpu_memory,
        server_share=server_share,
    )
    hosts = host or [f"node{rank}" for rank in range(nodes)]
    if len(hosts) != nodes:
        raise ValueError(f"--host must name all of the {nodes} nodes or none, got {len(hosts)}")
    found = make_plan(job_settings(config, assignments), cluster)
    arguments = [word for assignment in assignments for word in ("--set", assignment)]
    print(describe(found, Places(str(config), hosts, ("--master-addr", hosts[0]), arguments)))
    found.check_memory()


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


@app.command()
def doctor(
    sglang: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="An SGLang server or sglang-router; may be repeated.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML of the job; names the servers, too.")] = None,
    hf_path: Annotated[str | None, typer.Option(help="Directory of the trained model, instead of the YAML's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every finding as JSON.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for one answer.")] = 60.0,
) -> None:
    """Compare live rollout servers with the trainer: every known source of mismatch, and how to mend it.

    Exit status: 0 nothing wrong (warnings allowed), 1 errors found, 2 a server or a setting could not be read.
    """
    from rich.console import Console

    from megatron_rc.doctor import display
    from megatron_rc.doctor.facts import Facts, read_trainer
    from megatron_rc.doctor.registry import worst
    from megatron_rc.doctor.sglang_checks import SGLANG
    from megatron_rc.doctor.sglang_probe import read_servers

    trainer = read_trainer(config, hf_path)
    urls = sglang or (trainer.job.rollout.sglang.urls if trainer.job else ())
    if not urls:
        raise ValueError("give the servers to look at with --sglang URL, or a job's YAML with --config")
    found = {f"{SGLANG.subject} {s.url}": SGLANG.run(Facts(s, trainer)) for s in read_servers(urls, timeout)}
    if as_json:
        print(display.to_json(found))
    else:
        console = Console(highlight=False)
        for subject, findings in found.items():
            display.show(subject, findings, console=console)
    if any(worst(findings) == "error" for findings in found.values()):
        raise typer.Exit(1)
