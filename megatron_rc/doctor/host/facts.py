"""What is known of a host codebase and of the Python that would run it, without importing any of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megatron_rc.doctor.host.flags import Flags
from megatron_rc.doctor.registry import Undecided
from megatron_rc.integrations.hosts import HOSTS, Found, Host, host_named, inspect_symbols
from megatron_rc.integrations.megatron_version import megatron_core_version
from megatron_rc.integrations.symbols import find_module

GIVE_FLAGS = "Give them after --, or in a file with --flags-file."
DISTRIBUTIONS = {
    "torch": "torch",
    "triton": "triton",
    "transformer_engine": "transformer-engine",
    "apex": "apex",
    "flash_attn": "flash-attn",
}
"""Module -> name of the package that brings it."""


@dataclass(frozen=True)
class Environment:
    """The Python that doctor runs in."""

    megatron_core: str | None
    """Version; None where it cannot be imported."""
    libraries: Mapping[str, str | None]
    """Module of `DISTRIBUTIONS` -> version, "unknown" for one without metadata, None for one that is missing."""
    apex_kernels: bool
    """Whether the module that NVIDIA Apex compiles is there; the package of that name on PyPI has none."""


@dataclass(frozen=True)
class HostFacts:
    host: Host
    is_importable: bool
    version: str | None
    symbols: Mapping[str, Found]
    """By path of the symbol."""
    given_flags: Flags | None = None
    asked: bool = False
    """Whether somebody wants to run this host here."""
    helpers_folder: str | None = None
    """Where the host calls make before training, though there is no Makefile."""

    @property
    def flags(self) -> Flags:
        if self.given_flags is None:
            raise Undecided("the host's flags are not known", GIVE_FLAGS)
        return self.given_flags

    @property
    def is_patched(self) -> bool:
        """Whether the command runs the host's script through `megatron-rc patch`."""
        return bool(self.flags.names_beginning("rc-"))

    @property
    def has_experts(self) -> bool:
        return "num-experts" in self.flags

    def require_importable(self) -> None:
        if not self.is_importable:
            raise Undecided(f"{self.host.name} cannot be imported here", WHERE.get(self.host.name, ""))


WHERE = {
    "megatron-lm": "Put a clone of NVIDIA/Megatron-LM on PYTHONPATH: no wheel has megatron/rl.",
    "megatron-training": "Install megatron-core 0.17 or newer (Python 3.12), or put a clone on PYTHONPATH.",
    "slime": "Put a clone of THUDM/slime on PYTHONPATH.",
    "miles": "Put a clone of radixark/miles on PYTHONPATH.",
}


def read_environment() -> Environment:
    return Environment(
        megatron_core_version(),
        {module: _version(module, name) for module, name in DISTRIBUTIONS.items()},
        apex_kernels=find_module("amp_C") is not None,
    )


def read_hosts(names: Sequence[str], flags: Flags | None) -> list[HostFacts]:
    """Facts of the named hosts, or of all known ones when none is named.

    Raises:
        ValueError: an unknown name.
    """
    chosen = [host_named(name) for name in names] or list(HOSTS.values())
    return [_read(host, flags, asked=bool(names)) for host in chosen]


def _read(host: Host, flags: Flags | None, asked: bool) -> HostFacts:
    importable = host.is_importable()
    symbols = {found.symbol.path: found for found in inspect_symbols(host)} if importable else {}
    return HostFacts(
        host, importable, host.read_version() if importable else None, symbols, flags, asked, _unmade_helpers()
    )


def _unmade_helpers() -> str | None:
    core = find_module("megatron.core")
    if core is None or core.origin is None:
        return None
    folder = Path(core.origin).parent / "datasets"
    return None if (folder / "Makefile").is_file() else str(folder)


def _version(module: str, distribution: str) -> str | None:
    if find_module(module) is None:
        return None
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"
