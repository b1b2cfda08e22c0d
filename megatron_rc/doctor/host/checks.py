"""Checks of a host codebase, which is not imported: whether the patch was made for it, its flags, and its Python."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from platform import python_version

from megatron_rc.doctor.host.flags import EXPANDED, Arguments, Flags
from megatron_rc.doctor.host.overrides import Overrides
from megatron_rc.doctor.python import ENVIRONMENT, read_environment
from megatron_rc.doctor.registry import Check, Finding, Registry, Undecided, error, good, note, warning
from megatron_rc.integrations.facts import MEGATRON_DEFAULTS, MEGATRON_RULES
from megatron_rc.integrations.flag_rules import FlagRule
from megatron_rc.integrations.hosts import HOSTS, host_named
from megatron_rc.integrations.symbols import Host, Inspected, Symbol, inspect_symbols
from megatron_rc.versions import find_module


@dataclass(frozen=True)
class HostFacts:
    host: Host
    is_importable: bool
    version: str | None
    symbols: Mapping[str, Inspected]
    """Symbols by path."""
    given_flags: Flags | None = None
    asked: bool = False
    """The user named this host."""
    helpers_folder: str | None = None
    """Folder in which Megatron calls make before training, if it has no Makefile; None if make can run."""
    python: str = field(default_factory=python_version)
    """The version of this Python."""

    @property
    def flags(self) -> Flags:
        if self.given_flags is None:
            raise Undecided("the host's flags are not known", "Give them after --, or in a file with --flags-file.")
        return self.given_flags

    @cached_property
    def args(self) -> Arguments | Overrides:
        """The host's settings by name; a chain of YAML files is read once."""
        host = self.host
        if host.reads_overrides:
            return Overrides(self.flags, host.flag_defaults, host.own_configs)
        return Arguments(self.flags, {**MEGATRON_DEFAULTS, **host.flag_defaults}, host.config_flag)

    @property
    def without_rl(self) -> str:
        """What in the command says that its program has no policy gradient; empty for all others."""
        named = self.host.without_rl
        found = re.search(named or "(?!)", " ".join(self.flags.words) if named.startswith("--") else self.args.program)
        return found[0] if found else ""

    def require_importable(self) -> None:
        if not self.is_importable:
            raise Undecided(f"{self.host.name} cannot be imported here", self.host.where)


PRESENCE: Registry[HostFacts] = Registry("presence")


def read_hosts(names: Sequence[str], flags: Flags | None) -> list[HostFacts]:
    """Facts of the named hosts, or of all known ones without names; ValueError for an unknown name."""
    core = find_module("megatron.core")
    folder = Path(core.origin).parent / "datasets" if core and core.origin else None
    helpers = None if folder is None or (folder / "Makefile").is_file() else str(folder)
    found = []
    for host in [host_named(name) for name in names] or HOSTS.values():
        here = host.is_importable()
        symbols = {inspected.symbol.path: inspected for inspected in inspect_symbols(host)} if here else {}
        version = host.read_version() if here else None
        found.append(HostFacts(host, here, version, symbols, flags, bool(names), helpers))
    return found


def examine_hosts(names: Sequence[str], words: Sequence[str], flags_file: Path | None) -> dict[str, list[Finding]]:
    """Findings about each named host (without names: every known one) and about this Python, by subject.

    ``words``: flags of the only named host, instead of ``flags_file``. Raises ValueError where a host is unknown, or
    the flags are unreadable, given twice, or not for exactly one host.
    """
    if words and flags_file:
        raise ValueError("flags must be given after -- or with --flags-file, not both")
    flags = Flags(words) if words else Flags.of_file(flags_file) if flags_file else None
    if flags is not None and len(names) != 1:
        raise ValueError("flags need exactly one --host, the codebase that they are for")
    hosts = {f"host {facts.host.name}": check_host(facts) for facts in read_hosts(names, flags)}
    return {**hosts, ENVIRONMENT.subject: ENVIRONMENT.run(read_environment())}


def check_host(facts: HostFacts) -> list[Finding]:
    """All findings about one host, in order; only its absence if it is absent and nobody asked for it."""
    if not facts.is_importable and not facts.asked:
        return [PRESENCE["importable"].run(facts)]
    return Registry(facts.host.name, PRESENCE, symbol_checks(facts.host), flag_checks(facts.host)).run(facts)


