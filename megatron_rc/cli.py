"""The megatron-rc command: train, report, doctor, and what documents them.

A verb imports its work when it runs, so that --help takes as long as typer does.
"""

import math
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from megatron_rc import versions
from megatron_rc.analyze import commands as analyze_commands
from megatron_rc.files import is_full
from megatron_rc.launch import commands
from megatron_rc.learning_rate.rule import RULES

HOSTS = "megatron-lm, megatron-training, slime, miles, verl, nemo-rl"
"""The names in integrations.hosts, which --help need not import; a test compares both."""
app = typer.Typer(
    help="Rollout correction for Megatron.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

EXIT_USER_ERROR = 2  # as typer and argparse end for a wrong option
EXIT_INTERRUPTED = 130  # as a shell says that Ctrl-C ended a command
EXIT_TOO_SLOW = 3  # tells a script that budget or patience ended: the same command goes on


def main() -> None:
    """Run a command; an error that the user can fix is one sentence on stderr, with exit status 2."""
    try:
        with versions.needed_by(" ".join(("megatron-rc", *sys.argv[1:2]))):
            app()
    except (ValueError, versions.MissingExtra) as error:
        if os.environ.get("MEGATRON_RC_TRACEBACK"):
            raise
        if os.environ.get("RANK", "0") == "0":
            print(f"megatron-rc: error: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_USER_ERROR)
    except Exception as error:
        if os.environ.get("MEGATRON_RC_TRACEBACK") or not is_full(error):
            raise
        where = f" of {error.filename}" if isinstance(error, OSError) and error.filename else ""
        said = f"the disk{where} is full: make room, then {_same_command()} goes on, training at its newest checkpoint"
        print(f"megatron-rc: error: {said}", file=sys.stderr, flush=True)  # by the process that wanted to write
        sys.exit(EXIT_USER_ERROR)


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="YAML with the fields of JobSettings; docs/settings.md lists them.")],
    assignments: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a field, such as train.steps=20.")
    ] = [],  # noqa: B006 - typer reads the default
    fresh: Annotated[bool, typer.Option(help="Start anew; the earlier run moves to OUTPUT/earlier-1.")] = False,
    dump: Annotated[bool, typer.Option(help="Write every training batch to OUTPUT/dump as Parquet.")] = False,
) -> None:
    """Train a policy with rollout correction; resumes from the newest checkpoint of the output folder.

    Other settings than those that the folder was made with are refused, but for those of docs/training.md.

    Several processes: torchrun --standalone --nproc_per_node 2 -m megatron_rc train CONFIG
    """
    from megatron_rc.jobs import run
    from megatron_rc.jobs.folder import interrupted
    from megatron_rc.settings import job

    settings = job.load(config, assignments)
    try:
        run.train(settings, fresh=fresh, dump=dump)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun sends it once more
        if os.environ.get("RANK", "0") == "0":
            print(f"megatron-rc: stopped; {_same_command()} {interrupted(Path(settings.output))}", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _same_command() -> str:
    """What continues this command; --fresh would begin anew, and torchrun's own words are not known here."""
    start = sys.argv[0] if Path(sys.argv[0]).name != "__main__.py" else "python -m megatron_rc"
    start = "torchrun ... -m megatron_rc" if "RANK" in os.environ else start
    return f"`{start} {shlex.join(word for word in sys.argv[1:] if word != '--fresh')}`"


_RULES = "; ".join(f"{name} {rule.summary}" for name, rule in RULES.items())


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def patch(
    script: Annotated[
        Path | None, typer.Argument(help="Training script of the host, such as train_rl.py; none for slime and miles.")
    ] = None,
    arguments: Annotated[list[str], typer.Argument(help="Its own flags, passed on untouched.")] = [],  # noqa: B006
    rc_preset: Annotated[str | None, typer.Option(help="Correction preset, instead of the YAML's.")] = None,
    rc_config: Annotated[Path | None, typer.Option(help="YAML with `correction:` or `lr_rule:`.")] = None,
    rc_set: Annotated[
        list[str], typer.Option(metavar="KEY=VALUE", help="Override a field, such as correction.weight.upper=3.")
    ] = [],  # noqa: B006
    rc_lr_rule: Annotated[
        str | None, typer.Option(help=f"Learning-rate rule, instead of the YAML's: {_RULES}.")
    ] = None,
    rc_host: Annotated[
        str, typer.Option(help=f"Codebase to patch: {HOSTS}, or auto, the only one that Python can import.")
    ] = "auto",
) -> None:
    """Run the training script of another codebase with rollout correction patched into it; docs/hosts/.

    torchrun --nproc_per_node 8 -m megatron_rc patch --rc-preset none train_rl.py FLAGS

    Print the flags and the YAML that slime takes instead: megatron-rc patch --rc-host slime --rc-preset token-tis
    """
    from megatron_rc.integrations.run_script import patch_settings, recipe, run_script

    settings = patch_settings(rc_config, rc_preset, rc_lr_rule, rc_set)
    if script is None:
        print(recipe(settings, host=rc_host))
    else:
        run_script(script, arguments, settings, host=rc_host)


app.command()(analyze_commands.analyze)
app.command()(analyze_commands.explain)
app.command()(commands.plan)
app.command()(commands.launch)
app.command(context_settings={"ignore_unknown_options": True})(commands.serve)


@app.command()
def grid(
    configs: Annotated[
        list[Path], typer.Argument(metavar="YAML...", help="Grids, run in this order; docs/moe.md explains one.")
    ],
    only: Annotated[list[str], typer.Option(metavar="AXIS=CHOICE,...", help="Run only these choices.")] = [],  # noqa: B006
    seeds: Annotated[str, typer.Option(help="Seeds in place of the YAML's, such as 1,2,3.")] = "",
    output: Annotated[
        str, typer.Option(help="Folder in place of the YAML's; of several YAMLs, each has one of its name in it.")
    ] = "",
    budget_minutes: Annotated[
        float, typer.Option(metavar="N", help="Start no cell that would, by the mean time of a cell, end later.")
    ] = math.inf,
    assignments: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a field of all jobs.")
    ] = [],  # noqa: B006
    warm: Annotated[
        bool, typer.Option("--warm", help="Only make and name the checkpoints that cells start from.")
    ] = False,
    table: Annotated[bool, typer.Option("--table", help="Run nothing; write the table of the finished cells.")] = False,
    workers: Annotated[
        int, typer.Option(min=1, help="Cells at a time; with 2 or more, a process each, and a line per evaluation.")
    ] = 1,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Run cells with results of other settings anew; these move to earlier-1.")
    ] = False,
    give_up_minutes: Annotated[
        float | None, typer.Option(help="With workers: end with status 3 if the first steps predict more minutes.")
    ] = None,
) -> None:
    """Train one job for every choice on every axis of a grid, and write their table and picture.

    Resumes: finished cells of these settings stay. The same command in a second terminal takes a share of the cells.
    """
    from megatron_rc.jobs.run import quiet_imports

    quiet_imports()
    from megatron_rc.jobs import grid as grids
    from megatron_rc.jobs.workers import Budget, TooSlow

    folders = {config: f"{output}/{config.stem}" if output and len(configs) > 1 else output for config in configs}
    chosen = [grids.load(path, seeds=seeds, output=to, assignments=assignments) for path, to in folders.items()]
    if warm:
        print(*dict.fromkeys(path for settings in chosen for path in grids.warm(settings)), sep="\n")
    else:
        choices = {axis: names.split(",") for axis, _, names in (word.partition("=") for word in only)}
        try:
            budget = Budget(budget_minutes)
            grids.run_and_write_all(
                chosen, choices, budget=budget, only_write=table, workers=workers, give_up_minutes=give_up_minutes,
                fresh=fresh,
            )  # fmt: skip
        except TooSlow as slow:
            print(f"megatron-rc: {slow}", file=sys.stderr, flush=True)
            raise typer.Exit(EXIT_TOO_SLOW) from None


