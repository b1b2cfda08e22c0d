"""Checks of a host codebase: is it the one that the patch was made for, and what its Python lacks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_rc.doctor.host.facts import WHERE, Environment, HostFacts, read_environment, read_hosts
from megatron_rc.doctor.host.flags import Flags
from megatron_rc.doctor.host.traps_megatron import COMMON, MEGATRON_LM, MEGATRON_TRAINING, SLIME_OR_MILES
from megatron_rc.doctor.registry import Finding, Outcome, Registry, Severity, bad, good
from megatron_rc.integrations.symbols import Host, is_release

CORE_VERSIONS = ("0.16", "0.17", "0.18", "0.19", "0.20")
INSTALL = "pip install 'megatron-rc[train]', or run doctor in the environment that trains."
ENVIRONMENT: Registry[Environment] = Registry("Python environment")
PRESENCE: Registry[HostFacts] = Registry("presence")
TRAPS: dict[str, Registry[HostFacts]] = {
    "megatron-lm": Registry.joined("traps", COMMON, MEGATRON_LM),
    "megatron-training": Registry.joined("traps", COMMON, MEGATRON_TRAINING),
    "slime": Registry.joined("traps", COMMON, SLIME_OR_MILES),
    "miles": Registry.joined("traps", COMMON, SLIME_OR_MILES),
}
"""Known traps in the flags of each host."""


def examine_hosts(names: Sequence[str], words: Sequence[str], flags_file: Path | None) -> dict[str, list[Finding]]:
    """Findings of this Python and of every host, under their names.

    Args:
        names: hosts; none: all that are known.
        words: flags of the named host.
        flags_file: a file with them, instead.

    Raises:
        ValueError: an unknown host; flags without the host that they are for, given twice, or unreadable.
    """
    if words and flags_file:
        raise ValueError("flags must be given after -- or with --flags-file, not both")
    flags = Flags(words) if words else Flags.of_file(flags_file) if flags_file else None
    if flags is not None and len(names) != 1:
        raise ValueError("flags need exactly one --host, the codebase that they are for")
    hosts = {f"host {facts.host.name}": check_host(facts) for facts in read_hosts(names, flags)}
    return {ENVIRONMENT.subject: ENVIRONMENT.run(read_environment()), **hosts}


def check_host(facts: HostFacts) -> list[Finding]:
    """Every check of one host, in order; of one that is not here, and that nobody asked for, only that."""
    if not facts.is_importable and not facts.asked:
        return [PRESENCE["importable"].run(facts)]
    parts = (PRESENCE, symbol_checks(facts.host), TRAPS.get(facts.host.name, COMMON))
    return Registry.joined(facts.host.name, *parts).run(facts)


def symbol_checks(host: Host) -> Registry[HostFacts]:
    """One check a symbol: its signature in the host's source against the one that the patch was made for."""
    registry: Registry[HostFacts] = Registry("symbols")
    for symbol in host.symbols:

        def look(facts: HostFacts, path: str = symbol.path, summary: str = symbol.summary) -> Outcome:
            facts.require_importable()
            found = facts.symbols[path]
            return bad(found.problem) if found.problem else good(f"takes ({found.parameters}); {summary}")

        versions = " or ".join(host.versions) or host.tested
        add = registry.check(
            symbol.path,
            compares="signature in the source against that of the patch",
            severity="error",
            fix=f"Use {host.name} {versions}.",
        )
        add(look)
    return registry


@PRESENCE.check("importable", compares="sys.path against the host's module", severity="error", fix="")
def importable(facts: HostFacts) -> Outcome:
    if not facts.is_importable:
        severity: Severity = "error" if facts.asked else "note"
        fix = WHERE.get(facts.host.name, f"Put {facts.host.module} on PYTHONPATH.")
        return bad(f"no module {facts.host.module} on sys.path", severity=severity, fix=fix)
    return good(f"{facts.host.module} is on sys.path")


@PRESENCE.check(
    "version",
    compares="version against those whose symbols were read",
    severity="error",
    fix="Use a version that patch knows.",
)
def version(facts: HostFacts) -> Outcome:
    facts.require_importable()
    host = facts.host
    if not host.knows(facts.version):
        return bad(f"{host.name} is of version {facts.version}, and patch knows {', '.join(host.versions)}")
    return good(f"version {facts.version or 'unknown'}; tested: {host.tested}")


@ENVIRONMENT.check(
    "megatron-core",
    compares="its version against those that were run",
    severity="warning",
    fix="Install megatron-core>=0.16,<0.20.",
)
def megatron_core(facts: Environment) -> Outcome:
    if facts.megatron_core is None:
        return bad("megatron-core is not installed: nothing trains here", severity="note", fix=INSTALL)
    if not is_release(facts.megatron_core, CORE_VERSIONS):
        return bad(f"megatron-core {facts.megatron_core} is none of {', '.join(CORE_VERSIONS)}")
    return good(f"megatron-core {facts.megatron_core}")


def _library(module: str, name: str, without: str, fix: str) -> None:
    @ENVIRONMENT.check(name, compares="installed or not", severity="note", fix=fix)
    def look(facts: Environment) -> Outcome:
        found = facts.libraries[module]
        return bad(f"{name} is missing: {without}") if found is None else good(f"{name} {found}")


_library("torch", "torch", "settings, reports and this command work, and nothing that takes tensors does", INSTALL)
_library("triton", "triton", "the kernels of megatron_rc do not run, its PyTorch reference does", "Install triton.")
_library(
    "transformer_engine",
    "transformer-engine",
    "Megatron runs its local layers, without context parallelism, fp8, or tensor parallelism of experts",
    "pip install transformer-engine[pytorch] (it compiles, with nvcc), or use an NGC container.",
)
_library(
    "flash_attn",
    "flash-attn",
    "packed sequences go through TransformerEngine's other attention, or Megatron's local one",
    "pip install flash-attn, unless TransformerEngine's fused attention is meant to run.",
)


@ENVIRONMENT.check(
    "apex",
    compares="installed or not",
    severity="note",
    fix="Build NVIDIA/apex from source, or pass --no-gradient-accumulation-fusion and --no-persist-layer-norm.",
)
def apex(facts: Environment) -> Outcome:
    if facts.libraries["apex"] is None:
        return bad("NVIDIA Apex is missing: weight gradients are added by a kernel of their own, norms are torch's")
    if not facts.apex_kernels:
        return bad(
            "the package apex that is installed is not NVIDIA's, which is not on PyPI",
            severity="warning",
            fix="pip uninstall apex, and build NVIDIA/apex from source if it is wanted.",
        )
    return good(f"NVIDIA Apex {facts.libraries['apex']}")
