"""The patches that are in place: which functions were replaced, and how they are put back."""

from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.integrations.after_import import AfterImport
from megatron_rc.integrations.rebinding import rebind
from megatron_rc.integrations.symbols import Host, Symbol
from megatron_rc.learning_rate.rule import LRRule
from megatron_rc.settings.head import LOGITS, HeadOptions


@dataclass(eq=False)
class Place:
    """A function of a host, and the one that takes its place."""

    symbol: Symbol
    owner: Any
    """Module or class."""
    original: FunctionType
    replacement: Any
    """A function, so that a class that holds it binds it as it binds the original."""

    @property
    def attribute(self) -> str:
        return self.symbol.name.rpartition(".")[2]


@dataclass(eq=False)
class Installed:
    """A patched host."""

    host: Host
    version: str | None
    correction: RolloutCorrection | None
    lr_rule: LRRule | None
    session: Any
    """What `Host.prepare` returned; the replacements share it."""
    head: HeadOptions = LOGITS
    places: list[Place] = field(default_factory=list)
    holders: list[Any] = field(default_factory=list)
    """Patches that have not been undone; the host is restored with the last of them."""
    later: AfterImport = field(default_factory=AfterImport)
    """Replacements in modules of the host that this process has not imported."""
    held: tuple[str, ...] = ()
    """Names that keep functions of the host which were replaced elsewhere."""

    def replace(self, places: list[Place]) -> None:
        """Put the replacements into their owners, and wherever a loaded module holds the original."""
        for place in places:
            setattr(place.owner, place.attribute, place.replacement)
        self.held += rebind({place.original: place.replacement for place in places})
        self.places += places

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
            setattr(place.owner, place.attribute, place.original)
        # also in modules that imported a replacement since
        rebind({place.replacement: place.original for place in self.places})


INSTALLED: dict[str, Installed] = {}
"""By name of the host."""


def session_of(host: str) -> Any | None:
    """The session of the patch of a host; None where it is not patched."""
    return INSTALLED[host].session if host in INSTALLED else None
