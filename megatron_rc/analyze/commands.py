"""The commands `megatron-rc analyze`, `megatron-rc demo` and `megatron-rc explain`."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from megatron_rc.exit_status import ExitStatus

CODES = "Codes such as RC203, between commas."
PAGE_LINE = "Pictures and all numbers, for a browser: {}"
"""The last line of a report."""
DEMO = Path(__file__).with_name("demo")
"""A sick and a healthy dump; their README says what they are."""


def rule_codes() -> list[str]:
    """For completion: the codes of all rules, without an import of any."""
    return sorted(page.stem.upper() for page in Path(__file__).with_name("rules").glob("rc*.md"))


def _hosts() -> list[str]:
    from megatron_rc.analyze.rules.rule import HOSTS

    return [*HOSTS]


def _formats() -> list[str]:
    from megatron_rc.analyze.readers import FORMATS

    return [*FORMATS]


def analyze(
    dump: Annotated[Path, typer.Argument(help="Dump of rollouts: a file, or a folder of them.")],
    after: Annotated[
        Path | None, typer.Argument(help="A second dump: say what got worse from the first to it; writes no page.")
    ] = None,
    dump_format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAME",
            help="Format of the dump, where its content is ambiguous.",
            autocompletion=_formats,
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print every number as JSON.")] = False,
    require: Annotated[
        str, typer.Option(metavar="CONDITIONS", help="Fail unless they hold, such as 'k3<1e-3, RC2=none'.")
    ] = "",
    require_format: Annotated[
        Literal["text", "junit", "github"], typer.Option(help="How the outcome of --require is printed.")
    ] = "text",
    select: Annotated[
        str, typer.Option(metavar="CODES", help=f"The only rules to judge. {CODES}", autocompletion=rule_codes)
    ] = "",
    ignore: Annotated[
        str, typer.Option(metavar="CODES", help=f"Rules to leave out. {CODES}", autocompletion=rule_codes)
    ] = "",
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN=VALUE", help="Judge these responses alone, such as task=code; repeatable."),
    ] = None,
    precision: Annotated[
        str, typer.Option(metavar="NAME", help="Coarser precision of the two sides: fp32, bf16, fp16, int8, fp8, int4.")
    ] = "",
    model_kind: Annotated[str, typer.Option(metavar="KIND", help="dense, or moe for a mixture of experts.")] = "",
    floor: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Noise floor of your servers, from doctor --probe --floor FILE.")
    ] = None,
    accepted: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Findings that you accept. [default: .megatron-rc.toml, if it is here]"),
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Output of an earlier --json: only other findings count.")
    ] = None,
    rule: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="A check of yours, run: Python with check(evidence) that returns text or None."
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A tokenizer.json, or its folder: shows the worst tokens as text."),
    ] = None,
    host: Annotated[
        str,
        typer.Option(metavar="NAME", help="Print the fixes for this codebase, such as verl.", autocompletion=_hosts),
    ] = "",
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

    Exit status: 0 analyzed, 4 a condition of --require does not hold or the second dump is worse, 2 the dump or an
    option could not be read.
    """
    from rich.console import Console

    from megatron_rc.analyze import conditions, output, own_rule, terminal, token_text
    from megatron_rc.analyze.accepted import FILE, read_accepted
    from megatron_rc.analyze.comparison import compare
    from megatron_rc.analyze.diagnosis import Diagnosis, diagnose_dump
    from megatron_rc.analyze.known import Known, read_floor
    from megatron_rc.analyze.pages import html as pages
    from megatron_rc.analyze.part import read_part
    from megatron_rc.analyze.rules import check_code
    from megatron_rc.drawing.frame import without_folder

    # what is wrong with an option is said before a large dump is read
    if not no_html:
        pages.refuse_foreign(html)
    host = terminal.host_named(host)
    file = accepted or (FILE if FILE.is_file() else None)
    agreed = () if file is None else read_accepted(file)
    agreed += () if baseline is None else output.read_baseline(baseline)
    if tokenizer is not None and share:
        raise ValueError("--tokenizer shows text, which --share leaves out; give one of them")
    decode = None if tokenizer is None else token_text.read_tokenizer(tokenizer)
    checks = [(path.name, own_rule.read_check(path)) for path in rule or ()]
    known = Known(precision, model_kind, None if floor is None else read_floor(floor), agreed)
    required = conditions.read(require) if require else []
    selected, ignored = _codes(select), _codes(ignore)
    for code in (*selected, *ignored, *(each.code for each in agreed)):
        check_code(code)
    shown = Console(highlight=False)
    part, named = read_part(only or ()), dump_format or None
    analyzed = partial(diagnose_dump, format=named, select=selected, ignore=ignored, known=known, only=part)

    def diagnosed(path: Path) -> Diagnosis:
        with _progress_bar(path) as progress:
            return analyzed(path, progress=progress)

    if after is not None:
        alone = {"require": require, "rc": rc, "what-if": what_if, "host": host, "rule": rule, "tokenizer": tokenizer}
        for option, value in alone.items():
            if value:
                raise ValueError(f"--{option} goes with one dump; with two dumps what got worse is the answer")
        found = compare(diagnosed(dump), diagnosed(after))
        if as_json:
            print(output.as_json(found.to_dict(share=share)))
        else:
            found.show(shown, share=share)
        if found.worse:
            raise typer.Exit(ExitStatus.WRONG)
        return
    diagnosis = diagnosed(dump)
    if decode and not diagnosis.evidence.has("token_id"):
        raise ValueError("--tokenizer needs the column token_id, which the dump does not have")
    if as_json:
        print(output.to_json(diagnosis, share=share, what_if=what_if is not False))
    elif require_format == "text":
        terminal.show(diagnosis, console=shown, host=host, share=share)
        if what_if:
            terminal.show_what_if(diagnosis, console=shown)
        if decode:
            terminal.show_tokens(diagnosis.evidence, decode, console=shown)
    outcomes = [condition.check(diagnosis, share=share) for condition in required]
    outcomes += [own_rule.outcome(*named, diagnosis.evidence, share=share) for named in checks]
    if outcomes and require_format == "junit":
        print(output.junit(outcomes))
    elif outcomes and require_format == "github":
        print(output.github(outcomes), end="")
    elif not as_json:
        terminal.show_outcomes(outcomes, console=shown)
    if rc is not None:
        diagnosis.recommendation.write(rc)
    if not no_html:
        options = {"format": dump_format, "select": select, "ignore": ignore, "host": host}
        given = [f"--{name} {value}" for name, value in options.items() if value]
        given += [f"--only {each}" for each in only or () if not share]
        given += ["--what-if"] * bool(what_if) + ["--share"] * share
        command = " ".join(["megatron-rc analyze", "DUMP" if share else without_folder(str(dump)), *given])
        path = pages.write(diagnosis, html, share=share, what_if=bool(what_if), decode=decode, command=command)
        # the program that reads JSON or annotations finds nothing else on standard output
        print(PAGE_LINE.format(path), file=sys.stderr if as_json or require_format != "text" else sys.stdout)
    if not all(outcome.holds for outcome in outcomes):
        raise typer.Exit(ExitStatus.WRONG)


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


