"""patch(): put rollout correction into a codebase that people already run, and take it out again."""

import inspect
import os
import sys
from collections.abc import Sequence
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.integrations.hosts import host_named
from megatron_rc.integrations.installed import INSTALLED, Installed, Place
from megatron_rc.integrations.symbols import Host, Recipe, Symbol, inspect_symbols
from megatron_rc.learning_rate.rule import LRRule, check_lr_rule
from megatron_rc.settings.head import LOGITS, Head, HeadOptions, WiderDtype
from megatron_rc.source import definition


def patch(
    host: str = "auto",
    *,
    correction: RolloutCorrection | str | None = None,
    lr_rule: LRRule | None = None,
    head: Head = "logits",
    head_chunk: int | None = None,
    head_logits_dtype: WiderDtype | None = None,
) -> "Patch":
    """Replace functions of a host codebase, so that its own training loop corrects its rollouts.

    Call it before the loop starts; docs/hosts/ has a page per host, with the table of its symbols. Every name, class
    attribute, dict or list of a loaded module that holds the function is changed too, a tuple that holds it is named in
    `Patch.report`, and modules that are imported later find the replacements. A patch is a context manager that undoes
    itself. With equal settings patches of a host nest: it is restored when the last of them is undone.

    A host that trains in processes of its own (slime, miles) cannot be patched from here: nothing is replaced, and
    `Patch.recipe` has the flags and the YAML that give it the same correction.

    Args:
        host: "megatron-lm", "slime", "verl" or another (docs/hosts); "auto": the only one that can be imported.
        correction: what happens to rollouts, or the name of a preset; None leaves the host's loss as it is, "none"
            only measures.
        lr_rule: learning-rate rule: a LengthDecayLR or MismatchLR, or its settings, which take the host's own maximum
            learning rate. None: the host's schedule.
        head: what log-probs are made of: the logits, or ("linear") hidden states and the weight of the head, whose
            logits are never in memory. A host that does not show us its model has logits alone.
        head_chunk, head_logits_dtype: for the linear head, as train.head_chunk and train.head_logits_dtype of a job.

    Raises:
        ValueError: nothing is given, or a rule or a head needs a correction or other settings. Or the host cannot
            honour them, is unknown, of another version or not importable. Or a symbol is missing, has other parameters,
            or was replaced by somebody else. Nothing has been replaced then.
    """
    if correction is not None:
        correction = RolloutCorrection.of(correction)
    check_lr_rule(lr_rule, correction)
    if correction is None and lr_rule is None:
        raise ValueError("correction or lr_rule must be given: patch has nothing to do")
    if head != "logits" and correction is None:
        raise ValueError(f"correction must be given with head={head!r}: without it the host computes its own log-probs")
    return patch_host(host_named(host), correction, lr_rule, HeadOptions(head, head_chunk, head_logits_dtype))


def patch_host(
    target: Host, correction: RolloutCorrection | None, lr_rule: LRRule | None, head: HeadOptions = LOGITS
) -> "Patch":
    """`patch` for a Host instead of a name."""
    if head.head not in target.heads:
        allowed = " or ".join(map(repr, target.heads))
        raise ValueError(f"head must be {allowed} with host {target.name!r}, got {head.head!r}")
    if target.recipe is not None:
        version = None
        if target.is_importable():
            version = _version(target)
            _check_symbols(target, session=None)
        nothing_replaced = Installed(target, version, correction, lr_rule, session=None)
        return Patch(nothing_replaced, target.recipe(correction, lr_rule))
    installed = INSTALLED.get(target.name) or _install(target, correction, lr_rule, head)
    INSTALLED[target.name] = installed
    if (installed.correction, installed.lr_rule, installed.head) != (correction, lr_rule, head):
        raise ValueError(f"{target.name} is already patched with other settings; undo that patch first")
    patched = Patch(installed)
    installed.holders.append(patched)
    return patched


