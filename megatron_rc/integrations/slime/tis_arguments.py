"""Whether the installed slime or miles gives current log-probs and advantages to the hook of its TIS function."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from megatron_rc.integrations.slime.settings import FAMILY
from megatron_rc.integrations.symbols import definition
from megatron_rc.versions import find_module

_CALLER, _ARGUMENTS = "policy_loss_function", "tis_kwargs"
"""The function of both hosts that calls the hook, as hook(**tis_kwargs)."""


@cache
def hands_over_both() -> bool:
    """Whether every host that is found passes both; False without a host or its source.

    Read once: hooks ask for every micro-batch.
    """
    specs = [spec for spec in (find_module(member.tis_caller) for member in FAMILY) if spec is not None]
    files = [Path(spec.origin) for spec in specs if spec.origin is not None and spec.origin.endswith(".py")]
    both = {"current_log_probs", "advantages"}
    return bool(specs) and len(files) == len(specs) and all(both.issubset(arguments_of_tis(file)) for file in files)


def arguments_of_tis(file: Path) -> Iterator[str]:
    """Names of the arguments that a host's file passes to the hook: the keys of its dictionary of them."""
    caller = definition(file, _CALLER)
    for node in ast.walk(caller) if caller is not None else ():
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(keys=keys)) if name == _ARGUMENTS:
                yield from (str(key.value) for key in keys if isinstance(key, ast.Constant))
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=key))]):
                yield from [str(key)] if name == _ARGUMENTS else []
