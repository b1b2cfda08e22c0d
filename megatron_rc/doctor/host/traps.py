"""Checks of the flags of a host: one per name among the rules for every Megatron host and the host's own rules."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from megatron_rc.doctor.host.facts import HostFacts
from megatron_rc.doctor.host.flags import EXPANDED, Arguments
from megatron_rc.doctor.registry import Outcome, Registry, bad, good
from megatron_rc.integrations.flag_rules import FlagRule
from megatron_rc.integrations.symbols import Host

MEGATRON_DEFAULTS: dict[str, Any] = {
    "moe_enable_routing_replay": False,
    "moe_router_fusion": False,
    "moe_router_dtype": None,
    "num_experts": None,
    "mtp_num_layers": 0,
    "recompute_granularity": None,
}
"""Arguments of Megatron that the rules below read."""

_INTERLEAVED = [
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "virtual_pipeline_model_parallel_size",
    "microbatch_group_size_per_virtual_pipeline_stage",
]

MEGATRON_RULES = (
    FlagRule(
        name="router-fusion",
        wrong=lambda args: args.moe_router_fusion and args.moe_enable_routing_replay,
        problem="the fused router selects its experts before the replay is asked, so the replay is silently ignored",
        fix="Drop --moe-router-fusion.",
        good="no routes are replayed by a fused router",
    ),
    FlagRule(
        name="replay-and-recompute",
        wrong=lambda args: (
            args.moe_enable_routing_replay
            and args.recompute_granularity == "full"
            and any(getattr(args, name, None) for name in _INTERLEAVED)
        ),
        problem="a recomputed layer takes its routes from a queue, first in, first out, which is not the order of "
        "interleaved stages",
        fix="Drop --recompute-granularity full, or interleaved pipeline stages.",
        good="no layer with replayed routes is computed again in the backward pass",
    ),
    FlagRule(
        name="replay-and-recompute",
        severity="warning",
        wrong=lambda args: args.moe_enable_routing_replay and args.recompute_granularity == "full",
        problem="a recomputed layer routes anew unless routes are replayed in the backward pass",
        fix="Set RouterReplayAction.REPLAY_BACKWARD before the backward pass, or drop --recompute-granularity full.",
    ),
    FlagRule(
        name="replay-and-mtp",
        severity="warning",
        wrong=lambda args: args.moe_enable_routing_replay and args.mtp_num_layers > 0,
        problem="routers of --mtp-num-layers register themselves beside those of the decoder",
        fix="Match replayed routes to decoder layers by walking the model, not by the order of registration.",
        good="no router but the decoder's takes part in a replay",
    ),
    FlagRule(
        name="router-dtype",
        severity="warning",
        wrong=lambda args: args.num_experts is not None and args.moe_router_dtype in (None, "none"),
        problem="router logits in the model's precision have ties, which every engine breaks in its own way",
        fix="Add --moe-router-dtype fp32.",
        good="router logits are fp32 or more, or no --num-experts is given",
    ),
)


def flag_checks(host: Host) -> Registry[HostFacts]:
    """The checks of a host's flags, in the order in which their names appear in the tables."""
    registry: Registry[HostFacts] = Registry("flags")

    @registry.check("shell-variables", compares="words that the shell replaces", severity="note", fix=EXPANDED)
    def shell_variables(facts: HostFacts) -> Outcome:
        hidden = facts.flags.variables
        if hidden:
            return bad(f"flags may hide in {', '.join(hidden[:5])}, so a flag that seems to be missing may be set")
        return good("every flag is spelled out")

    rules = (*MEGATRON_RULES, *host.flag_rules)
    for name in dict.fromkeys(rule.name for rule in rules):
        look = partial(_first_mistake, [rule for rule in rules if rule.name == name])
        registry.check(name, compares="flags of the host", severity="error", fix="")(look)
    return registry


def _first_mistake(rules: Sequence[FlagRule], facts: HostFacts) -> Outcome:
    args = Arguments(facts.flags, {**MEGATRON_DEFAULTS, **facts.host.flag_defaults}, facts.host.config_flag)
    other = "unpatched runs" if facts.is_patched else "patched runs"
    for rule in rules:
        problem = rule.problem_in(args) if rule.made_by != other else None
        if problem:
            return bad(problem, severity=rule.severity, fix=rule.fix)
    return good(rules[0].good)
