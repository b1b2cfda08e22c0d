"""The packages that this one runs with: which releases it supports, which is installed, which extra brings them.

Also where this package itself comes from.
"""

import ast
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import NamedTuple

Release = tuple[int, ...]


def release_of(version: str) -> Release | None:
    """The numbers that a version begins with, (0, 5, 23) for "0.5.23rc1"; None where it begins with none."""
    numbers = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(map(int, numbers[1].split("."))) if numbers else None


@dataclass(frozen=True)
class Range:
    """Releases from the oldest to the newest, both included; pre-releases and builds count as their release."""

    oldest: str
    newest: str

    def __contains__(self, version: str) -> bool:
        release, newest = release_of(version), release_of(self.newest) or ()
        return release is not None and not is_older(version, self.oldest) and release[: len(newest)] <= newest

    def __str__(self) -> str:
        return f"{self.oldest} to {self.newest}"


def is_older(version: str, than: str) -> bool:
    """Whether a version is older than the release ``than``; pre-releases and builds of ``than`` are not older."""
    release = release_of(version)
    return release is not None and release < (release_of(than) or ())


def is_release(version: str | None, known: tuple[str, ...]) -> bool:
    """Whether a version is one of the known ones, or a release of it: 0.20.1rc0 is of 0.20, 0.2 is not."""
    return version is not None and any((version + ".").startswith(f"{one}.") for one in known)


REPOSITORY = ""
"""Address of this repository, such as https://github.com/OWNER/NAME; while it is empty, no metadata, help or error
shows a link."""


def link(path: str) -> str:
    """The address of a page of the repository in brackets, for the end of a sentence; empty without `REPOSITORY`."""
    return f" ({REPOSITORY}/blob/main/{path})" if REPOSITORY else ""


def installing(extra: str) -> str:
    """What to run for an extra, as the end of an error; no index has this package."""
    command = f"pip install -c constraints-cpu.txt -e '.[{extra}]'"
    return f"in a checkout of {REPOSITORY or 'megatron-rc'}, run {command} (with a GPU, -c constraints-gpu.txt)"


PYTHON = Range("3.11", "3.13")

MEGATRON_CORE = ("0.16", "0.17", "0.18", "0.19", "0.20")
"""Releases of megatron-core that the trainer is written for."""
MEGATRON_LM = ("0.20",)
"""Releases of megatron-core in the trees of Megatron-LM that `patch("megatron-lm")` knows."""
MEGATRON_TRAINING = ("0.17", "0.18", "0.19", "0.20")
"""Releases of megatron-core that `patch("megatron-training")` knows: those with `megatron.training`."""
SHORT_TRAIN_STEP = ("0.17", "0.18")
"""Those of them whose train_step has no parameters pg_collection and p2p_communicator."""
PYTHON_OF_MEGATRON_TRAINING = "3.12"
"""The oldest Python for which their wheels are made."""
VERL = ("0.9", "0.10")
"""Releases of verl that `patch("verl")` knows."""
NEMO_RL = ("0.6",)
"""Releases of NeMo-RL that `patch("nemo-rl")` knows."""

MS_SWIFT = ("4.6",)
"""Releases of ms-swift that `patch("ms-swift")` knows."""

PYTHON_OF_MEGATRON_LM = Range("3.12", "3.14")
PYTHON_OF_VERL = Range("3.10", "3.12")
PYTHON_OF_NEMO_RL = Range("3.13", "3.13")
"""The Pythons that the metadata of these hosts accept; this package runs on others, too."""

TRITON = Range("3.5", "3.9")
"""The kernels need the oldest of these (`constexpr_function`). Releases newer than the newest are used untested."""

TORCH_WIDE_PRODUCTS = "2.8"
"""From this release on, a GPU multiplies bf16 and fp16 matrices into fp32 (`torch.mm` with `out_dtype`)."""

SGLANG = Range("0.5.20", "0.5.23")
"""Releases of SGLang that the bridge is written for."""
SGLANG_WEIGHT_VERSION = "0.5.20"
"""From this release on, a server says which weights it serves, and offers what an update of them needs."""
SGLANG_KEPT_IDS = "0.5.20"
"""From this release on, a server returns the kept ids of top-k and top-p sampling."""


class Tested(NamedTuple):
    """Releases that ran together, and what ran with them."""

    python: str
    core: str
    triton: str
    sglang: str
    what: str


