"""Line and branch coverage of every file of the package, with the code that runs in child processes.

    pip install coverage                                        # is in no extra: only these commands need it
    python tests/support/coverage_table.py run DATA             # the whole suite, plain and interpreted
    python tests/support/coverage_table.py table DATA tests/support/coverage.csv
    python tests/support/coverage_table.py compare OLD.csv NEW.csv --renamed OLD=NEW --gone FILE

`run` leaves in DATA what each test covered (contexts named after tests and shared fixtures), how long it took, and what
pytest printed; arguments for pytest go behind DATA and --. Before the first `table`, another `run` adds to DATA.
`compare` fails when a file lost more than half a point.
"""

import argparse
import contextlib
import csv
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
AREAS = ["megatron_rc", "triton_kernels"]
TOLERANCE = 0.5
"""Points of coverage that a file may lose."""
HOOK = (
    "import os, sys; m, *p = os.environ.get('EVERY_PROCESS', '').split(os.pathsep); "
    "m and (sys.path.extend(set(p) - set(sys.path)), __import__(m).start())\n"
)
"""Line of a .pth file."""


@contextlib.contextmanager
def every_process(module: str, folders: list[str], **variables: str) -> Iterator[dict[str, str]]:
    """The environment in which every Python of this interpreter calls ``module.start()``, whatever started it."""
    hook = Path(sysconfig.get_path("purelib")) / f"every_process_{os.getpid()}.pth"
    hook.write_text(HOOK)
    variables |= {"EVERY_PROCESS": os.pathsep.join([module, *folders]), "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}
    try:
        yield {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    finally:
        hook.unlink()


def start() -> None:
    """Measure this process and all that are forked from it, for the test that runs now in the pytest above them."""
    import coverage

    def take_context() -> None:
        path = Path(os.environ.get("COVERAGE_TABLE_CONTEXT", os.devnull))
        cov.switch_context(path.read_text() if path.exists() else "")

    cov = coverage.Coverage(config_file=os.environ["COVERAGE_TABLE_CONFIG"], auto_data=True)
    cov.start()
    take_context()
    os.register_at_fork(after_in_child=take_context)


def run(data: Path, arguments: list[str]) -> None:
    """Run the suite in both modes, two processes each, measured; what pytest printed goes to DATA/pytest-MODE.txt."""
    import coverage

    data = data.resolve()
    (data / "parts").mkdir(parents=True, exist_ok=True)
    config = data / "coveragerc"
    include = ", ".join(f"{ROOT / area}/*" for area in AREAS)
    config.write_text(
        f"[run]\nbranch = true\nparallel = true\ndata_file = {data}/parts/c\ninclude = {include}\n"
        "patch = _exit\nsigterm = true\ndisable_warnings = no-data-collected\n"
    )
    folders = [str(Path(__file__).resolve().parent), str(Path(coverage.__file__).parents[1])]
    variables = {"COVERAGE_TABLE_CONFIG": str(config), "COVERAGE_TABLE_DATA": str(data)}
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-p", "coverage_contexts"]
    # the tests share the cores with the measuring
    command += ["-vv", "--durations=0", "-o", "timeout=1500", *arguments]
    with every_process("coverage_table", folders, **variables) as environment:
        for mode in ("plain", "interpreted"):
            more = {"TRITON_INTERPRET": "1"} if mode == "interpreted" else {}
            with open(data / f"pytest-{mode}.txt", "w") as log:
                done = subprocess.run(command, cwd=ROOT, env=environment | more, stdout=log, stderr=log)
            print(f"{mode}: pytest answered {done.returncode}; see {log.name}", flush=True)


def table(data: Path, out: Path) -> None:
    """Combine what every process measured, and write a row per file."""
    import coverage

    cov = coverage.Coverage(data_file=str(data / "combined"), config_file=str(data / "coveragerc"))
    if not (data / "combined").exists():
        cov.combine([str(part) for part in sorted((data / "parts").iterdir())], keep=True)
        cov.save()
    cov.load()
    names = subprocess.check_output(["git", "ls-files", "--", *AREAS], cwd=ROOT, text=True).split()
    paths = [ROOT / name for name in names if name.endswith(".py")]
    cov.get_data().touch_files([str(path) for path in paths])
    with open(out, "w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["file", "lines", "lines_covered", "branches", "branches_covered"])
        for path in paths:
            n = cov._analyze(str(path)).numbers
            row: list[object] = [path.relative_to(ROOT)]
            for covered, count in ((n.n_executed, n.n_statements), (n.n_executed_branches, n.n_branches)):
                row += [count, f"{100 * covered / count if count else 100:.2f}"]
            rows.writerow(row)


def compare(old: Path, new: Path, renamed: list[str], gone: list[str]) -> int:
    """Print every file that lost coverage, or went without a word; 1 if there is any. A=C, B=C: both merged into C."""
    before, after = [list(csv.DictReader(path.read_text().splitlines())) for path in (old, new)]
    target = dict(pair.split("=") for pair in renamed)
    complaints = []
    for name in sorted({target.get(row["file"], row["file"]) for row in before} - set(gone)):
        were = [row for row in before if target.get(row["file"], row["file"]) == name]
        now = [row for row in after if row["file"] == name]
        for what in ("lines", "branches"):
            counts = [sum(int(row[what]) for row in rows) for rows in (were, now)]
            sums = [sum(int(row[what]) * float(row[f"{what}_covered"]) for row in rows) for rows in (were, now)]
            was, became = [total / count if count else 100.0 for total, count in zip(sums, counts, strict=True)]
            if not now or became < was - TOLERANCE:
                end = f"{became:.2f} % of {counts[1]}" if now else "MISSING (--renamed or --gone says where it went)"
                complaints.append(f"{name}: {what} covered {was:.2f} % of {counts[0]} -> {end}")
    print("\n".join([*complaints, f"{len(before)} files before, {len(after)} after, {len(complaints)} complaints"]))
    return int(bool(complaints))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, paths in {"run": ["data"], "table": ["data", "out"], "compare": ["old", "new"]}.items():
        command = commands.add_parser(name)
        for path in paths:
            command.add_argument(path, type=Path)
    commands.choices["run"].add_argument("arguments", nargs="*", help="for pytest, after --")
    commands.choices["compare"].add_argument("--renamed", action="append", default=[], metavar="OLD=NEW")
    commands.choices["compare"].add_argument("--gone", action="append", default=[], metavar="FILE")
    arguments = vars(parser.parse_args())
    return {"run": run, "table": table, "compare": compare}[arguments.pop("command")](**arguments) or 0


if __name__ == "__main__":
    sys.exit(main())
