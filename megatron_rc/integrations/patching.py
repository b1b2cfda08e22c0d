"""patch(): put rollout correction into a codebase that people already run, and take it out again."""

from __future__ import annotations

import inspect
import os
import sys
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType, TracebackType
from typing import Any

from megatron_rc.config import RolloutCorrection
from megatron_rc.integrations.hosts import Host, Symbol, host_named, inspect_symbols
from megatron_rc.integrations.scheduler_decay import LRDecay
from megatron_rc.integrations.symbols import definition


def patch(host: str = "auto", *, correction: RolloutCorrection | None = None, lr_decay: LRDecay | None = None) -> Patch:
    """Replace functions of a host codebase, so that its own training loop corrects its rollouts.

    Call it before the loop starts; `docs/patching.md` has a recipe and the table of symbols of every host. Names that
    loaded modules imported by value are replaced too, and modules that are imported later find the replacements. As a
    context manager it undoes itself on leaving. Patching a host again with equal settings counts as nested: the
    host is restored when each of the patches is undone.

    Args:
        host: a name in `HOSTS`; "auto": the only one that can be imported.
        correction: what happens to rollouts; None leaves the host's loss as it is, RolloutCorrection() only measures.
        lr_decay: length-decay learning rate; a LengthDecayLR, or its settings, which take the host's own maximum
            learning rate. None: the host's schedule.

    Returns:
        Patch.

    Raises:
        ValueError: nothing was asked for; the host or its version is unknown or not importable; a symbol is missing,
            has other parameters, or was replaced by somebody else; the host cannot honour `correction`. Nothing has
            been replaced then.
    """
    if correction is None and lr_decay is None:
        raise ValueError("correction or lr_decay must be given: patch has nothing to do")
    chosen = host_named(host)
    installed = _INSTALLED.get(chosen.name)
    if installed is None:
        installed = _INSTALLED[chosen.name] = _install(chosen, correction, lr_decay)
    elif (installed.correction, installed.lr_decay) != (correction, lr_decay):
        raise ValueError(f"{chosen.name} is already patched with other settings; undo that patch first")
    patched = Patch(installed)
    installed.holders.append(patched)
    return patched


class Patch:
    """A patched host; made by `patch`."""

    def __init__(self, installed: _Installed) -> None:
        self._installed = installed

    @property
    def active(self) -> bool:
        """Whether this patch has not been undone."""
        return self in self._installed.holders

    def undo(self) -> None:
        """Give the host back every function that it had, once no other patch holds it. A second undo does nothing.

        Raises:
            ValueError: somebody replaced a symbol after `patch`; nothing has been restored then.
        """
        installed = self._installed
        if not self.active:
            return
        if len(installed.holders) == 1:
            installed.restore()
            del _INSTALLED[installed.host.name]
        installed.holders.remove(self)

    def report(self) -> str:
        """What was replaced and what differs from the host's own behaviour, as text."""
        installed = self._installed
        host, replaced = installed.host, {place.symbol for place in installed.places}
        version = f" {installed.version}" if installed.version else ""
        lines = [f"{host.name}{version}, {'patched' if self.active else 'restored'}", "replaced:"]
        lines += [f"  {symbol.path}: {symbol.summary}" for symbol in host.symbols if symbol in replaced]
        lines += [f"correction: {installed.correction}"] if installed.correction is not None else []
        lines += [f"lr_decay: {installed.lr_decay}"] if installed.lr_decay is not None else []
        if installed.correction is not None:
            lines += ["differs from the host on purpose:", *(f"  {text}" for text in host.differences)]
        return "\n".join(lines)

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()


@dataclass(eq=False)
class _Place:
    """A replaced attribute."""

    symbol: Symbol
    owner: Any
    """Module or class."""
    original: FunctionType
    replacement: Any

    @property
    def attribute(self) -> str:
        return self.symbol.name.rpartition(".")[2]


@dataclass(eq=False)
class _Installed:
    host: Host
    version: str | None
    correction: RolloutCorrection | None
    lr_decay: LRDecay | None
    context: Any
    places: list[_Place]
    holders: list[Patch] = field(default_factory=list)

    def restore(self) -> None:
        for place in self.places:
            if vars(place.owner).get(place.attribute) is not place.replacement:
                raise ValueError(f"{place.symbol.path} was replaced after patch; undo that first")
        self.host.release(self.context)
        for place in self.places:
            _rebind(place, place.replacement, place.original)


_INSTALLED: dict[str, _Installed] = {}


def _install(host: Host, correction: RolloutCorrection | None, lr_decay: LRDecay | None) -> _Installed:
    if not host.is_importable():
        raise ValueError(f"{host.name} cannot be imported: no module {host.module} on sys.path")
    version = host.read_version()
    if not host.knows(version):
        raise ValueError(f"{host.name} must be of version {' or '.join(host.versions)}, found {version}")
    problems = [found.problem for found in inspect_symbols(host) if found.problem]
    if problems:
        raise ValueError(f"{host.name} cannot be patched: " + "; ".join(problems))
    context = host.prepare(correction, lr_decay)
    places = []
    for symbol in host.symbols:
        owner, original = _live(host, symbol)
        replacement = symbol.make(original, context)
        if replacement is not None:
            places.append(_Place(symbol, owner, original, replacement))
    for place in places:
        _rebind(place, place.original, place.replacement)
    return _Installed(host, version, correction, lr_decay, context, places)


def _live(host: Host, symbol: Symbol) -> tuple[Any, FunctionType]:
    """Owner and function of a symbol, which must still be the one of the host's own file."""
    try:
        owner: Any = import_module(symbol.module)
    except ImportError as error:
        raise ValueError(f"{host.name} cannot be patched: importing {symbol.module} failed: {error}") from error
    *classes, attribute = symbol.name.split(".")
    for name in classes:
        owner = getattr(owner, name)
    found = vars(owner).get(attribute)
    path = Path(sys.modules[symbol.module].__file__ or "")
    node = definition(path, symbol.name)
    own = inspect.unwrap(found) if node is not None and node.decorator_list and callable(found) else found
    if not isinstance(own, FunctionType) or os.path.realpath(own.__code__.co_filename) != os.path.realpath(path):
        raise ValueError(f"{symbol.path} is not the function of {path}: somebody else has replaced it; undo that first")
    return owner, found


def _rebind(place: _Place, before: Any, after: Any) -> None:
    """Put a function in the place of another: in its owner, and in every loaded module that imported it by value."""
    setattr(place.owner, place.attribute, after)
    if not isinstance(place.owner, ModuleType):
        return
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and vars(module).get(place.attribute) is before:
            setattr(module, place.attribute, after)