TESTED = (
    Tested("3.11", "0.16.1", "3.9.0", "0.5.23", "every test of `launch/test.sh`"),
    Tested(
        "3.11", "0.17.1, 0.19.2", "3.9.0", "", '`patch("megatron-training")` in `launch/test.sh`, from unpacked wheels'
    ),
    Tested("3.11", "", "3.6.0", "", "every kernel in Triton's interpreter, in `launch/test.sh`"),
    Tested("3.12", "0.19.2", "3.9.0", "", "light core, correction, kernels compiled, quickstart, in `--full`"),
    Tested("3.13", "0.19.2", "3.9.0", "", "light core, correction, kernels compiled, quickstart, in `--full`"),
    Tested("3.11", "0.18.2, 0.20.0", "3.9.0", "", "the hosts, by hand ([hosts/](hosts/index.md))"),
)
"""The first row is that of constraints-cpu.txt and launch/sglang_cpu/requirements.txt."""


def matrix() -> Iterator[tuple[str, ...]]:
    """One row for each minor release of megatron-core: which Python, Triton and SGLang go with it, and what it runs."""
    for core in MEGATRON_CORE:
        python = Range(PYTHON_OF_MEGATRON_TRAINING, PYTHON.newest) if core in MEGATRON_TRAINING else PYTHON
        patches = ("yes" if core in known else "no" for known in (MEGATRON_TRAINING, MEGATRON_LM))
        yield (core, str(python), f"{TRITON.oldest} or newer", str(SGLANG), "yes", *patches)


def check_linux(what: str) -> None:
    """Refuse what only Linux runs."""
    if sys.platform != "linux":
        raise ValueError(f"{what} needs Linux; on this system analyze, demo, explain, doctor, report and settings work")


def check_core(found: str | None) -> None:
    """Refuse a megatron-core that is too old for the trainer; None, an unreadable version, is left to the import."""
    if found is not None and is_older(found, MEGATRON_CORE[0]):
        raise ValueError(f"megatron-rc needs megatron-core {MEGATRON_CORE[0]} or newer, found {found}")


def megatron_core_version() -> str | None:
    """The version that Python would import, with the pre-release; None where it is absent."""
    return stated_version("megatron.core.package_info")


def stated_version(module: str) -> str | None:
    """__version__, or MAJOR.MINOR.PATCH and PRE_RELEASE, of a module that is not imported; None if it has neither."""
    spec = find_module(module)
    if spec is None or spec.origin is None:
        return None
    constants: dict[str, object] = {
        target.id: node.value.value
        for node in ast.parse(Path(spec.origin).read_bytes()).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    if "__version__" in constants:
        return str(constants["__version__"])
    numbers = [constants.get(part) for part in ("MAJOR", "MINOR", "PATCH")]
    return None if None in numbers else ".".join(map(str, numbers)) + str(constants.get("PRE_RELEASE", ""))


def installed_version(distribution: str) -> str | None:
    """The version in the metadata of an installed distribution; None without metadata."""
    from importlib.metadata import PackageNotFoundError, version  # takes longer than all that --help imports

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def version_of_tree(name: str) -> str | None:
    """The version of an installed distribution, or the one in setup.py or pyproject.toml of its source tree."""
    if installed := installed_version(name):
        return installed
    found = find_module(name)
    for folder in [Path(path).parent for path in found.submodule_search_locations or ()] if found else []:
        for file in (folder / "setup.py", folder / "pyproject.toml"):
            stated = _STATED.search(file.read_text(encoding="utf-8")) if file.is_file() else None
            if stated:
                return stated[1]
    return None


_STATED = re.compile(r"""^\s*version\s*=\s*["']([0-9][^"'\s]*)["']""", re.MULTILINE)


def find_module(name: str) -> ModuleSpec | None:
    """Where a module is, without importing its parents as importlib.util.find_spec does; the spec has its last name."""
    path: list[str] | None = None
    spec = None
    for part in name.split("."):
        # by its dotted name, a namespace package would look for its parent among the imported modules
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return spec


MODULES_OF_EXTRA = {
    "train": ("megatron", "psutil", "safetensors", "torch", "transformers"),
    "sglang": ("aiohttp",),
    "report": ("matplotlib", "tensorboard"),
    "math": ("math_verify",),
    "real": ("gguf", "accelerate", "reasoning_gym"),
}
"""Extra -> modules that it installs. A module that several extras bring is named under the first."""


class MissingExtra(ImportError):
    """A package is missing that one of our extras installs; the message is one sentence that names the extra."""


@contextmanager
def needed_by(what: str) -> Iterator[None]:
    """A block whose imports may need an extra; ``what`` is the command or name that needs it.

    Raises:
        MissingExtra: such an import found no module.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        for extra, modules in MODULES_OF_EXTRA.items():
            if package in modules:
                raise MissingExtra(f"{what} needs {package}: {installing(extra)}") from None
        raise
