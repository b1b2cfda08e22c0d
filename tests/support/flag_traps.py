"""What doctor finds in the flags or overrides of a host."""

from dataclasses import replace

from megatron_rc.doctor.host.checks import flag_checks, read_hosts
from megatron_rc.doctor.host.flags import Flags
from megatron_rc.doctor.registry import Finding
from megatron_rc.integrations.hosts import HOSTS


def traps(host: str, flags: str | Flags) -> dict[str, Finding]:
    """Findings by their check, as for a host that this Python can import."""
    (facts,) = read_hosts([host], Flags(flags.split()) if isinstance(flags, str) else flags)
    findings = flag_checks(HOSTS[host]).run(replace(facts, is_importable=True))
    return {finding.check: finding for finding in findings}
