"""The help of the command line loads nothing that only the work of a verb needs, and takes as long as typer does."""

import os
import statistics
import subprocess
import sys
import time

import pytest
import typer

from megatron_rc.cli import app

VERBS = list(typer.main.get_command(app).commands)
ENVIRONMENT = os.environ | {"PYTHONSAFEPATH": "1"}
BARE = f"""
import typer
app = typer.Typer(help="A bare application.", no_args_is_help=True, add_completion=False)
for number in range({len(VERBS)}):
    @app.command(f"verb{{number}}")
    def verb(count: int = 1) -> None:
        "A verb."
app()
"""


# typer itself imports pydantic before it runs a verb, if only for its help
@pytest.mark.parametrize(
    ("calls", "heavy"), [([["--help"]], {"pydantic"}), ([[verb, "--help"] for verb in VERBS], set[str]())]
)
def test_help_imports_neither_torch_nor_readers_nor_settings(calls: list[list[str]], heavy: set[str]) -> None:
    code = (
        "import sys; from megatron_rc.cli import app\n"
        f"for words in {calls}:\n"
        "    try:\n        app(words)\n    except SystemExit as stopped:\n        assert not stopped.code\n"
        f"found = {{'numpy', 'pyarrow', 'torch', 'yaml', 'megatron_rc.settings', *{heavy}}} & sys.modules.keys()\n"
        "assert not found, found\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0 and len(VERBS) > 12, done.stderr


@pytest.mark.full
def test_help_takes_at_most_half_as_long_again_as_a_bare_application_with_as_many_verbs() -> None:
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for bare in [True, False] * 9:
        command = [sys.executable, *(["-c", BARE] if bare else ["-m", "megatron_rc"]), "--help"]
        start = time.perf_counter()
        subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, check=True)
        seconds[bare].append(time.perf_counter() - start)
    ours, theirs = (statistics.median(seconds[bare]) for bare in (False, True))
    print(f"megatron-rc --help {ours:.3f} s, a bare application {theirs:.3f} s: {ours / theirs:.2f} times as long")
    assert ours <= 1.5 * theirs
