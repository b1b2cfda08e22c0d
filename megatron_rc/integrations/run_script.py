"""Run the training script of a host in this process, patched before its first line."""

import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from megatron_rc import schema
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.integrations.hosts import host_named
from megatron_rc.integrations.patching import patch
from megatron_rc.learning_rate.rule import AnyRuleSettings, check_lr_rule
from megatron_rc.settings.head import Head, HeadOptions, WiderDtype
from megatron_rc.settings.renamed import CurrentNames


@dataclass(frozen=True, kw_only=True)
class PatchSettings(CurrentNames):
    """Arguments of `patch`, as a YAML file has them."""

    correction: RolloutCorrection | None = None
    """How rollouts are corrected: a preset name, or fields with or without `preset`; null leaves the host's loss."""
    lr_rule: AnyRuleSettings | None = None
    """Learning-rate rule: its name, or a mapping with its name under `rule`; null keeps the host's schedule."""
    head: Head = "logits"
    """What log-probs are made of: logits, or hidden states and the weight of the head (linear)."""
    head_chunk: int | None = None
    """With head linear: tokens whose logits exist at a time, as train.head_chunk of a job."""
    head_logits_dtype: WiderDtype | None = None
    """With head linear: fp32 keeps these logits unrounded, as train.head_logits_dtype of a job."""

    def __post_init__(self) -> None:
        HeadOptions(self.head, self.head_chunk, self.head_logits_dtype)
        check_lr_rule(self.lr_rule, self.correction)


def patch_settings(
    config: Path | None = None, preset: str | None = None, lr_rule: str | None = None, assignments: Iterable[str] = ()
) -> PatchSettings:
    """Settings from a YAML file and from options, which win over the file.

    Args:
        preset: correction in place of the file's.
        lr_rule: name of a rule with its defaults in place of the file's.
        assignments: ``key=value``, applied last.

    Raises ValueError for no such file or preset, and for a wrong field, named.
    """
    data = schema.load_yaml(config) if config is not None else {}
    data |= {name: given for name, given in (("correction", preset), ("lr_rule", lr_rule)) if given is not None}
    return schema.from_dict(PatchSettings, data, assignments=assignments)


def recipe(settings: PatchSettings, *, host: str = "auto") -> str:
    """What to add to a host that `patch` cannot reach, as text; without settings, a recipe that measures."""
    target = host_named(host)
    if target.recipe is None:
        raise ValueError(f"the training script must be given: {target.name} is patched in the process that runs it")
    if settings == PatchSettings():
        settings = replace(settings, correction=RolloutCorrection())
    return patch(host, **vars(settings)).report()


def run_script(script: Path, arguments: Sequence[str], settings: PatchSettings, *, host: str = "auto") -> None:
    """`python script arguments...` with a patched host; the host is restored when the script ends.

    The script runs as __main__, with its folder first on sys.path as Python would have it. What it imports by value is
    patched because it is imported later. Rank 0 prints `Patch.report()` first. Raises ValueError for no such script, or
    as `patch`.
    """
    if not script.is_file():
        raise ValueError(f"no such script: {str(script)!r}")
    path = script.resolve()
    module = ModuleType("__main__")
    module.__file__ = str(path)
    caller, argv, search = sys.modules["__main__"], sys.argv, list(sys.path)
    sys.path.insert(0, str(path.parent))
    try:
        with patch(host, **vars(settings)) as patched:
            if os.environ.get("RANK", "0") == "0":
                print(patched.report(), flush=True)
            # a checkpoint saved by worker processes is saved by children that run this file again
            sys.modules["__main__"], sys.argv = module, [str(script), *arguments]
            try:
                exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
            except (ValueError, ImportError):
                # an error of the script is shown whole, as Python would; one of this function is one sentence
                traceback.print_exc()
                sys.exit(1)
    finally:
        sys.modules["__main__"], sys.argv, sys.path[:] = caller, argv, search
