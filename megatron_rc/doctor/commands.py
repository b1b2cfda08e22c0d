"""The command `megatron-rc doctor`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from megatron_rc.exit_status import ExitStatus
from megatron_rc.versions import needed_by

HOSTS = ("megatron-lm", "megatron-training", "slime", "miles", "verl", "nemo-rl", "ms-swift")
"""The names in integrations.hosts, which --help need not import; a test compares both."""
SHOWN = ", ".join(HOSTS)


def known_hosts() -> list[str]:
    """For completion: what names a codebase."""
    return [*HOSTS, "auto"]


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
        list[str] | None,
        typer.Option(metavar="NAME", help=f"Codebase to be patched: {SHOWN}, or auto.", autocompletion=known_hosts),
    ] = None,
    flags_file: Annotated[
        Path | None, typer.Option(help="File with the --host's flags, or the script that starts it.")
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Also let servers and trainer score the same tokens: minutes of a server.")
    ] = False,
    syncs: Annotated[
        int,
        typer.Option(min=0, help="With --probe: send unchanged weights N times; the gap must not change."),
    ] = 0,
    floor: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --probe: write the noise floor for analyze --floor FILE.")
    ] = None,
    show_passed: Annotated[
        bool, typer.Option("--all", help="Also print each check that passed, as --probe does.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print every finding as JSON.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for one answer.")] = 60.0,
) -> None:
    """Compare live rollout servers with the trainer, and codebases with what patch knows: every known trap and its fix.

    Servers: --sglang URL or --config. Codebases: --host NAME, then -- and the flags of its script; with neither, this
    Python and every codebase that is known. Nothing of a codebase is imported.

    Exit status: 0 nothing wrong (warnings allowed), 4 errors found, 2 a server or a setting could not be read.
    """
    from rich.console import Console

    from megatron_rc.doctor import display
    from megatron_rc.doctor.host.checks import examine_hosts
    from megatron_rc.doctor.registry import Finding, worst

    if floor and (not probe or floor.is_dir() or not floor.parent.is_dir()):
        raise ValueError(f"--floor: needs --probe, and a file in a folder that exists, got {floor}")
    asks_servers = bool(sglang or config or hf_path or probe or syncs)
    found: dict[str, list[Finding]] = {}
    if asks_servers:
        with needed_by("megatron-rc doctor with --sglang, --config or --hf-path"):
            from megatron_rc.doctor.server.examine import examine_servers
            from megatron_rc.doctor.server.floor import Floors

            asked, floors = (sglang, config, hf_path, timeout, assignments or ()), Floors()
            found = examine_servers(*asked, probe=probe, syncs=syncs, floors=floors if floor else None)
    if host or flags or flags_file or not asks_servers:
        found |= examine_hosts(host or (), flags or (), flags_file)
    if as_json:
        print(display.to_json(found))
    else:
        display.show_all(found, console=Console(highlight=False), passed=show_passed or probe)
    if floor:
        print(floors.write(floor), file=sys.stderr if as_json else sys.stdout)
    if any(worst(findings) == "error" for findings in found.values()):
        raise typer.Exit(ExitStatus.WRONG)
