"""Facts about a host codebase and the Python that would run it, read without importing any of it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from platform import python_version

from megatron_rc.doctor.host.flags import Arguments, Flags
from megatron_rc.doctor.host.overrides import Overrides
from megatron_rc.doctor.registry import Undecided
from megatron_rc.integrations.facts import MEGATRON_DEFAULTS
from megatron_rc.integrations.hosts import HOSTS, host_named
from megatron_rc.integrations.symbols import Host, Inspected, inspect_symbols
from megatron_rc.versions import find_module, installed_version, megatron_core_version

LIBRARIES = ("torch", "triton", "transformer_engine", "apex", "flash_attn")
"""Modules whose versions are reported; a package of the same name installs each."""


@dataclass(frozen=True)
class Environment:
    """The Python that doctor runs in."""

    megatron_core: str | None
    """Its version; None if it cannot be imported."""
    libraries: Mapping[str, str | None]
    """Version by module of `LIBRARIES`: "unknown" without metadata, None if the module is missing."""
    apex_kernels: bool
    """The compiled module of NVIDIA Apex exists; the package of that name on PyPI has none."""


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


def read_environment() -> Environment:
    libraries = {name: (installed_version(name) or "unknown") if find_module(name) else None for name in LIBRARIES}
    return Environment(megatron_core_version(), libraries, apex_kernels=find_module("amp_C") is not None)


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
