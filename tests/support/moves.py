"""Moves modules of the root into rooms: files, imports, dotted names and paths in documents, in one run.

Run it from the root of a clean checkout; `ruff check --fix --select I` and `ruff format` follow.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

MODULES = {
    "advantages": "loss.advantages",
    "alarms": "correction.warnings",
    "cluster": "launch",
    "config": "correction.settings",
    "correction": "correction.correct",
    "dump": "dump.writer",
    "fused.correction": "correction.fused",
    "fused.linear_head": "logprobs.fused.linear",
    "fused.policy_loss": "loss.fused",
    "fused.routes": "moe.fused",
    "fused.rows": "logprobs.fused.rows",
    "gradient": "logprobs.gradient",
    "head_inputs": "logprobs.inputs",
    "inputs": "correction.inputs",
    "linear_head": "logprobs.linear",
    "logprobs": "logprobs.logits",
    "loss": "loss.policy_loss",
    "lr_decay": "learning_rate.length_decay",
    "lr_gate": "learning_rate.mismatch",
    "lr_scale": "learning_rate.rule",
    "surge": "learning_rate.surge",
    "measured_upper": "correction.measured_upper",
    "metrics": "correction.metrics",
    "part_metrics": "correction.part_metrics",
    "plan": "correction.plan",
    "reference.correction": "correction.reference.correction",
    "reference.factors": "correction.reference.factors",
    "reference.lags": "correction.reference.lags",
    "reference.linear_head": "logprobs.reference.linear",
    "reference.log_ratio": "correction.reference.log_ratio",
    "reference.measured_upper": "correction.reference.measured_upper",
    "reference.policy_loss": "loss.reference",
    "reference.prefix": "correction.reference.prefix",
    "reference.rejection_statistics": "correction.reference.rejection_statistics",
    "reference.routes": "moe.reference",
    "reference.rows": "logprobs.reference.rows",
    "reference.segments": "correction.reference.segments",
    "reference.sums": "correction.reference.sums",
    "report.axes": "drawing.axes",
    "report.heat_map": "drawing.heat_map",
    "report.html": "report.run_page",
    "report.page": "drawing.frame",
    "report.series": "drawing.series",
    "report.svg": "drawing.svg",
    "schema.cluster_settings": "settings.cluster",
    "schema.dump": "dump.schema",
    "schema.dump_settings": "settings.dump",
    "schema.files": "files",
    "schema.head_options": "settings.head",
    "schema.sglang_settings": "settings.sglang",
    "settings": "settings.job",
    "training.step.loss_terms": "training.loss_terms",
    "training.step.microbatches": "training.microbatches",
    "weight": "correction.weight",
}
"""Module or package below megatron_rc -> where it goes."""

FILES = {
    "megatron_rc/report/page.css": "megatron_rc/drawing/frame.css",
    "megatron_rc/report/page.js": "megatron_rc/drawing/frame.js",
    "tests/batch/test_dump.py": "tests/dump/test_dump.py",
    "tests/cluster": "tests/launch",
    "tests/correction/test_advantages.py": "tests/loss/test_advantages.py",
    "tests/correction/test_config.py": "tests/correction/test_settings.py",
    "tests/linear_head/test_gradient.py": "tests/logprobs/test_gradient.py",
    "tests/linear_head/test_linear_distribution.py": "tests/logprobs/test_linear_distribution.py",
    "tests/linear_head/test_linear_head.py": "tests/logprobs/test_linear.py",
    "tests/linear_head/test_linear_head_context.py": "tests/logprobs/test_linear_context.py",
    "tests/linear_head/test_linear_head_distributed.py": "tests/logprobs/test_linear_distributed.py",
    "tests/linear_head/test_linear_head_memory.py": "tests/logprobs/test_linear_memory.py",
    "tests/lr_decay/test_horizon.py": "tests/correction/test_horizon.py",
    "tests/lr_decay/test_lr_decay.py": "tests/learning_rate/test_length_decay.py",
    "tests/lr_decay/test_lr_gate.py": "tests/learning_rate/test_mismatch.py",
    "tests/lr_decay/test_megatron.py": "tests/learning_rate/test_megatron.py",
    "tests/lr_decay/test_surge.py": "tests/learning_rate/test_surge.py",
    "tests/report/test_html.py": "tests/report/test_run_page.py",
    "tests/schema/test_files.py": "tests/files/test_files.py",
}
"""Other files and folders -> where they go."""

KEPT = ("CHANGELOG.md", "tests/support/moves.py", "tests/support/earlier/", "docs/results.md")
"""Texts about names of earlier commits."""
TEXTS = (".py", ".md", ".sh", ".toml", ".yaml", ".yml", ".txt", ".csv", ".sbatch", ".cfg", ".html", "Makefile", "run")

_longest_first = sorted(MODULES, key=len, reverse=True)
_DOTTED = re.compile(rf"\bmegatron_rc\.({'|'.join(map(re.escape, _longest_first))})(?!\w)(?:\.(\w+))?")
SETTINGS = ("correction", "dump", "loss", "lr_decay", "lr_gate")
"""Modules whose names also are sections of YAML, as in the setting megatron_rc.correction.old of a host."""


def new_module(old: str) -> str | None:
    """The new dotted name below megatron_rc of an old one, or of what is inside an old package."""
    for name in _longest_first:
        if old == name or old.startswith(name + "."):
            return MODULES[name] + old[len(name) :]
    return None


def top_level_names(path: Path) -> set[str]:
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def files_of(module: str) -> str:
    return "megatron_rc/" + module.replace(".", "/")


def moves() -> dict[str, str]:
    found = dict(FILES)
    for old, new in MODULES.items():
        is_package = (ROOT / files_of(old) / "__init__.py").exists() and not (ROOT / f"{files_of(old)}.py").exists()
        found |= {files_of(old): files_of(new)} if is_package else {f"{files_of(old)}.py": f"{files_of(new)}.py"}
    return found


def tracked() -> list[str]:
    return subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")[
        :-1
    ]


def move_files() -> None:
    for old, new in moves().items():
        if not (ROOT / old).exists():
            raise SystemExit(f"{old} is not there")
        target = ROOT / new
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / old).is_dir() and target.is_dir():
            for path in sorted((ROOT / old).iterdir()):
                if path.suffix == ".py":
                    subprocess.run(["git", "mv", str(path), str(target / path.name)], cwd=ROOT, check=True)
        else:
            subprocess.run(["git", "mv", old, new], cwd=ROOT, check=True)


def with_imports(text: str, old_modules: set[str]) -> str:
    """Every `from package import module` of a moved module under its new package, with the name that it had."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return text
    lines = text.split("\n")
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    for node in sorted(statements, key=lambda node: -node.lineno):
        if node.module is None or node.module.split(".")[0] != "megatron_rc":
            continue
        package = node.module.split(".", 1)[1] + "." if "." in node.module else ""
        kept, moved = [], []
        for alias in node.names:
            old = package + alias.name
            new = new_module(old) if old in old_modules else None
            if new is None:
                kept.append(alias)
                continue
            parent, _, name = new.rpartition(".")
            bound = alias.asname or alias.name
            source = f"megatron_rc.{parent}" if parent else "megatron_rc"
            # already new: the pattern of dotted names must not see it again
            moved.append(
                f"from {source.replace('megatron_rc', 'megatron_RC')} import {name}"
                + ("" if name == bound else f" as {bound}")
            )
        if not moved:
            continue
        indent = " " * node.col_offset
        written = [indent + each for each in moved]
        if kept:
            names = ", ".join(alias.name + (f" as {alias.asname}" if alias.asname else "") for alias in kept)
            written.insert(0, f"{indent}from {node.module} import {names}")
        comment = re.search(r"\s+#.*$", lines[node.end_lineno - 1])
        if comment:
            written[-1] += comment.group()
        lines[node.lineno - 1 : node.end_lineno] = written
    return "\n".join(lines)