def symbol_checks(host: Host) -> Registry[HostFacts]:
    """One check per symbol: its signature in the host's source against the one that the patch was made for."""
    registry: Registry[HostFacts] = Registry("symbols")
    fix = f"Use {host.name} {' or '.join(host.versions) or host.tested}."

    def look(symbol: Symbol, facts: HostFacts) -> Finding:
        facts.require_importable()
        inspected, summary = facts.symbols[symbol.path], symbol.summary
        if inspected.problem and symbol.when:
            return warning(f"{inspected.problem}; patch refuses only settings that need it", fix)
        if inspected.problem:
            return error(inspected.problem, fix)
        if inspected.added:
            new = ", ".join(inspected.added)
            return warning(f"takes {new}, too, which the patch does not know; {summary}", fix)
        if inspected.changed:
            compare = "Compare a step under correction none with one of the host alone."
            return note(f"its code is not that of {host.tested}; {summary}", compare)
        return good(f"takes ({inspected.parameters}); {summary}")

    for symbol in host.symbols:
        registry.add(Check(symbol.path, "signature in the source against that of the patch", partial(look, symbol)))
    return registry


def flag_checks(host: Host) -> Registry[HostFacts]:
    """The checks of a host's flags, in the order in which their names appear in the tables."""
    registry: Registry[HostFacts] = Registry("flags")

    @registry.check
    def shell_variables(facts: HostFacts) -> Finding:
        """Words that the shell replaces."""
        if named := facts.flags.hiding:
            return note(f"flags may hide in {named}, so a flag that seems to be missing may be set", EXPANDED)
        return good("every flag is spelled out, or is in a plain variable of the script")

    rules = host.flag_rules if host.reads_overrides else (*MEGATRON_RULES, *host.flag_rules)
    for name in dict.fromkeys(rule.name for rule in rules):
        of_name = [rule for rule in rules if rule.name == name]
        registry.add(Check(name, "flags of the host", partial(_first_mistake, of_name)))
    return registry


def _first_mistake(rules: Sequence[FlagRule], facts: HostFacts) -> Finding:
    if facts.without_rl:
        return good(f"`{facts.without_rl}` has no policy gradient that a gap could spoil")
    missing: Undecided | None = None
    for rule in rules:
        try:
            if mistake := rule.mistake(facts.args):
                return Finding(rule.name, rule.severity, mistake, rule.fix)
        except Undecided as fact:
            missing = missing or fact
    if missing is not None:
        raise missing
    return good(next(rule.good for rule in rules if rule.good))


@PRESENCE.check
def importable(facts: HostFacts) -> Finding:
    """sys.path against the host's module."""
    if facts.is_importable:
        return good(f"{facts.host.module} is on sys.path")
    fix = facts.host.where or f"Put {facts.host.module} on PYTHONPATH."
    problem = f"no module {facts.host.module} on sys.path"
    if facts.given_flags is not None:
        # a login node: the flags are what can be checked there
        return warning(f"{problem}: the flags are checked, the functions that patch replaces are not", fix)
    return (error if facts.asked else note)(problem, fix)


@PRESENCE.check
def version(facts: HostFacts) -> Finding:
    """The host's version against those that the patch was written for."""
    facts.require_importable()
    host = facts.host
    if not host.knows(facts.version):
        problem = f"{host.name} is of version {facts.version}, and patch knows {', '.join(host.versions)}"
        if host.is_newer(facts.version):
            return warning(f"{problem}; the parameters of its symbols were compared, and no more", "Begin with none.")
        return error(problem, "Use a version that patch knows.")
    return good(f"version {facts.version or 'unknown'}; tested: {host.tested}")


@PRESENCE.check
def python(facts: HostFacts) -> Finding:
    """This Python against the versions that the host's metadata allow."""
    facts.require_importable()
    pythons = facts.host.pythons
    if pythons is not None and facts.python not in pythons:
        problem = f"this is Python {facts.python}, and {facts.host.name} needs Python {pythons}"
        return error(problem, "Run it, and doctor, in the environment that trains.")
    return good(f"Python {facts.python}")


@PRESENCE.check
def dataset_helpers(facts: HostFacts) -> Finding:
    """The installed dataset helpers against those that training would compile when it starts."""
    facts.require_importable()
    if facts.helpers_folder is None or not facts.host.compiles_helpers:
        return good("make has what it needs, or is not called")
    folder = facts.helpers_folder
    return warning(
        f"rank 0 runs make in {folder}, which has no Makefile, and stops, unless your program prevents it",
        "Copy the Makefile of NVIDIA/Megatron-LM's megatron/core/datasets there, or set megatron.core.datasets.utils."
        "compile_helpers = lambda: None before pretrain: a wheel has the helpers compiled.",
    )
