"""Checks of this Python: the releases of what trains, and what it lacks."""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rc.doctor.registry import Check, Finding, Registry, good, note, warning
from megatron_rc.versions import (
    MEGATRON_CORE,
    TRITON,
    find_module,
    installed_version,
    installing,
    is_older,
    is_release,
    megatron_core_version,
)

INSTALL = f"Run doctor in the environment that trains, or {installing('train')}."
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


ENVIRONMENT: Registry[Environment] = Registry("Python environment")


def read_environment() -> Environment:
    libraries = {name: (installed_version(name) or "unknown") if find_module(name) else None for name in LIBRARIES}
    return Environment(megatron_core_version(), libraries, apex_kernels=find_module("amp_C") is not None)


@ENVIRONMENT.check
def megatron_core(facts: Environment) -> Finding:
    """The installed version against those that this package was tested with."""
    installed = facts.megatron_core
    if installed is None:
        return note("megatron-core is not installed: nothing trains here", INSTALL)
    if not is_release(installed, MEGATRON_CORE):
        problem = f"megatron-core {installed} is none of {', '.join(MEGATRON_CORE)}"
        return warning(problem, f"Install megatron-core {MEGATRON_CORE[0]} to {MEGATRON_CORE[-1]}.")
    return good(f"megatron-core {installed}")


def _library(module: str, name: str, without: str, fix: str) -> None:
    def look(facts: Environment) -> Finding:
        installed = facts.libraries[module]
        return note(f"{name} is missing: {without}", fix) if installed is None else good(f"{name} {installed}")

    ENVIRONMENT.add(Check(name, "installed or not", look))


_library("torch", "torch", "settings, reports and this command work, and nothing that takes tensors does", INSTALL)


@ENVIRONMENT.check
def triton(facts: Environment) -> Finding:
    """The installed version against the oldest that the kernels run with."""
    installed, fix = facts.libraries["triton"], f"Install triton {TRITON.oldest} or newer."
    if installed is None:
        return note("triton is missing: the kernels of megatron_rc do not run, its PyTorch reference does", fix)
    if is_older(installed, TRITON.oldest):
        return note(f"triton {installed} is too old for the kernels of megatron_rc; its PyTorch reference runs", fix)
    return good(f"triton {installed}")


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


@ENVIRONMENT.check
def apex(facts: Environment) -> Finding:
    """Installed or not."""
    if facts.libraries["apex"] is None:
        fix = "Build NVIDIA/apex from source, or pass --no-gradient-accumulation-fusion and --no-persist-layer-norm."
        return note("NVIDIA Apex is missing: weight gradients are added by a separate kernel, norms are torch's", fix)
    if not facts.apex_kernels:
        fix = "pip uninstall apex, and build NVIDIA/apex from source if it is wanted."
        return warning("the package apex that is installed is not NVIDIA's, which is not on PyPI", fix)
    return good(f"NVIDIA Apex {facts.libraries['apex']}")