def with_names(text: str, names: dict[str, set[str]]) -> str:
    def replaced(found: re.Match[str]) -> str:
        module, attribute = found.groups()
        imported = re.search(r"(import|from) $", text[: found.start()]) is not None
        if module in SETTINGS and not imported and attribute not in names[module]:
            return found.group()
        return f"megatron_rc.{MODULES[module]}" + ("" if attribute is None else f".{attribute}")

    return _DOTTED.sub(replaced, text).replace("megatron_RC", "megatron_rc")


def path_pattern(changes: dict[str, str]) -> re.Pattern[str]:
    names = sorted((old.removeprefix("megatron_rc/") for old in changes), key=len, reverse=True)
    return re.compile(rf"(?<![\w/.-])(megatron_rc/)?({'|'.join(map(re.escape, names))})(?![\w-])(?!\.\w)")


def with_paths(text: str, changes: dict[str, str], *, bare: bool) -> str:
    """Paths of moved files; those without `megatron_rc/` only where the text is a document about the package."""

    def replaced(found: re.Match[str]) -> str:
        prefix, rest = found.group(1) or "", found.group(2)
        old = rest if rest in changes else f"megatron_rc/{rest}"
        if rest not in changes and not prefix and not (bare and rest.endswith(".py")):
            return found.group()
        new = changes[old]
        return new if prefix or rest in changes else new.removeprefix("megatron_rc/")

    return path_pattern(changes).sub(replaced, text)


def main() -> None:
    changes = moves()
    old_modules = {
        str(path.relative_to(ROOT / "megatron_rc").with_suffix("")).replace("/", ".").removesuffix(".__init__")
        for path in (ROOT / "megatron_rc").rglob("*.py")
    }
    names = {module: top_level_names(ROOT / f"megatron_rc/{module}.py") for module in SETTINGS}
    move_files()
    for name in tracked():
        path = ROOT / name
        if name.startswith(KEPT) or not name.endswith(TEXTS) or path.is_symlink() or not path.exists():
            continue
        before = text = path.read_text()
        if name.endswith(".py"):
            text = with_imports(text, old_modules)
        text = with_names(text, names)
        text = with_paths(text, changes, bare=name in ("docs/changing.md", "docs/architecture.md", "CONTRIBUTING.md"))
        if text != before:
            path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
