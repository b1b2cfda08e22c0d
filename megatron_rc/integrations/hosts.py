"""The host codebases that `patch` and `megatron-rc doctor` know."""

from megatron_rc.integrations import megatron_lm, megatron_training, miles, ms_swift, nemo_rl, slime, verl
from megatron_rc.integrations.symbols import Host

_FOLDERS = (megatron_lm, megatron_training, slime, miles, verl, nemo_rl, ms_swift)
HOSTS: dict[str, Host] = {folder.HOST.name: folder.HOST for folder in _FOLDERS}
"""By name. None of these folders imports its host or torch before a function of it is replaced."""


def host_named(name: str) -> Host:
    """The host of that name, or for "auto" the only importable one that no other contains; ValueError for all else."""
    if name in HOSTS:
        return HOSTS[name]
    known = ", ".join(map(repr, HOSTS))
    if name != "auto":
        raise ValueError(f"host must be 'auto' or one of {known}, got {name!r}")
    importable = [host for host in HOSTS.values() if host.is_importable()]
    contained = {inner for host in importable for inner in host.contains}
    candidates = [host for host in importable if host.name not in contained]
    if len(candidates) != 1:
        names = ", ".join(repr(host.name) for host in candidates) or "none of them"
        raise ValueError(f"host must be one of {known}: 'auto' needs one that Python can import, and finds {names}")
    return candidates[0]