def demo() -> None:
    """Analyze a sick and a healthy dump that come with this package, and say what to try next; writes no file."""
    from rich.console import Console

    from megatron_rc.analyze import terminal
    from megatron_rc.analyze.diagnosis import diagnose_dump

    console = Console(highlight=False)
    for name in ("sick", "healthy"):
        terminal.show(replace(diagnose_dump(DEMO / f"{name}.parquet"), source=f"The {name} dump"), console=console)
        console.print()
    following = {
        "megatron-rc explain RC102": "what is wrong with the sick dump, what else looks like it, and the fixes",
        f"megatron-rc analyze {DEMO / 'sick.parquet'}": "the same report, and a page with pictures",
        "megatron-rc analyze YOUR_DUMP": f"a file or folder of yours: {', '.join(_formats())}",
    }
    print("Try next:", *(f"  {command}\n      {why}" for command, why in following.items()), sep="\n")


def explain(
    code: Annotated[
        str | None, typer.Argument(help="Code of a rule, such as RC203; none lists them.", autocompletion=rule_codes)
    ] = None,
) -> None:
    """Print the page of a rule: what it means, how it is decided, what else looks like it, and the fixes."""
    from rich.console import Console
    from rich.markdown import Markdown

    from megatron_rc.analyze.rules import check_code
    from megatron_rc.analyze.rules.rule import Page

    if code is None:
        print(*(f"{known}  {Page(known).title}" for known in rule_codes()), sep="\n")
        return
    check_code(code.upper())
    console, text = Console(highlight=False), Page(code.upper()).text
    if console.is_terminal:
        console.print(Markdown(text))
    else:
        # rich would break the lines of a file at 80 columns
        print(text, end="")
