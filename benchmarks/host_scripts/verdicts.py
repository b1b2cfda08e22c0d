"""What doctor says about the launch scripts that host codebases ship, against the truth that a reader wrote before.

    python benchmarks/host_scripts/verdicts.py TREES    # writes doctor's verdicts; exit status 1 where one is wrong

TREES holds a checkout of each host in a folder of its name. README.md says how the truth was read.
"""

import argparse
import csv
import hashlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron_rc.doctor.host.checks import flag_checks, read_hosts
from megatron_rc.doctor.host.flags import Flags
from megatron_rc.doctor.registry import Finding
from megatron_rc.integrations.hosts import HOSTS

TABLE = Path(__file__).with_name("verdicts.csv")
COLUMNS = ("host", "script", "sha256", "check", "line", "text", "truth", "written", "verdict")
SCRIPTS = {
    "verl": ("verl", ("**/*.sh",), r"python|torchrun"),
    "slime": ("slime", ("**/*.sh",), r"train(_async)?\.py"),
    "miles": ("miles", ("**/*.sh", "scripts/**/*.py", "examples/**/*.py"), r"train(_\w+)?\.py|execute_train"),
    "megatron-training": ("megatron_lm", ("examples/**/*.sh",), r"\.py\b"),
    "ms-swift": ("swift", ("**/*.sh",), r"megatron rlhf"),
    "nemo-rl": ("nemo_rl", ("examples/**/*.yaml",), ""),
}
"""Folder, patterns of files, and what a script that starts a program of the host contains."""
FRAGMENTS = re.compile(r"(scripts/models|examples/(rl|ft_launcher|configs/evals|modelopt/quant_configs))/|.*/prefetch_")
"""Files of flags that no command starts, and YAML files that train nothing."""
PROGRAMS = {
    "single.controller": "grpo_single_controller", "xtoken": "xtoken_off_policy_distillation",
    "distillation": "distillation", "^ppo": "ppo", "^dpo": "dpo", "^sft": "sft", "^rm": "rm", "": "grpo",
}  # fmt: skip
"""What the name of a YAML file of NeMo-RL matches, the first that does, and the program that reads the file."""


def scripts(trees: Path) -> Iterator[tuple[str, Path, str]]:
    """Each launch script: its host, its file, and its path in the tree."""
    for host, (folder, patterns, starts) in SCRIPTS.items():
        for path in sorted(path for pattern in patterns for path in (trees / folder).glob(pattern)):
            name = str(path.relative_to(trees / folder))
            text = path.read_text(encoding="utf-8")
            launches = path.suffix != ".py" or "execute_train" in text
            if launches and not FRAGMENTS.match(name) and re.search(starts, text):
                yield host, path, name


def findings(host: str, path: Path) -> dict[str, Finding]:
    """What doctor finds in the flags of a script, by check."""
    program = next(kind for part, kind in PROGRAMS.items() if re.search(part, path.name))
    words = [f"examples/run_{program}.py", "--config", str(path)]
    (facts,) = read_hosts([host], Flags(words) if path.suffix == ".yaml" else Flags.of_file(path))
    return {each.check: each for each in flag_checks(HOSTS[host]).run(replace(facts, is_importable=True))}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def rows() -> list[dict[str, str]]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def judge(trees: Path) -> list[dict[str, str]]:
    """The table with doctor's verdicts, and a row for each verdict other than good that it does not have yet."""
    table = {(row["host"], row["script"], row["check"]): row for row in rows()}
    for row in table.values():
        row["verdict"] = "stale"
    for host, path, name in scripts(trees):
        for check, finding in findings(host, path).items():
            verdict = finding.status if finding.decided else "undecided"
            row = table.get((host, name, check))
            if row and row["sha256"] == digest(path):
                row["verdict"] = verdict
            elif not row and finding.decided and finding.status != "good" and check != "shell-variables":
                new = {"host": host, "script": name, "sha256": digest(path), "check": check, "written": "after"}
                table[host, name, check] = {**dict.fromkeys(COLUMNS, ""), **new, "verdict": verdict}
    return [table[key] for key in sorted(table)]


def wrong(table: list[dict[str, str]]) -> list[dict[str, str]]:
    return [row for row in table if row["verdict"] not in (row["truth"], "undecided", "stale")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", type=Path)
    table = judge(parser.parse_args().trees)
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    for row in wrong(table):
        print("wrong:", *(row[name] for name in ("host", "script", "check", "truth", "verdict")))
    print(len(table), "rows:", dict(Counter(row["verdict"] for row in table)))
    sys.exit(bool(wrong(table)))


if __name__ == "__main__":
    main()
