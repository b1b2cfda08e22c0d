"""The hosts that the tests patch: the stub, and the same functions cut out of a Megatron-LM tree."""

import ast
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rc.integrations.megatron_lm import HOST

STUB = Path(__file__).parent / "stub"
MODULES = ("megatron.rl.rl_utils", "megatron.rl.sequence_packing_utils", "megatron.training.training", "train_rl")

# what the functions below find in their modules, as far as they are run here
PREAMBLE = """from __future__ import annotations
import logging
from contextlib import nullcontext
from types import SimpleNamespace as PackedSeqParams
import torch
from megatron.core.utils import get_attr_wrapped_model
from megatron.training.global_vars import get_args
logger = logging.getLogger(__name__)
log_single_rank = lambda *args, **kwargs: None
get_nvtx_range = lambda: lambda *args, **kwargs: nullcontext()
set_model_config_attribute = lambda *args, **kwargs: None
is_batch_invariant_mode_enabled = lambda: False
is_pp_last_stage = lambda group: True
get_rl_runtime_state = None
"""
ALSO = {"megatron.rl.rl_utils": ("update_inference_logprobs_group_stats",)}


def named() -> bool:
    return bool(os.environ.get("MEGATRON_LM_DIR"))


def tree() -> Path:
    """The Megatron-LM tree to test against; skips the test where none is named."""
    if not named():
        pytest.skip("MEGATRON_LM_DIR names no Megatron-LM tree")
    return Path(os.environ["MEGATRON_LM_DIR"])


def cut_out(root: Path, into: Path) -> Path:
    """Write the functions that HOST replaces, from a Megatron-LM tree, as modules that need nothing else of it."""
    for name in MODULES[:3]:
        path = Path(*name.split(".")).with_suffix(".py")
        wanted = {symbol.name for symbol in HOST.symbols if symbol.module == name} | set(ALSO.get(name, ()))
        source = (root / path).read_text()
        functions = [node for node in ast.parse(source).body if getattr(node, "name", None) in wanted]
        assert len(functions) == len(wanted), f"{wanted} of {path}"
        (into / path).parent.mkdir(parents=True, exist_ok=True)
        # without decorators
        parts = [str(ast.get_source_segment(source, node)) for node in functions]
        (into / path).write_text("\n\n".join([PREAMBLE, *parts]))
    for copied in ("megatron/training/global_vars.py", "megatron/training/__init__.py", "megatron/rl/__init__.py"):
        (into / copied).write_text((STUB / copied).read_text())
    (into / "train_rl.py").write_text((STUB / "train_rl.py").read_text())
    return into


@contextmanager
def imported(folder: Path) -> Iterator[SimpleNamespace]:
    """The modules of a host, and no trace of them afterwards."""
    own = {name for name in sys.modules if _of_host(name)}
    assert not own, f"already imported: {own}"
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield SimpleNamespace(**{name.rpartition(".")[2]: importlib.import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if _of_host(name)]:
            del sys.modules[name]


def replace(module: Any, session: Any, *names: str) -> None:
    """Put ours instead of these functions of a module of the host."""
    made = {symbol.name: symbol.make for symbol in HOST.symbols}
    for name in names:
        setattr(module, name, made[name](getattr(module, name), session) or getattr(module, name))


def _of_host(name: str) -> bool:
    return name == "train_rl" or name.split(".")[:2] in (["megatron", "rl"], ["megatron", "training"])
