"""What this package knows about the other packages that it runs with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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
        release = release_of(version)
        oldest, newest = release_of(self.oldest), release_of(self.newest)
        return release is not None and (oldest or ()) <= release <= (newest or ())

    def __str__(self) -> str:
        return f"{self.oldest} to {self.newest}"


SGLANG_TESTED = Range("0.5.20", "0.5.23")
"""SGLang for which the bridge is written."""

MEGATRON_CORE = ("0.16", "0.17", "0.18", "0.19", "0.20")
"""Releases of megatron-core on which this package was run."""
MEGATRON_LM = ("0.20",)
"""Releases of megatron-core in the trees of Megatron-LM that `patch("megatron-lm")` knows."""
MEGATRON_TRAINING = ("0.17", "0.18", "0.19", "0.20")
"""Releases of megatron-core that `patch("megatron-training")` knows."""
SHORT_TRAIN_STEP = ("0.17", "0.18")
"""Those of them whose train_step has no parameters pg_collection and p2p_communicator."""


def is_release(version: str | None, known: tuple[str, ...]) -> bool:
    """Whether a version is one of the known ones, or a release of it: 0.20.1rc0 is of 0.20, 0.2 is not."""
    return version is not None and any((version + ".").startswith(f"{one}.") for one in known)


MODULES_OF_EXTRA = {
    "train": ("megatron", "psutil", "safetensors", "torch", "transformers"),
    "sglang": ("aiohttp",),
    "report": ("matplotlib", "tensorboard"),
    "math": ("math_verify",),
}
"""Extra of setup.py -> modules whose absence it mends. A module that several extras bring is named under the first."""


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
                raise MissingExtra(f"{what} needs {package}: pip install 'megatron-rc[{extra}]'") from None
        raise