@app.command()
def migrate(
    files: Annotated[list[Path], typer.Argument(metavar="YAML...", help="Settings of a job, grid or patched host.")],
) -> None:
    """Rewrite YAML files in place, with the names that settings have today, and print every change.

    Comments and layout stay. The file that `base` names is rewritten with each.
    """
    from megatron_rc.settings.renamed import migrate

    for sentence in migrate(files):
        print(sentence)


_PAGES = {
    "settings": "Print every field of the YAML with its type, default and meaning (Markdown).",
    "presets": "Print the correction presets with their settings and sources (Markdown).",
    "versions": "Print which releases of Python, megatron-core, Triton and SGLang are supported (Markdown).",
    "metrics": "Print every metric of a training job with its unit and meaning or its formula (Markdown).",
}


def _print_page(context: typer.Context) -> None:
    from megatron_rc.jobs import pages

    print(getattr(pages, str(context.command.name))(), end="")


for _page, _help in _PAGES.items():
    app.command(_page, help=_help)(_print_page)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Output folder of a training job.")],
    png: Annotated[Path | None, typer.Option(help="Also draw the main curves to this PNG; needs matplotlib.")] = None,
) -> None:
    """Write report.html from the metrics of a training job, finished or not."""
    from megatron_rc.report.picture import write_curves_png
    from megatron_rc.report.run_page import write_report

    if not (folder / "metrics.jsonl").is_file():
        raise ValueError(f"{folder} holds no metrics.jsonl; give the output folder of a training job")
    print(write_report(folder))
    if png is not None:
        print(write_curves_png(folder, png))


