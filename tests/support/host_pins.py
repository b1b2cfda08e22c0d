"""The releases that the containers of host codebases hold, which an installation must leave alone."""

from packaging.specifiers import SpecifierSet
from packaging.version import Version

HOST_PINS = {
    "Megatron-LM": {"megatron-core": "0.20.0", "transformers": "5.5.3"},
    "slime": {"megatron-core": "0.16.0rc0", "transformers": "5.12.1"},
    "miles": {"transformers": "5.12.1"},
    "verl": {"megatron-core": "0.18.0", "transformers": ">=5.5.3,<5.11"},
    "NeMo-RL": {"transformers": "<5.9", "python": "3.13"},
}
"""Versions that containers of hosts hold: one release, or the range from which the host takes one."""
BROUGHT_BY_HOSTS = {"torch", "triton", "transformers", "megatron-core"}
NEWEST_TRANSFORMERS = ("5.5.3", "5.8.0", "5.10.2", "5.12.1")
"""Releases from which a range of `HOST_PINS` takes its newest."""


def held(pin: str) -> str:
    """The release that a host with this pin holds."""
    return pin if pin[0].isdigit() else max(SpecifierSet(pin).filter(NEWEST_TRANSFORMERS), key=Version)
