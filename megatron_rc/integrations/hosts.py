"""The host codebases that `patch` and `megatron-rc doctor` know."""

from megatron_rc.integrations import megatron_lm, megatron_training, nemo_rl, verl
from megatron_rc.integrations.slime import hosts as slime_hosts
from megatron_rc.integrations.symbols import Host

_ALL = (megatron_lm.HOST, megatron_training.HOST, slime_hosts.SLIME, slime_hosts.MILES, verl.HOST, nemo_rl.HOST)
HOSTS: dict[str, Host] = {host.name: host for host in _ALL}
"""By name. A module of this table imports neither its host nor torch before `make` or `prepare` runs."""


def host_named(name: str) -> Host:
    """The host of that name; "auto" is the only importable one, not counting those that it contains.

    Raises:
        ValueError: an unknown name; "auto" with no host or several.
    """
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
