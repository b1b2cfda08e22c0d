"""The patches that are in place: which functions were replaced, and how they are put back."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from megatron_rc.config import RolloutCorrection
from megatron_rc.integrations.after_import import AfterImport
from megatron_rc.integrations.scheduler_rule import LRRule
from megatron_rc.integrations.symbols import Host, Symbol


@dataclass(eq=False)
class Place:
    """A function of a host, and the one that takes its place."""

    symbol: Symbol
    owner: Any
    """Module or class."""
    original: FunctionType
    replacement: Any

    @property
    def attribute(self) -> str:
        return self.symbol.name.rpartition(".")[2]

    def replace(self) -> None:
        """Put the replacement into the owner, and into every loaded module that imported the original by value."""
        self._rebind(self.original, self.replacement)

    def restore(self) -> None:
        """Undo `replace`, also in modules that imported the replacement since."""
        self._rebind(self.replacement, self.original)

    def _rebind(self, before: Any, after: Any) -> None:
        setattr(self.owner, self.attribute, after)
        if not isinstance(self.owner, ModuleType):
            return
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType) and vars(module).get(self.attribute) is before:
                setattr(module, self.attribute, after)


@dataclass(eq=False)
class Installed:
    """A patched host."""

    host: Host
    version: str | None
    correction: RolloutCorrection | None
    lr_rule: LRRule | None
    session: Any
    """What `Host.prepare` returned; the replacements share it."""
    places: list[Place]
    holders: list[Any] = field(default_factory=list)
    """Patches that have not been undone; the host is restored with the last of them."""
    later: AfterImport = field(default_factory=AfterImport)
    """Replacements in modules of the host that this process has not imported."""

    def restore(self) -> None:
        """Give the host its functions back.

        Raises:
            ValueError: a symbol was replaced after the patch; nothing has been restored then.
        """
        for place in self.places:
            if vars(place.owner).get(place.attribute) is not place.replacement:
                raise ValueError(f"{place.symbol.path} was replaced after patch; undo that first")
        self.host.release(self.session)
        self.later.forget()
        for place in self.places:
            place.restore()


INSTALLED: dict[str, Installed] = {}
"""By name of the host."""


def session_of(host: str) -> Any | None:
    """The session of the patch of a host; None where it is not patched."""
    return INSTALLED[host].session if host in INSTALLED else None
