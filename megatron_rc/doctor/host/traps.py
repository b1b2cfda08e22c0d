"""Checks of the flags of a host: one per name among the rules for every Megatron host and the host's own rules."""

from collections.abc import Sequence
from functools import partial

from megatron_rc.doctor.host.facts import HostFacts
from megatron_rc.doctor.host.flags import EXPANDED, MAX_NAMED
from megatron_rc.doctor.registry import Check, Finding, Registry, Undecided, good, note
from megatron_rc.integrations.flag_rules import MEGATRON_RULES, FlagRule
from megatron_rc.integrations.symbols import Host


def flag_checks(host: Host) -> Registry[HostFacts]:
    """The checks of a host's flags, in the order in which their names appear in the tables."""
    registry: Registry[HostFacts] = Registry("flags")

    @registry.check
    def shell_variables(facts: HostFacts) -> Finding:
        """Words that the shell replaces."""
        hidden = facts.flags.hidden
        if hidden:
            named = ", ".join(hidden[:MAX_NAMED])
            return note(f"flags may hide in {named}, so a flag that seems to be missing may be set", EXPANDED)
        return good("every flag is spelled out, or is in a plain variable of the script")

    rules = host.flag_rules if host.reads_overrides else (*MEGATRON_RULES, *host.flag_rules)
    for name in dict.fromkeys(rule.name for rule in rules):
        look = partial(_first_mistake, [rule for rule in rules if rule.name == name])
        registry.add(Check(name, "flags of the host", look))
    return registry


def _first_mistake(rules: Sequence[FlagRule], facts: HostFacts) -> Finding:
    if facts.without_rl:
        return good(f"`{facts.without_rl}` has no policy gradient that a gap could spoil")
    other = "unpatched runs" if facts.flags.names_beginning("rc-") else "patched runs"
    missing: Undecided | None = None
    for rule in rules:
        try:
            if rule.made_by != other and (mistake := rule.mistake(facts.args)):
                return Finding(rule.name, rule.severity, mistake, rule.fix)
        except Undecided as fact:
            missing = missing or fact
    if missing is not None:
        raise missing
    return good(next(rule.good for rule in rules if rule.good))
