"""What the command line promises: statuses, version, completion, a demo, and a help that loads nothing heavy."""

import ast
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from refusals import run
from typer.testing import CliRunner

from megatron_rc import __version__, versions
from megatron_rc.analyze import commands
from megatron_rc.cli import app
from megatron_rc.correction.settings import PRESETS
from megatron_rc.exit_status import ExitStatus

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-m", "megatron_rc"]
ENVIRONMENT = os.environ | {"PYTHONSAFEPATH": "1", "COLUMNS": "200"}
HELP = {verb: CliRunner().invoke(app, [*verb.split(), "--help"], env={"COLUMNS": "200"}).output
        for verb in ("", *typer.main.get_command(app).commands)}  # type: ignore[attr-defined] # fmt: skip


def test_the_statuses_are_those_of_help_and_of_the_page() -> None:
    shown = {int(n): " ".join(text.split()) for n, text in re.findall(r"^ (\d+)  (\S.*)$", HELP[""], re.MULTILINE)}
    assert shown == {status.value: status.meaning for status in ExitStatus}
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", (ROOT / "docs/command_line.md").read_text(), re.MULTILINE)
    assert [(int(number), meaning) for number, meaning in rows] == [(one.value, one.meaning) for one in ExitStatus]


@pytest.mark.parametrize("words", ["--help", "explain", "analyze DUMP --no-html --require k3<1e-9"])
def test_a_reader_that_leaves_is_told_from_a_condition_that_does_not_hold(words: str) -> None:
    arguments = [str(commands.DEMO / "sick.parquet") if word == "DUMP" else word for word in words.split()]
    with subprocess.Popen(
        [*PROGRAM, *arguments], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as ended:
        assert ended.stdout is not None and ended.stderr is not None
        ended.stdout.close()
        said = ended.stderr.read()
    assert (ended.returncode, said) == (ExitStatus.READER_LEFT, "")


def test_a_pipe_of_a_job_that_breaks_is_shown_and_ctrl_c_has_its_own_status() -> None:
    code = """if True:
        import os, signal, sys, typer
        from megatron_rc import cli
        @cli.app.command()
        def breaks(): raise BrokenPipeError("a worker")
        @cli.app.command()
        def waits(): os.kill(os.getpid(), signal.SIGINT)
        # a shell that starts this test in the background has ignored it
        signal.signal(signal.SIGINT, signal.default_int_handler)
        cli.main()"""
    ended = {
        verb: subprocess.run([sys.executable, "-c", code, verb], env=ENVIRONMENT, capture_output=True, text=True)
        for verb in ("breaks", "waits")
    }
    assert ended["breaks"].returncode == ExitStatus.DEFECT and "BrokenPipeError: a worker" in ended["breaks"].stderr
    assert ended["waits"].returncode == ExitStatus.INTERRUPTED == 128 + signal.SIGINT


def test_the_version_is_printed() -> None:
    assert run("--version") == (0, f"megatron-rc {__version__}\n", "")


@pytest.mark.parametrize("verb", HELP)
def test_help_shows_no_type_for_a_flag_and_names_no_file_that_a_wheel_lacks(verb: str) -> None:
    assert "<bool>" not in HELP[verb] and "Show this message and exit" in HELP[verb]
    assert not re.search(r"\b(docs|examples|benchmarks)/", HELP[verb])


def test_no_sentence_of_the_package_names_a_page_that_a_wheel_lacks() -> None:
    """Docstrings may, and arguments of `link`, which are pages that exist."""
    linked = 0
    for path in (ROOT / "megatron_rc").rglob("*.py"):
        text = path.read_text()
        nodes = [*ast.walk(ast.parse(text))] if "docs/" in text else []
        documenting = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        linking = {id(call.args[0]) for call in calls if ast.unparse(call.func) in ("link", "versions.link")}
        for node in nodes:
            if isinstance(node, ast.Constant) and re.search(r"\bdocs/\w", str(node.value)):
                linked += id(node) in linking
                assert id(node) in documenting | linking, (path.name, node.value)
                assert id(node) not in linking or (ROOT / str(node.value).partition("#")[0]).is_file(), node.value
    assert linked >= 4


def test_links_appear_with_the_address_of_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions.link("docs/launch.md") == "" and "in a checkout of megatron-rc" in versions.installing("train")
    monkeypatch.setattr(versions, "REPOSITORY", "https://example.org/a/b")
    assert versions.link("docs/launch.md") == " (https://example.org/a/b/blob/main/docs/launch.md)"
    assert "in a checkout of https://example.org/a/b" in versions.installing("train")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("patch --rc-preset ", {*PRESETS}),
        ("doctor --host me", {"megatron-lm", "megatron-training"}),
        ("analyze --format nemo", {"nemo-rl"}),
        ("explain RC5", {"RC501", "RC502"}),
    ],
)
def test_names_complete(words: str, offered: set[str]) -> None:
    typed = f"megatron-rc {words}"
    asked = {"_MEGATRON_RC_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    assert {*CliRunner().invoke(app, [], prog_name="megatron-rc", env=asked).output.split()} == offered


def test_the_demo_analyzes_both_dumps_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, said, errors = run("demo")
    assert (status, errors, [*tmp_path.iterdir()]) == (0, "", [])
    sick, healthy, following = re.split(r"The healthy dump|Try next:", said)
    assert "BUG" in sick and "RC102" in sick and "NUMERICS: no sign of a bug" in healthy
    commands_shown = re.findall(r"megatron-rc (\w+) (\S+)", following)
    assert [verb for verb, _ in commands_shown] == ["explain", "analyze", "analyze"]
    assert run("explain", commands_shown[0][1]).status == 0 and Path(commands_shown[1][1]).is_file()


def test_explain_alone_lists_the_rules() -> None:
    listed = run("explain").stdout.splitlines()
    assert len(listed) >= 13 and "RC303  One server with other weights" in listed


@pytest.mark.parametrize("words", ["train a.yaml", "grid a.yaml", "launch a.yaml", "serve a-model"])
def test_a_system_that_is_not_linux_is_told_what_works(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    ended = run(*words.split())
    assert ended.is_refusal(f"megatron-rc {words.split()[0]} needs Linux; on this system analyze, demo,"), ended


VERBS = list(typer.main.get_command(app).commands)
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