@app.command(name="wandb-view")
def wandb_view(
    project: Annotated[str, typer.Argument(metavar="ENTITY/PROJECT", help="Project on Weights & Biases.")],
) -> None:
    """Save the panels of report.html as a view of a Weights & Biases project; docs/dashboards.md."""
    from megatron_rc.report.wandb_layout import save_wandb_view

    print(save_wandb_view(project))


@app.command()
def doctor(
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="-- FLAGS", help="Flags of the --host, after --.")
    ] = None,
    sglang: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="An SGLang server or sglang-router; may be repeated.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML of the job; names the servers, too.")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a field of the YAML; repeatable.")
    ] = None,
    hf_path: Annotated[str | None, typer.Option(help="Directory of the trained model, instead of the YAML's.")] = None,
    host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"Codebase to be patched: {HOSTS}, or auto.")
    ] = None,
    flags_file: Annotated[
        Path | None, typer.Option(help="File with the --host's flags, or the script that starts it.")
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Also let servers and trainer score the same tokens: minutes of a server.")
    ] = False,
    syncs: Annotated[
        int,
        typer.Option(min=0, help="With --probe: send the trainer's weights so often, unchanged; the gap must stay."),
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print every finding as JSON.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for one answer.")] = 60.0,
) -> None:
    """Compare live rollout servers with the trainer, and codebases with what patch knows: every known trap and its fix.

    Servers: --sglang URL or --config. Codebases: --host NAME, then -- and the flags of its script; with neither, this
    Python and every codebase that is known. Nothing of a codebase is imported.

    Exit status: 0 nothing wrong (warnings allowed), 1 errors found, 2 a server or a setting could not be read.
    """
    from rich.console import Console

    from megatron_rc.doctor import display
    from megatron_rc.doctor.host.environment import examine_hosts
    from megatron_rc.doctor.registry import Finding, worst

    asks_servers = bool(sglang or config or hf_path or probe or syncs)
    found: dict[str, list[Finding]] = {}
    if asks_servers:
        with versions.needed_by("megatron-rc doctor with --sglang, --config or --hf-path"):
            from megatron_rc.doctor.server.examine import examine_servers

            found = examine_servers(sglang, config, hf_path, timeout, assignments or (), probe=probe, syncs=syncs)
    if host or flags or flags_file or not asks_servers:
        found |= examine_hosts(host or (), flags or (), flags_file)
    if as_json:
        print(display.to_json(found))
    else:
        console = Console(highlight=False)
        for subject, findings in found.items():
            display.show(subject, findings, console=console)
    if any(worst(findings) == "error" for findings in found.values()):
        raise typer.Exit(1)
