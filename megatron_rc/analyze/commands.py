"""The commands `megatron-rc analyze` and `megatron-rc explain`."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

CODES = "Codes such as RC203, between commas."


def analyze(
    dump: Annotated[Path, typer.Argument(help="Dump of rollouts: a file, or a folder of them; docs/analyze.md.")],
    dump_format: Annotated[
        str,
        typer.Option(
            "--format", metavar="NAME", help="Format of the dump, where its content is ambiguous; docs/formats.md."
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print every number as JSON.")] = False,
    require: Annotated[
        str, typer.Option(metavar="CONDITIONS", help="Fail unless they hold, such as 'k3<1e-3, RC2=none'.")
    ] = "",
    require_format: Annotated[
        Literal["text", "junit", "github"], typer.Option(help="How the outcome of --require is printed.")
    ] = "text",
    gate: Annotated[str, typer.Option(hidden=True)] = "",
    gate_format: Annotated[str, typer.Option(hidden=True)] = "",
    select: Annotated[str, typer.Option(metavar="CODES", help=f"The only rules to judge. {CODES}")] = "",
    ignore: Annotated[str, typer.Option(metavar="CODES", help=f"Rules to leave out. {CODES}")] = "",
    host: Annotated[str, typer.Option(help="Print the fixes for this codebase, such as verl.")] = "",
    html: Annotated[
        Path, typer.Option(metavar="FILE", help="The page with all pictures; offline, it loads nothing.")
    ] = Path("analysis.html"),
    no_html: Annotated[bool, typer.Option("--no-html", help="Write no page.")] = False,
    share: Annotated[
        bool, typer.Option("--share", help="Leave out ids, paths and names, to send it to others.")
    ] = False,
    what_if: Annotated[
        bool | None,
        typer.Option(
            "--what-if/--no-what-if",
            help="Show what each correction would do (needs torch), or leave it out of --json, too.",
        ),
    ] = None,
    rc: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the recommended correction as YAML for train and patch.")
    ] = None,
) -> None:
    """Say from a dump of rollouts whether the gap is a bug or numerics, whose it is, and what to do.

    Exit status: 0 analyzed, 1 a condition of --require does not hold, 2 the dump or an option could not be read.
    """
    if gate or gate_format:
        raise ValueError("--gate and --gate-format are called --require and --require-format; give these instead")
    from rich.console import Console

    from megatron_rc.analyze import conditions, output, terminal
    from megatron_rc.analyze.diagnosis import diagnose_dump
    from megatron_rc.analyze.pages import html as pages
    from megatron_rc.drawing.frame import without_folder

    if not no_html:
        pages.refuse_foreign(html)
    terminal.check_host(host)
    shown = Console(highlight=False)
    with _progress_bar(dump) as progress:
        diagnosis = diagnose_dump(
            dump, format=dump_format or None, select=_codes(select), ignore=_codes(ignore), progress=progress
        )
    if as_json:
        print(output.to_json(diagnosis, share=share, what_if=what_if is not False))
    elif require_format == "text":
        terminal.show(diagnosis, console=shown, host=host, share=share)
        if what_if:
            terminal.show_what_if(diagnosis, console=shown)
    outcomes = conditions.check(diagnosis, require) if require else []
    if require and require_format == "junit":
        print(output.junit(outcomes))
    elif require and require_format == "github":
        print(output.github(outcomes), end="")
    elif not as_json:
        terminal.show_outcomes(outcomes, console=shown)
    if rc is not None:
        diagnosis.recommendation.write(rc)
    if not no_html:
        options = {"format": dump_format, "select": select, "ignore": ignore, "host": host}
        given = [f"--{name} {value}" for name, value in options.items() if value]
        given += ["--what-if"] * bool(what_if) + ["--share"] * share
        command = " ".join(["megatron-rc analyze", "DUMP" if share else without_folder(str(dump)), *given])
        path = pages.write(diagnosis, html, share=share, what_if=bool(what_if), command=command)
        # the program that reads JSON or annotations finds nothing else on standard output
        print(path, file=sys.stderr if as_json or require_format != "text" else sys.stdout)
    if not all(outcome.holds for outcome in outcomes):
        raise typer.Exit(1)


def _codes(text: str) -> list[str]:
    return [code.strip().upper() for code in text.split(",") if code.strip()]


@contextmanager
def _progress_bar(dump: Path) -> Iterator[Callable[[int], None]]:
    """Yield a function that advances a bar on stderr by bytes read; without a terminal no bar is shown."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    size = sum(file.stat().st_size for file in dump.rglob("*") if file.is_file()) if dump.is_dir() else 0
    size = size or (dump.stat().st_size if dump.exists() else 0)
    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=size)
        yield partial(progress.advance, task)


def explain(code: Annotated[str, typer.Argument(help="Code of a rule, such as RC203.")]) -> None:
    """Print the page of a rule: what it means, how it is decided, what else looks like it, and the fixes."""
    from rich.console import Console
    from rich.markdown import Markdown

    from megatron_rc.analyze.rules import check_code
    from megatron_rc.analyze.rules.rule import Page

    check_code(code.upper())
    console, text = Console(highlight=False), Page(code.upper()).text
    if console.is_terminal:
        console.print(Markdown(text))
    else:
        # rich would break the lines of a file at 80 columns
        print(text, end="")
