"""The verdict of the collapse lab: rows of finished runs, checks, figures and docs/collapse.md.

    bash launch/collapse_lab.sh                                           # the runs, stage by stage
    python benchmarks/collapse/verdict.py --read runs/collapse/mechanism  # their rows into results/
    python benchmarks/collapse/verdict.py                                 # claims and answers, from the committed rows
    python benchmarks/collapse/verdict.py --left runs/left                # recipes of the planned runs that are left
    python benchmarks/collapse/verdict.py --docs                          # docs/collapse.md and docs/images/collapse

The recipe of a folder is the one of its name in launch/recipes/collapse, unless --recipe names another. Reading
replaces the rows of the runs that it reads, and leaves all others; a run of two stages has one row.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folders of benchmarks/ are packages

from collapse import checks, page
from collapse.claims import CLAIMS
from collapse.plan import write_left
from collapse.rows import Row, keep, path_of
from collapse.rules import answers, verdict
from collapse.runs import load

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "launch/recipes/collapse"


def read(folder: Path, recipe: Path | None) -> None:
    """Write the rows and curves of the finished runs in the folder of a grid."""
    from collapse.reading import read

    recipe = recipe or RECIPES / f"{folder.name}.yaml"
    for stage, runs in keep(*read(recipe, folder)).items():
        print(f"{runs} runs of {folder} in {path_of(Row, stage).relative_to(ROOT)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--read", type=Path, nargs="+", metavar="FOLDER", default=[], help="output folders of grids")
    parser.add_argument("--recipe", type=Path, metavar="FILE", help="of all these folders")
    parser.add_argument("--left", type=Path, metavar="FOLDER", help="write them there, name them, and do nothing else")
    parser.add_argument("--docs", action="store_true", help="write the page and draw its figures")
    options = parser.parse_args()
    for folder in options.read:
        read(folder, options.recipe)
    results = load(recipes=RECIPES)
    if options.left:
        print(*write_left(results.committed, RECIPES, options.left), sep="\n")
        return
    for claim in CLAIMS:
        given = answers(claim, results)
        print(f"({claim.letter}) {claim.claim} {verdict(claim, given).upper()}")
        print("".join(f"    {each.answer}: {each.question}: {each.why}\n" for each in given), end="")
    for problem in (*checks.failing_exact_runs(results), *checks.falls_with_strength(results)):
        print(f"CHECK: {problem}")
    if options.docs:
        page.write(results, ROOT / "docs")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(str(error))
