"""The verbs `plan`, `launch` and `serve` of the command line."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from megatron_rc.versions import check_linux, link

Recipe = Annotated[Path, typer.Argument(help="YAML of a training job; `megatron-rc settings` lists its fields.")]
Assignments = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change a field, such as train.steps=20; repeatable.")
]

LAUNCHING = link("docs/launch.md")


def _gone(value: list[str]) -> None:
    if value:
        where = "the repository's launch/train.sbatch and launch/train_sglang.sbatch start several under Slurm"
        raise ValueError(f"megatron-rc starts one machine and takes no addresses of others; {where}{LAUNCHING}")


OtherMachines = Annotated[
    list[str],
    typer.Option(
        "--host", "--node-rank", "--master-addr", "--master-port", "--rdzv-endpoint", hidden=True, callback=_gone
    ),
]


def plan(
    recipe: Recipe,
    assignments: Assignments = [],  # noqa: B006 - typer reads the defaults
    shell: Annotated[bool, typer.Option("--shell", help="Print the layout as variables of bash instead.")] = False,
    other_machines: OtherMachines = [],  # noqa: B006
) -> None:
    """Check a job's layout on its cluster, estimate the memory of its GPUs, and print the commands that start it."""
    from megatron_rc.launch.dry_run import divided, print_dry_run
    from megatron_rc.launch.layout import Options, shell_variables
    from megatron_rc.settings import job as job_settings

    settings = job_settings.load(recipe, assignments)
    if not shell:
        return print_dry_run(settings, Options(recipe=recipe, assignments=assignments))
    divided(settings).check_memory()
    print(shell_variables(settings))


def launch(
    recipe: Recipe,
    server_flags: Annotated[
        list[str], typer.Argument(metavar="-- FLAGS", help="Flags of SGLang for every server, after --.")
    ] = [],  # noqa: B006
    assignments: Assignments = [],  # noqa: B006
    nodes: Annotated[int | None, typer.Option(envvar="NNODES", help="Machines: cluster.nodes; 1 can start.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="GPUs per machine: cluster.gpus_per_node.")] = None,
    serve_gpus: Annotated[int | None, typer.Option(help="GPUs that serve, the last ones: cluster.serve_gpus.")] = None,
    server_tp: Annotated[int | None, typer.Option(help="GPUs that share one server: cluster.server_tp.")] = None,
    timeout: Annotated[int, typer.Option(help="Seconds to wait for a server.")] = 1800,
    server_port: Annotated[int, typer.Option(help="Port of the first server; 0: free ports.")] = 30000,
    server_python: Annotated[str, typer.Option(envvar="SGLANG_PYTHON", help="Python with SGLang.")] = "python3",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start anew; the earlier run moves to OUTPUT/earlier-1.")
    ] = False,
    dump: Annotated[bool, typer.Option("--dump", help="Write every training batch to OUTPUT/dump.")] = False,
    doctor: Annotated[bool, typer.Option(help="Check the servers against the job before it trains.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, estimate and print; start nothing.")] = False,
    other_machines: OtherMachines = [],  # noqa: B006
) -> None:
    """Start a job on this machine: its SGLang servers and its trainer processes, which end together.

    The first GPUs train, the last ones serve. Several machines are started by Slurm with the repository's templates
    launch/train.sbatch and launch/train_sglang.sbatch.
    """
    check_linux("megatron-rc launch")
    from megatron_rc.launch import launch as launching
    from megatron_rc.launch.layout import Options

    cluster = {"nodes": nodes, "gpus_per_node": gpus_per_node, "serve_gpus": serve_gpus, "server_tp": server_tp}
    changes = [f"cluster.{name}={value}" for name, value in cluster.items() if value is not None]
    options = Options(
        recipe=recipe, assignments=[*changes, *assignments], timeout=timeout, server_port=server_port,
        server_python=server_python, server_flags=server_flags, fresh=fresh, dump=dump, doctor=doctor,
    )  # fmt: skip
    launching.launch(options, dry_run=dry_run)


def serve(
    model: Annotated[str, typer.Argument(help="Directory or name on the Hugging Face hub; or stop.")],
    flags: Annotated[
        list[str], typer.Argument(metavar="SGLANG_FLAGS", help="Passed on to SGLang; they win over those set here.")
    ] = [],  # noqa: B006
    python: Annotated[
        str, typer.Option(envvar="SGLANG_PYTHON", help="An interpreter with SGLang.", show_default="this one")
    ] = sys.executable,
    tp: Annotated[
        int, typer.Option("--tp", "--tp-size", "--tensor-parallel-size", help="GPUs that share the model.")
    ] = 1,
    cpu: Annotated[bool, typer.Option("--cpu", help="Serve without a GPU, in fp32, token ids only.")] = False,
    host: Annotated[
        str, typer.Option(help="Address to listen on; whoever reaches it controls the server, weights included.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, help="Port to listen on; 0: any free one.")] = 30000,
    log: Annotated[
        Path | None, typer.Option(help="File for the server's output.", show_default="runs/sglang-PORT.log")
    ] = None,
    timeout: Annotated[int, typer.Option(help="Seconds to wait for the server to answer.")] = 1800,
    background: Annotated[
        bool, typer.Option("--background", help="Return when the server answers; `serve stop` ends it.")
    ] = False,
    stop_with: Annotated[
        int | None, typer.Option(metavar="PID", help="Stop the server when process PID ends, however it ends.")
    ] = None,
    report_to: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Tell the trainer that gathers there when it answers.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and start nothing.")] = False,
) -> None:
    """Serve a model with SGLang and what rollout correction needs; stays until Ctrl-C, which stops all it started.

    Mixture-of-experts models are served with --enable-return-routed-experts, so that routes can be compared and
    replayed. Useful flags of SGLang: --sampling-mask-max-tokens N, the largest top-k that comes back with its kept ids;
    --enable-deterministic-inference, the same answer whatever else is in the batch, and sampling seeds.

    megatron-rc serve stop [--port N] [--log FILE] ends the server that --background started.
    """
    check_linux("megatron-rc serve")
    from megatron_rc.launch import server

    if model.startswith("-"):
        raise ValueError("the first argument is the model to serve, or stop; --help shows the rest")
    port = port or (port if model == "stop" else server.free_port())
    log = (log or Path(f"runs/sglang-{port}.log")).resolve()
    if model == "stop":
        return server.stop(log)
    if not dry_run:
        server.check_sglang(python)
    command = server.serving_command(model, python=python, host=host, port=port, tensor=tp, cpu=cpu, flags=flags)
    if dry_run:
        return print("env PYTHONSAFEPATH=1", shlex.join(command))
    server.serve(
        command, host=host, port=port, log=log, timeout=timeout, background=background, stop_with=stop_with,
        report_to=report_to,
    )  # fmt: skip
