"""Which symbols of a host moved: its functions that we replace, call or surround, in another checkout of it.

    python launch/moved_symbols.py verl /path/to/verl

Reads the files and imports nothing of them. One line per symbol: as expected, with other code, with other parameters,
or gone, with every place of the checkout that defines a function of this name. Exit status 1 if a symbol has other
parameters or is gone. --record adds the code of this checkout to what doctor and patch know as tested.
"""

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_rc.integrations.hosts import HOSTS
from megatron_rc.integrations.symbols import BODIES, Host, Inspected, Symbol, inspect_symbols
from megatron_rc.source import Definition, parameters_of


def _loaded_by_name(name: str, tested: str, module: str, function: str, parameters: str) -> Host:
    """A host that docs/hosts/losses.md gives a loss: the function of it that the loss was compared with, or extends."""
    symbol = Symbol(module, function, parameters, None, "compared with, or extended")
    return Host(name, module.partition(".")[0], (symbol,), (), lambda: None, tested=tested)


SKYRL_LOSS = ("skyrl.backends.skyrl_train.utils.ppo_utils", "ppo_policy_loss")
SKYRL_PARAMETERS = "log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None"
TRL_LOSS = ("trl.trainer.grpo_trainer", "GRPOTrainer._generate_and_score_completions")
LOSSES = (
    ("prime-rl", "commit 559b44772e47", "prime_rl.trainer.rl.loss", "default_loss_fn", "inputs, loss_config"),
    ("skyrl", "commit a9564572eb8e", *SKYRL_LOSS, SKYRL_PARAMETERS),
    ("trl", "commit f2cd57710ae3", *TRL_LOSS, "self, inputs"),
)
KNOWN = {**HOSTS, **{host[0]: _loaded_by_name(*host) for host in LOSSES}}


def definitions(tree: Path, name: str) -> Iterator[tuple[Path, str, Definition]]:
    """Every def of a function or method of that name in a tree: file, qualified name, def."""
    for file in sorted(tree.rglob("*.py")):
        text = file.read_text(encoding="utf-8", errors="replace")
        if f"def {name}(" in text:
            try:
                parsed = ast.parse(text)
            except SyntaxError:
                continue
            yield from ((file.relative_to(tree), where, node) for where, node in _defs(parsed.body, name))


def _defs(body: list[ast.stmt], name: str, prefix: str = "") -> Iterator[tuple[str, Definition]]:
    for node in body:
        if isinstance(node, Definition) and node.name == name:
            yield prefix + name, node
        elif isinstance(node, ast.ClassDef):
            yield from _defs(node.body, name, f"{prefix}{node.name}.")


def line_of(found: Inspected, tree: Path) -> str:
    """What became of a symbol, one line."""
    if found.problem is None:
        return f"{found.symbol.path}: {'other code' if found.changed else 'as expected'}"
    if found.parameters is not None:
        return found.problem
    wanted = found.symbol.name.rpartition(".")[2]
    places = [f"{file}:{node.lineno} {where}({parameters_of(node)})" for file, where, node in definitions(tree, wanted)]
    return f"{found.symbol.path}: gone; " + ("; ".join(places) or f"nothing defines {wanted}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("host", choices=KNOWN)
    parser.add_argument("checkout", type=Path, help="Folder of a checkout of the host.")
    parser.add_argument("--record", action="store_true", help="Add the code of its symbols to those that were tested.")
    given = parser.parse_args()
    if not given.checkout.is_dir():
        parser.error(f"there is no folder {given.checkout}")
    host, tree = KNOWN[given.host], given.checkout.resolve()
    # prime-rl keeps its package below src
    sys.path[:0] = [str(tree), str(tree / "src")]
    inspected = inspect_symbols(host)
    print(f"{host.name}, tested at {host.tested}")
    print("\n".join(line_of(found, tree) for found in inspected))
    if given.record:
        rows = {*BODIES.read_text(encoding="utf-8").splitlines()}
        rows |= {f"{found.symbol.path},{found.body}" for found in inspected if found.body}
        BODIES.write_text("".join(f"{row}\n" for row in sorted(rows)), encoding="utf-8")
    return int(any(found.problem for found in inspected))


if __name__ == "__main__":
    sys.exit(main())
