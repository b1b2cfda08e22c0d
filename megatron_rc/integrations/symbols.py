"""Symbol and Host: what a patch replaces in another codebase, looked up in its source without importing it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rc import schema
from megatron_rc.integrations.flag_rules import FlagRule
from megatron_rc.settings.head import Head
from megatron_rc.source import added_parameters, body_of, definition, parameters_of
from megatron_rc.versions import Range, find_module, is_older, is_release

Function = Callable[..., Any]


@dataclass(frozen=True)
class Symbol:
    """One function or method of a host codebase that a patch replaces."""

    module: str
    """Where it is defined, such as "megatron.rl.rl_utils"."""
    name: str
    """"function" or "Class.method"."""
    parameters: str
    """As in its def line, with defaults and without annotations: "model, tokens, no_grad=False"."""
    make: Callable[[Function, Any], Function] | None
    """(original, session) -> its replacement. None: it is never replaced, and ours call or extend it."""
    summary: str
    """What the replacement does, one line."""
    when: Callable[[Any], bool] | None = None
    """Whether the settings of a session need it; None: all do. Where they do not, it may be missing or have changed."""

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"

    def needed(self, session: Any) -> bool:
        return self.when is None or self.when(session)


class Recipe(NamedTuple):
    """How to give a correction to a host that loads functions by name: nothing of it is replaced."""

    flags: list[str]
    """To be added to the host's command line, each with its value; one of them names rc.yaml."""
    config: dict[str, Any]
    """Content of rc.yaml."""

    def __str__(self) -> str:
        flags = " \\\n  ".join(self.flags)
        return f"write rc.yaml:\n{schema.dump_yaml(self.config)}and add to the host's command line:\n  {flags}"


@dataclass(frozen=True)
class Host:
    """A codebase that `patch` and `megatron-rc doctor` know. One folder of integrations/ has everything about it."""

    name: str
    module: str
    """The host is there when this module can be found."""
    symbols: tuple[Symbol, ...]
    versions: tuple[str, ...]
    """Versions whose symbols were read; a longer version that begins with one of them is that version."""
    read_version: Callable[[], str | None]
    """Returns the version that is installed, without importing the host; None where it has none."""
    prepare: Callable[..., Any] = lambda correction, lr_rule: None
    """(correction, lr_rule, and HeadOptions other than the default) -> the session of one patch; ValueError for
    settings that the host cannot honour."""
    heads: tuple[Head, ...] = ("logits",)
    """What log-probs of the patched host can be made of."""
    tested: str = ""
    """Which state of the host the contract tests ran against, such as a commit."""
    differences: tuple[str, ...] = ()
    """What a patched host does otherwise than before, on purpose, even with the correction "none"."""
    contains: tuple[str, ...] = ()
    """Hosts that can be found wherever this one can; `patch("auto")` prefers this one to them."""
    release: Callable[[Any], None] = lambda session: None
    """Undoes what the replacements of a session have attached to the host's objects; may refuse by ValueError."""
    recipe: Callable[[Any, Any], Recipe] | None = None
    """(correction, lr_rule) -> what the user adds to a host whose processes `patch` cannot reach."""
    in_parts: bool = False
    """Whether each of its processes imports only some modules: a symbol is replaced as its module is imported."""
    summary: str = ""
    """What the host is, as docs/hosts/index.md names it."""
    where: str = ""
    """How the host gets onto sys.path, one sentence."""
    pythons: Range | None = None
    """The Pythons that its own metadata accept; None: those of this package."""
    compiles_helpers: bool = False
    """Whether rank 0 of its program runs make on the data sets of megatron-core before training."""
    flag_rules: tuple[FlagRule, ...] = ()
    """Mistakes in the host's own flags; doctor knows those in Megatron's flags, which every host takes."""
    flag_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Argument that the rules read -> its default in the host."""
    own_configs: tuple[str, ...] = ()
    """Names of YAML files of a host that uses Hydra, whose values `flag_defaults` has."""
    reads_overrides: bool = False
    """Whether the host takes YAML and key=value overrides instead of flags; its rules read dotted paths."""
    config_flag: str | None = None
    """Flag of a YAML file whose keys the host adds to its arguments."""
    without_rl: str = ""
    """Regular expression of its programs without a policy gradient, such as SFT, or of a flag that makes it one."""

    def is_importable(self) -> bool:
        return find_module(self.module) is not None

    def knows(self, version: str | None) -> bool:
        """Whether the symbols of this version were read; a host without versions is judged by its symbols alone."""
        return not self.versions or is_release(version, self.versions)

    def is_newer(self, version: str | None) -> bool:
        """Whether this version came after all whose symbols were read: they are looked up all the same."""
        return version is not None and not self.knows(version) and not is_older(version, self.versions[-1])


def replaced_by(module: str, name: str) -> Callable[[Function, Any], Function]:
    """`Symbol.make` for the function ``name`` of ``module``, which takes (original, session, *what the host passes).

    The module is imported when a host is patched, because a table of symbols must not load torch.
    """
    return lambda original, session: partial(getattr(import_module(module), name), original, session)


class Inspected(NamedTuple):
    """What the source of a host says about a symbol."""

    symbol: Symbol
    parameters: str | None
    """As in `Symbol.parameters`; None where the symbol is missing."""
    problem: str | None
    """Why it cannot be replaced, one sentence; None where it can."""
    added: tuple[str, ...] = ()
    """Optional parameters that the patch does not know."""
    body: str = ""
    """`body_of` it; empty where the symbol is missing."""

    @property
    def changed(self) -> bool:
        """Whether the function does otherwise than in the states of the host that `BODIES` knows."""
        known = known_bodies().get(self.symbol.path)
        return known is not None and bool(self.body) and self.body not in known


def inspect_symbols(host: Host) -> list[Inspected]:
    """Read the def line of every symbol of a host from its files, in order; nothing is imported, nothing replaced."""
    return [_inspect(symbol) for symbol in host.symbols]


def _inspect(symbol: Symbol) -> Inspected:
    spec = find_module(symbol.module)
    if spec is None or spec.origin is None:
        return Inspected(symbol, None, f"module {symbol.module} is missing")
    node = definition(Path(spec.origin), symbol.name)
    if node is None:
        return Inspected(symbol, None, f"{symbol.path} is missing from {spec.origin}")
    parameters = parameters_of(node)
    added = added_parameters(parameters, symbol.parameters)
    problem = f"{symbol.path} takes ({parameters}), but the patch was made for ({symbol.parameters})"
    return Inspected(symbol, parameters, problem if added is None else None, added or (), body_of(node))


BODIES = Path(__file__).with_name("bodies.csv")
"""Path and `body_of` the symbols that contract tests ran against; launch/moved_symbols.py --record writes it."""


@lru_cache(maxsize=1)
def known_bodies() -> dict[str, set[str]]:
    """Path of a symbol -> the bodies that it had in the states of the host that were tested."""
    rows = [line.split(",") for line in BODIES.read_text(encoding="utf-8").splitlines()]
    return {path: {body for of_path, body in rows if of_path == path} for path, _ in rows}
