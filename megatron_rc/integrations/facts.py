"""Facts about a run that each host states in its own settings, and the rules about them that several hosts share.

A host has those of `KNOWN` that its settings state. `rules_of` makes its rules, so that doctor and a patch judge one
mistake in one way, whatever the host calls the setting. Rules that one host alone has are beside its facts.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rc.integrations.flag_rules import FlagRule
from megatron_rc.models.hf_checkpoint import Checkpoint, read_checkpoint


class Fact(NamedTuple):
    """How one host states a fact."""

    read: Callable[[Any], Any]
    """Its value in the host's arguments or overrides."""
    setting: str = ""
    """The flag or dotted path that states it, in the rule's sentences."""
    fix: str = ""
    """What to change, one sentence, where the rule's own does not fit."""


def stated_by(setting: str, fix: str = "") -> Fact:
    """A fact that is the value of one setting: a flag with its dashes, or a dotted path."""
    return Fact(lambda args: value_of(args, setting), setting, fix)


def value_of(args: Any, setting: str) -> Any:
    """The value of a flag, such as "--lr", or of a dotted path."""
    return getattr(args, setting[2:].replace("-", "_")) if setting.startswith("--") else args[setting]


def narrowed_by(*settings: str, fix: str = "") -> Fact:
    """The fact "narrowed" of a host's top-p and top-k, or of that one whose kept ids the trainer does not get."""

    def read(args: Any) -> str:
        for setting in settings:
            value = value_of(args, setting)
            if value not in (None, -1, 0, 1) or (value == 1 and setting.endswith("k")):
                return f"{setting}={value}"
        return ""

    whole = " and ".join(f"{setting}={-1 if setting.endswith('k') else 1}" for setting in settings)
    return Fact(read, whole, fix)


def quantized(path: object) -> Checkpoint | None:
    """The checkpoint, where it is quantised."""
    return found if (found := _read(path)).is_quantized else None


def with_experts(path: object) -> Checkpoint | None:
    """The checkpoint, where it is a mixture of experts."""
    return found if (found := _read(path)).is_moe else None


def _read(path: object) -> Checkpoint:
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    return read_checkpoint(path, Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser())


Facts = Mapping[str, Fact]
KNOWN = {
    "temperature": "the sampler's temperature",
    "logprobs_mode": "processed_logprobs, or what else the sampler returns; False where that is as good",
    "narrowed": "the setting by which tokens come from a part of the vocabulary that the trainer does not know",
    "rollout_logprobs": "whether the sampler's log-probs reach the trainer",
    "corrected": "whether a correction needs them",
    "own_correction": "the setting by which the host corrects the same gap beside a patch",
    "quantized": "the setting that quantises rollouts",
    "stale": "whether older weights sample rollouts",
    "bounded": "whether something bounds pi / mu, or the gap is to be seen without it",
    "quantized_checkpoint": "the Checkpoint that engine and trainer read, where it is quantised",
    "experts": "the Checkpoint, where it is a mixture of experts",
    "routes_replayed": "whether the trainer takes the sampler's routes, or has no way to",
    "routers": "whether the trainer is known to have routers",
    "router_dtype": "the precision of their logits; none: the model's",
    "fused_router": "whether a fused kernel chooses experts",
    "replays": "whether any routes are replayed, those of the trainer's own earlier pass too",
}
"""What a host may state, by name: it leaves out what it does not have, or what its own rules judge."""


class Run:
    """The facts of one run; each is read when a rule asks for it."""

    def __init__(self, facts: Facts, args: Any) -> None:
        self._facts, self._args = facts, args

    def __getattr__(self, name: str) -> Any:
        return self._facts[name].read(self._args)


class _SharedRule(NamedTuple):
    needs: tuple[str, ...]
    """The facts that it reads; its sentences name the setting of the first one, which is to be changed."""
    rule: FlagRule


