"""The verdict of the collapse lab: rows of finished runs, docs/collapse.md, its evidence, and what is left to run.

    bash launch/collapse_lab.sh                                      # the runs, stage by stage
    python benchmarks/collapse/verdict.py --read runs/collapse/clip  # their rows into benchmarks/collapse/runs.csv
    python benchmarks/collapse/verdict.py --plan                     # runs without a row, hours, power
    python benchmarks/collapse/verdict.py --left runs/left           # recipes of these runs
    python benchmarks/collapse/verdict.py --docs                     # both pages and their figures

The recipe of a folder is the one of its name in launch/recipes/collapse, unless --recipe names another.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folders of benchmarks/ are packages

from collapse import plan
from collapse.rows import add, load

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "launch/recipes/collapse"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--read", type=Path, nargs="+", metavar="FOLDER", default=[], help="output folders of grids")
    parser.add_argument("--recipe", type=Path, metavar="FILE", help="of all these folders")
    parser.add_argument("--plan", action="store_true", help="print the planned runs that have no row")
    parser.add_argument("--left", type=Path, metavar="FOLDER", help="write their recipes there and name them")
    parser.add_argument("--docs", action="store_true", help="write the pages and draw their figures")
    options = parser.parse_args()
    for folder in options.read:
        from collapse.reading import read

        rows = list(read(options.recipe or RECIPES / f"{folder.name}.yaml", folder))
        print(f"{len(rows)} runs of {folder}; {add(rows)} rows in all")
    if options.plan:
        print(plan.table_of(load(), RECIPES))
    if options.left:
        print(*plan.write_left(load(), RECIPES, options.left), sep="\n")
    if options.docs:
        from collapse import figures, page

        page.write(load(), ROOT / "docs")
        figures.draw(load(), ROOT / "docs/images")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(str(error))
