"""What doctor finds in the flags or overrides of a host."""

from __future__ import annotations

from dataclasses import replace

from megatron_rc.doctor.host.facts import HostFacts, read_hosts
from megatron_rc.doctor.host.flags import Flags
from megatron_rc.doctor.host.traps import flag_checks
from megatron_rc.doctor.registry import Finding
from megatron_rc.integrations.hosts import HOSTS


def facts(host: str, flags: str) -> HostFacts:
    """Those of a host that this Python can import."""
    (read,) = read_hosts([host], Flags(flags.split()))
    return replace(read, is_importable=True)


def traps(host: str, flags: str) -> dict[str, Finding]:
    return {finding.check: finding for finding in flag_checks(HOSTS[host]).run(facts(host, flags))}