_QUANTIZED = "although k3 near 1e-2 is usual with FP8"
RULES = (
    _SharedRule(("temperature",), FlagRule("temperature", lambda run: run.temperature <= 0,
        "a greedy sampler has no log-prob that the trainer's could be compared with",
        "Set {setting} above 0.", good="the sampler's temperature is above 0")),
    _SharedRule(("logprobs_mode", "temperature"), FlagRule("logprobs-mode",
        lambda run: (mode := run.logprobs_mode) and mode != "processed_logprobs" and run.temperature != 1 and mode,
        "{setting}={found} returns log-probs before the temperature, and the trainer divides its logits by it",
        "Set {setting}=processed_logprobs.", good="log-probs are those after the temperature")),
    _SharedRule(("narrowed",), FlagRule("top-p-top-k", lambda run: run.narrowed,
        "{found} draws from a part of the vocabulary that the trainer does not know, so pi and mu are normalised over "
        "different sets",
        "Set {setting}.", good="sampler and trainer have log-probs over the same ids")),
    _SharedRule(("rollout_logprobs", "corrected"), FlagRule("rollout-logprobs",
        lambda run: not run.rollout_logprobs and run.corrected,
        "the trainer gets no log-probs of the sampler, so the correction cannot act",
        "Set {setting}.", good="the sampler's log-probs reach the trainer")),
    _SharedRule(("rollout_logprobs",), FlagRule("rollout-logprobs", lambda run: not run.rollout_logprobs,
        "the trainer gets no log-probs of the sampler, so the gap is neither measured nor corrected",
        "Set {setting}.", severity="note")),
    _SharedRule(("own_correction",), FlagRule("two-corrections", lambda run: run.own_correction,
        "{found} counts pi / mu a second time", "Drop {setting}.", good="one correction at most acts")),
    _SharedRule(("bounded", "quantized"), FlagRule("quantized-rollouts",
        lambda run: (by := run.quantized) and not run.bounded and by,
        f"{{found}} quantises rollouts and nothing bounds pi / mu, {_QUANTIZED}",
        "", good="rollouts are not quantised, or corrected", severity="warning")),
    _SharedRule(("bounded", "stale"), FlagRule("asynchronous-rollouts", lambda run: run.stale and not run.bounded,
        "rollouts come from older weights and nothing bounds pi / mu",
        "", good="rollouts come from the current weights, or are corrected", severity="warning")),
    _SharedRule(("quantized_checkpoint",), FlagRule("quantized-checkpoint", lambda run: run.quantized_checkpoint,
        "{found.name} is a quantised checkpoint by its {found.evidence}, and the trainer reads the weights in another "
        "precision than the engine",
        "Train from the bfloat16 checkpoint, and quantise rollouts with {setting}.",
        good="nothing says that the checkpoint is quantised", severity="warning")),
    _SharedRule(("routes_replayed", "experts"), FlagRule("moe-replay",
        lambda run: (model := run.experts) and not run.routes_replayed and model,
        "{found.name} is a mixture of experts by its {found.evidence}, and trainer and engine choose experts by "
        "themselves",
        "Set {setting}.", good="routes are replayed, or nothing says that the model has experts", severity="warning")),
    _SharedRule(("router_dtype", "routers"), FlagRule("router-dtype",
        lambda run: run.routers and run.router_dtype in (None, "none", "None"),
        "router logits in the model's precision have ties, which every engine breaks in its own way",
        "Set {setting}=fp32.", good="router logits are fp32 or more, or nothing says that the model has experts",
        severity="warning")),
    _SharedRule(("fused_router", "replays"), FlagRule("router-fusion", lambda run: run.fused_router and run.replays,
        "the fused router selects its experts before the replay is asked, so the replay is silently ignored",
        "Drop {setting}.", good="no routes are replayed by a fused router")),
)  # fmt: skip


def rules_of(facts: Facts) -> tuple[FlagRule, ...]:
    """The shared rules about the facts that a host has, in the order of `RULES`."""
    assert facts.keys() <= KNOWN.keys()
    return tuple(_bound(each.rule, facts, facts[each.needs[0]]) for each in RULES if facts.keys() >= {*each.needs})


def _bound(rule: FlagRule, facts: Facts, fact: Fact) -> FlagRule:
    problem, fix = (text.replace("{setting}", fact.setting) for text in (rule.problem, fact.fix or rule.fix))
    return replace(rule, wrong=lambda args: rule.wrong(Run(facts, args)), problem=problem, fix=fix)


def captures_iteration(args: Any) -> bool:
    """Whether Megatron captures the whole training iteration in a CUDA graph."""
    # older releases name the scope in a flag of its own
    return args.cuda_graph_impl == "full_iteration" or args.cuda_graph_scope == "full_iteration"


_INTERLEAVED = [
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "virtual_pipeline_model_parallel_size",
    "microbatch_group_size_per_virtual_pipeline_stage",
]

MEGATRON_DEFAULTS: Mapping[str, Any] = {
    "cuda_graph_impl": "none",
    "cuda_graph_scope": None,
    "moe_enable_routing_replay": False,
    "moe_router_fusion": False,
    "moe_router_dtype": None,
    "num_experts": None,
    "mtp_num_layers": 0,
    "recompute_granularity": None,
    **dict.fromkeys(_INTERLEAVED),
}
"""Megatron's own arguments that rules read."""

MEGATRON_FACTS = {
    "routers": Fact(lambda args: args.num_experts is not None),
    "router_dtype": stated_by("--moe-router-dtype"),
    "fused_router": stated_by("--moe-router-fusion"),
    "replays": stated_by("--moe-enable-routing-replay"),
}
MEGATRON_RULES = (
    *rules_of(MEGATRON_FACTS),
    FlagRule("replay-and-recompute",
        lambda args: (
            args.moe_enable_routing_replay
            and args.recompute_granularity == "full"
            and any(getattr(args, name) for name in _INTERLEAVED)
        ),
        "a recomputed layer takes its routes from a queue, first in, first out, which is not the order of interleaved "
        "stages",
        "Drop --recompute-granularity full, or interleaved pipeline stages.",
        good="no layer with replayed routes is computed again in the backward pass"),
    FlagRule("replay-and-recompute",
        lambda args: args.moe_enable_routing_replay and args.recompute_granularity == "full",
        "a recomputed layer routes again unless routes are replayed in the backward pass",
        "Set RouterReplayAction.REPLAY_BACKWARD before the backward pass, or drop --recompute-granularity full.",
        severity="warning"),
    FlagRule("replay-and-mtp", lambda args: args.moe_enable_routing_replay and (args.mtp_num_layers or 0) > 0,
        "routers of --mtp-num-layers register themselves next to those of the decoder",
        "Match replayed routes to decoder layers by walking the model, not by the order of registration.",
        good="no router but the decoder's takes part in a replay", severity="warning"),
)  # fmt: skip
"""Mistakes in Megatron's own flags, which every host takes."""
