"""Checks of a host codebase: whether the patch was made for it, its flags, and what its Python lacks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_rc.doctor.host.facts import Environment, HostFacts, read_environment, read_hosts
from megatron_rc.doctor.host.flags import Flags
from megatron_rc.doctor.host.traps import flag_checks
from megatron_rc.doctor.registry import Finding, Outcome, Registry, Severity, bad, good
from megatron_rc.integrations.symbols import Host
from megatron_rc.versions import MEGATRON_CORE, TRITON, is_older, is_release

INSTALL = "pip install 'megatron-rc[train]', or run doctor in the environment that trains."
ENVIRONMENT: Registry[Environment] = Registry("Python environment")
PRESENCE: Registry[HostFacts] = Registry("presence")


def examine_hosts(names: Sequence[str], words: Sequence[str], flags_file: Path | None) -> dict[str, list[Finding]]:
    """Findings about this Python and about each host, by name.

    Args:
        names: hosts; empty: all that are known.
        words: flags of the named host.
        flags_file: a file with these flags.

    Raises:
        ValueError: an unknown host; flags for no host or several; flags given twice, or unreadable.
    """
    if words and flags_file:
        raise ValueError("flags must be given after -- or with --flags-file, not both")
    flags = Flags(words) if words else Flags.of_file(flags_file) if flags_file else None
    if flags is not None and len(names) != 1:
        raise ValueError("flags need exactly one --host, the codebase that they are for")
    hosts = {f"host {facts.host.name}": check_host(facts) for facts in read_hosts(names, flags)}
    return {ENVIRONMENT.subject: ENVIRONMENT.run(read_environment()), **hosts}


def check_host(facts: HostFacts) -> list[Finding]:
    """Every check of one host, in order; for a host that is absent and that nobody named, only its absence."""
    if not facts.is_importable and not facts.asked:
        return [PRESENCE["importable"].run(facts)]
    parts = (PRESENCE, symbol_checks(facts.host), flag_checks(facts.host))
    return Registry.joined(facts.host.name, *parts).run(facts)


def symbol_checks(host: Host) -> Registry[HostFacts]:
    """One check per symbol: its signature in the host's source against the one that the patch was made for."""
    registry: Registry[HostFacts] = Registry("symbols")
    for symbol in host.symbols:

        def look(facts: HostFacts, path: str = symbol.path, summary: str = symbol.summary) -> Outcome:
            facts.require_importable()
            inspected = facts.symbols[path]
            return bad(inspected.problem) if inspected.problem else good(f"takes ({inspected.parameters}); {summary}")

        versions = " or ".join(host.versions) or host.tested
        registry.check(
            symbol.path,
            compares="signature in the source against that of the patch",
            severity="error",
            fix=f"Use {host.name} {versions}.",
        )(look)
    return registry


@PRESENCE.check("importable", compares="sys.path against the host's module", severity="error", fix="")
def importable(facts: HostFacts) -> Outcome:
    if not facts.is_importable:
        severity: Severity = "error" if facts.asked else "note"
        fix = facts.host.where or f"Put {facts.host.module} on PYTHONPATH."
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


@PRESENCE.check(
    "dataset-helpers",
    compares="what training compiles when it starts against the files that are installed",
    severity="warning",
    fix="Copy the Makefile of NVIDIA/Megatron-LM's megatron/core/datasets there, or set "
    "megatron.core.datasets.utils.compile_helpers = lambda: None before pretrain: a wheel has the helpers compiled.",
)
def dataset_helpers(facts: HostFacts) -> Outcome:
    facts.require_importable()
    if facts.helpers_folder is None or not facts.host.module.startswith("megatron."):
        return good("make has what it needs, or is not called")
    return bad(
        f"rank 0 runs make in {facts.helpers_folder}, which has no Makefile, and stops, unless your program prevents it"
    )


@ENVIRONMENT.check(
    "megatron-core",
    compares="its version against those on which this package was run",
    severity="warning",
    fix=f"Install megatron-core {MEGATRON_CORE[0]} to {MEGATRON_CORE[-1]}.",
)
def megatron_core(facts: Environment) -> Outcome:
    if facts.megatron_core is None:
        return bad("megatron-core is not installed: nothing trains here", severity="note", fix=INSTALL)
    if not is_release(facts.megatron_core, MEGATRON_CORE):
        return bad(f"megatron-core {facts.megatron_core} is none of {', '.join(MEGATRON_CORE)}")
    return good(f"megatron-core {facts.megatron_core}")


def _library(module: str, name: str, without: str, fix: str) -> None:
    @ENVIRONMENT.check(name, compares="installed or not", severity="note", fix=fix)
    def look(facts: Environment) -> Outcome:
        version = facts.libraries[module]
        return bad(f"{name} is missing: {without}") if version is None else good(f"{name} {version}")


_library("torch", "torch", "settings, reports and this command work, and nothing that takes tensors does", INSTALL)


@ENVIRONMENT.check(
    "triton",
    compares=f"its version against {TRITON.oldest}, the oldest that the kernels run with",
    severity="note",
    fix=f"Install triton {TRITON.oldest} or newer.",
)
def triton(facts: Environment) -> Outcome:
    found = facts.libraries["triton"]
    if found is None:
        return bad("triton is missing: the kernels of megatron_rc do not run, its PyTorch reference does")
    if is_older(found, TRITON.oldest):
        return bad(f"triton {found} is too old for the kernels of megatron_rc; its PyTorch reference runs")
    return good(f"triton {found}")


_library(
    "transformer_engine",
    "transformer-engine",
    "Megatron runs its local layers, without context parallelism, fp8, or tensor parallelism of experts",
    "pip install transformer-engine[pytorch] (it compiles, with nvcc), or use an NGC container.",
)
_library(
    "flash_attn",
    "flash-attn",
    "packed sequences take TransformerEngine's fused attention, or Megatron's local one",
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
        return bad("NVIDIA Apex is missing: weight gradients are added by a separate kernel, norms are torch's")
    if not facts.apex_kernels:
        return bad(
            "the package apex that is installed is not NVIDIA's, which is not on PyPI",
            severity="warning",
            fix="pip uninstall apex, and build NVIDIA/apex from source if it is wanted.",
        )
    return good(f"NVIDIA Apex {facts.libraries['apex']}")