class Patch:
    """A patched host, or the recipe for one that cannot be patched from here; made by `patch`."""

    def __init__(self, installed: Installed, recipe: Recipe | None = None) -> None:
        self._installed = installed
        self.recipe = recipe
        """Flags and YAML that the host takes instead of a patch; None where functions were replaced."""

    @property
    def active(self) -> bool:
        """Whether functions are replaced and this patch has not been undone."""
        return self in self._installed.holders

    def undo(self) -> None:
        """Give the host back every function that it had, once no other patch holds it. A second undo does nothing.

        Raises ValueError if somebody replaced a symbol after `patch`; nothing has been restored then.
        """
        installed = self._installed
        if not self.active:
            return
        if len(installed.holders) == 1:
            installed.restore()
            del INSTALLED[installed.host.name]
        installed.holders.remove(self)

    def report(self) -> str:
        """What was replaced, or the recipe, and what differs from the host's own behaviour, as text."""
        installed = self._installed
        host, replaced = installed.host, {place.symbol for place in installed.places}
        version = f" {installed.version}" if installed.version else ""
        if self.recipe is not None:
            lines = [f"{host.name}{version}, not patched: it trains in processes of its own", str(self.recipe)]
        else:
            lines = [f"{host.name}{version}, {'patched' if self.active else 'restored'}", "replaced:"]
            lines += [f"  {symbol.path}: {symbol.summary}" for symbol in host.symbols if symbol in replaced]
            if installed.held and self.active:
                lines += [f"still the host's own, in what cannot be changed: {', '.join(installed.held)}"]
            if host.in_parts and self.active:
                waiting = [symbol.path for symbol in installed.wanted if symbol.module not in sys.modules]
                lines += [f"to be replaced once this process imports them: {', '.join(waiting)}"] if waiting else []
            lines += _news(installed)
            lines += [f"correction: {installed.correction}"] if installed.correction is not None else []
            lines += [f"head: {installed.head}"] if installed.head != LOGITS else []
            lines += [f"lr_rule: {installed.lr_rule}"] if installed.lr_rule is not None else []
        if installed.correction is not None:
            lines += ["differs from the host on purpose:", *(f"  {text}" for text in host.differences)]
        return "\n".join(lines)

    def __enter__(self) -> "Patch":
        if self.recipe is not None:
            raise ValueError(
                f"{self._installed.host.name} trains in processes of its own, which patch cannot reach: give it the "
                f"flags {' '.join(self.recipe.flags)}"
            )
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


def _news(installed: Installed) -> list[str]:
    """What a host has that the patch was not made for."""
    host, lines = installed.host, []
    if host.is_newer(installed.version):
        known = " and ".join(host.versions)
        lines.append(f"newer than {known}: its {len(host.symbols)} symbols take what ours pass; nothing else was read")
    inspected = [found for found in inspect_symbols(host) if found.symbol.needed(installed.session)]
    added = [f"{found.symbol.path} takes {', '.join(found.added)}" for found in inspected if found.added]
    lines += [f"new there: {'; '.join(added)}"] * bool(added)
    if changed := [found.symbol.path for found in inspected if found.changed]:
        lines.append(
            f"their code is not that of {host.tested}: {', '.join(changed)}; compare a step under correction none with "
            "one of the host alone before you trust the patch"
        )
    return lines


def _version(host: Host) -> str | None:
    """The version of a host; ValueError where it is not there, or is older than what is known."""
    if not host.is_importable():
        raise ValueError(f"{host.name} cannot be imported: no module {host.module} on sys.path")
    version = host.read_version()
    if not host.knows(version) and not host.is_newer(version):
        raise ValueError(f"{host.name} must be of version {' or '.join(host.versions)}, found {version}")
    return version


def _check_symbols(host: Host, session: Any) -> None:
    """ValueError if a symbol that the session needs is not as expected in the host's files."""
    inspected = [found for found in inspect_symbols(host) if found.problem and found.symbol.needed(session)]
    if inspected:
        raise ValueError(f"{host.name} cannot be patched: " + "; ".join(str(found.problem) for found in inspected))


def _install(host: Host, correction: RolloutCorrection | None, lr_rule: LRRule | None, head: HeadOptions) -> Installed:
    version = _version(host)
    session = host.prepare(correction, lr_rule) if head == LOGITS else host.prepare(correction, lr_rule, head)
    _check_symbols(host, session)
    installed = Installed(host, version, correction, lr_rule, session, head)
    later = [symbol for symbol in installed.wanted if host.in_parts and symbol.module not in sys.modules]
    _replace(installed, [symbol for symbol in installed.wanted if symbol not in later])
    for symbol in later:
        installed.later.call(symbol.module, partial(_replace, installed, [symbol]))
    return installed


def _replace(installed: Installed, symbols: Sequence[Symbol]) -> None:
    installed.replace([_place(installed.host, symbol, installed.session) for symbol in symbols])


def _place(host: Host, symbol: Symbol, session: Any) -> Place:
    """A symbol and its replacement; ValueError if its function is not the one in the host's own file."""
    try:
        owner: Any = import_module(symbol.module)
    except ImportError as error:
        raise ValueError(f"{host.name} cannot be patched: importing {symbol.module} failed: {error}") from error
    *classes, attribute = symbol.name.split(".")
    for name in classes:
        owner = getattr(owner, name)
    function = vars(owner).get(attribute)
    path = Path(sys.modules[symbol.module].__file__ or "")
    node = definition(path, symbol.name)
    own = inspect.unwrap(function) if node is not None and node.decorator_list and callable(function) else function
    if not isinstance(own, FunctionType) or os.path.realpath(own.__code__.co_filename) != os.path.realpath(path):
        raise ValueError(f"{symbol.path} is not the function of {path}: somebody else has replaced it; undo that first")
    assert symbol.make is not None
    made: Any = symbol.make(function, session)
    # a plain function, so that a class binds it as it bound the original
    plain = made if isinstance(made, FunctionType) else wraps(function)(lambda *args, **kwargs: made(*args, **kwargs))
    return Place(symbol, owner, function, plain)
