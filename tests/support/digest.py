"""Whether two checkouts compute the same numbers, bit by bit, on this machine and in one run.

    python tests/support/digest.py --tree BEFORE --tree AFTER [--quickstart] [--except 'area/case*'] ...

Both run under the interpreter that runs this file, with its torch, triton and megatron-core. Every difference is
printed with its name and size, then a table of the areas; the status is 1 if a difference is not excepted. It takes
eight minutes of processor time, half of that on two quiet cores, and two more with --quickstart.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent))
from digest_tree import Results, Value

BACKENDS = ("torch", "triton")
STEPS = 10
"""Steps of every run of the quickstart."""
TIMED = ("time/", "tokens_per_second")
"""Beginnings of the names of metrics that differ from run to run."""


def child(tree: Path, command: Sequence[str | Path], **environment: str) -> None:
    """Run a program with the package of a checkout, whose root stays off sys.path: triton_kernels must not be found."""
    with tempfile.TemporaryDirectory() as site:
        (Path(site) / "megatron_rc").symlink_to(tree / "megatron_rc")
        path = os.pathsep.join([site, str(tree / "tests/support"), str(Path(__file__).parents[2] / "benchmarks")])
        fixed = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        subprocess.run([sys.executable, *command], check=True, cwd=site, env=inherited | fixed | environment)


def results_of(part: str, tree: Path, folder: Path, only: Sequence[str]) -> dict[str, Value]:
    """The results of one checkout with one backend, or of its quickstart."""
    folder.mkdir(parents=True)
    if part == "quickstart":
        return quickstart(tree, folder)
    file, backend = folder / "results.json", part
    mode = {"TRITON_INTERPRET": "1"} if backend == "triton" else {}
    child(tree, [Path(__file__).with_name("digest_cases.py"), backend, file, *only], **mode)
    written = json.loads(file.read_text())
    if not Path(written["package"]).is_relative_to(tree):
        raise RuntimeError(f"the package that was asked is {written['package']}, not that of {tree}")
    return {
        f"{backend}/{name}": (dtype, tuple(shape), data) for name, (dtype, shape, data) in written["results"].items()
    }


def quickstart(tree: Path, folder: Path) -> dict[str, Value]:
    """The metric rows of a short quickstart: warm-up and three runs, seed 1, without what is a matter of time."""
    recipe, out = tree / "launch/recipes/quickstart.yaml", Results()
    command = ["-m", "megatron_rc", "grid", recipe, "--seeds", "1", "--output", folder, "--set", f"train.steps={STEPS}"]
    child(tree, [*command, "--workers", "2"])
    for file in sorted(folder.glob("*/seed-1/metrics.jsonl")):
        for line in file.read_text().splitlines():
            row = {name: value for name, value in json.loads(line).items() if not name.startswith(TIMED)}
            out.add(f"quickstart/{file.parts[-3]}/{row.pop('step')}", row)
    return dict(out)


def magnitudes(a: Value, b: Value) -> str:
    """How far two results of one name are apart."""
    if a[:2] != b[:2] or a[0] == "text":
        return " against ".join(data if dtype == "text" else f"{dtype} {[*shape]}" for dtype, shape, data in (a, b))
    kind = getattr(torch, a[0])
    x, y = (torch.frombuffer(bytearray.fromhex(data), dtype=kind) for _, _, data in (a, b))
    word = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[kind.itemsize]
    words = [*zip(x.view(word).tolist(), y.view(word).tolist(), strict=True)]
    apart = torch.tensor([i != j for i, j in words])
    gap = (x[apart].double() - y[apart].double()).abs()
    relative = gap / x[apart].double().abs()
    text = f"{len(gap)} of {len(x)} differ, max abs {gap.max():.3g}, max rel {relative.max():.3g}"
    if not kind.is_floating_point:
        return text
    lowest = -(2 ** (8 * kind.itemsize - 1))
    # words in the order of the numbers that they stand for
    ordered = [[i if i >= 0 else lowest - i for i in pair] for pair in words]
    return f"{text}, max ulp {max(abs(i - j) for i, j in ordered)}"


def differences(a: Mapping[str, Value], b: Mapping[str, Value]) -> Iterator[tuple[str, str]]:
    """(name, what differs) of every result that is not the same in both, and of every error."""
    for name in dict.fromkeys([*a, *b]):
        if name not in a or name not in b:
            yield name, f"only in the {'second' if name not in a else 'first'} tree"
        elif a[name] != b[name]:
            yield name, magnitudes(a[name], b[name])
        elif name.endswith("/error"):
            yield name, f"both raise {a[name][2]}"


def compare(a: Mapping[str, Value], b: Mapping[str, Value], excepted: Sequence[str] = ()) -> int:
    """Print every difference and a table of the areas; the exit status."""
    found = dict(differences(a, b))
    allowed = {name for name in found if any(fnmatchcase(name, glob) for glob in excepted)}
    for name, what in found.items():
        print(f"{'excepted' if name in allowed else 'DIFFERS'} {name}: {what}")
    areas = {name: name.rsplit("/", name.count("/") - 1)[0] for name in {**a, **b}}
    print(f"{'area':24}", *(f"{word:>10}" for word in ("results", "equal", "refused", "excepted", "different")))
    for row in [*sorted(set(areas.values())), "all"]:
        names = [name for name, area in areas.items() if row in (area, "all")]
        different = sum(name in found for name in names)
        refused, exceptions = sum(name.endswith("/refused") for name in names), sum(name in allowed for name in names)
        numbers = (len(names), len(names) - different, refused, exceptions, different - exceptions)
        print(f"{row:24}", *(f"{number:10}" for number in numbers))
    return int(found.keys() != allowed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, action="append", required=True, help="a checkout; given twice")
    parser.add_argument("--quickstart", action="store_true", help="also train the three runs of the quickstart")
    parser.add_argument(
        "--only", action="append", default=[], metavar="AREA", help="such as presets; the lines of progress name all"
    )
    ignored = "names whose differences are only printed"
    parser.add_argument("--except", dest="globs", action="append", default=[], metavar="GLOB", help=ignored)
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    options = parser.parse_args()
    if len(options.tree) != 2:
        parser.error("give --tree twice")
    trees = [tree.resolve() for tree in options.tree]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        parts = [*BACKENDS, *["quickstart"] * options.quickstart]
        folders = {(part, side): Path(scratch, part, str(side)) for part in parts for side in (0, 1)}
        started = [
            pool.submit(results_of, part, trees[side], folder, options.only) for (part, side), folder in folders.items()
        ]
        sides: tuple[dict[str, Value], dict[str, Value]] = ({}, {})
        for (_, side), future in zip(folders, started, strict=True):
            sides[side].update(future.result())
    return compare(*sides, options.globs)


if __name__ == "__main__":
    sys.exit(main())
