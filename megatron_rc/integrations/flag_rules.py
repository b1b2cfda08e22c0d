"""Refusing what a host cannot do: corrections, by plain functions, and mistakes in its flags, by rules.

A FlagRule is one mistake in the flags of a host. A patch refuses it, and `megatron-rc doctor` finds it beforehand. Each
host also has a `refuse_settings` for our settings, whatever its own configuration.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from megatron_rc.correction.settings import STATISTICS, RolloutCorrection

Severity = Literal["error", "warning", "note"]
"""error: the gradient is wrong or the job fails. warning: a gap between the policies that a setting closes, or a
combination that nobody tested. note: worth knowing, or not decidable."""


@dataclass(frozen=True)
class FlagRule:
    """A mistake that the arguments of a training script show.

    `megatron-rc doctor` reads the arguments from a command line, a patch from the parsed arguments of the host. A patch
    refuses every mistake of severity "error" that a patched run can make.
    """

    name: str
    """Name of doctor's check. Rules of one name are tried in order, and the first mistake is reported."""
    wrong: Callable[[Any], object]
    """Answers with something true where these arguments (an argparse.Namespace, or one like it) make the mistake."""
    problem: str
    """What is wrong, one sentence without a full stop; {args.NAME} is an argument, {found} the answer of ``wrong``."""
    fix: str
    """How to fix it, in one sentence that names the flag."""
    good: str = ""
    """What doctor says where no rule of this name finds a mistake; the first of them has it."""
    severity: Severity = "error"
    made_by: Literal["every run", "unpatched runs", "patched runs"] = "every run"
    """Which runs can make the mistake: a patch fixes some mistakes of the host, and cannot work with some flags."""

    def mistake(self, args: Any) -> str | None:
        """The sentence about what is wrong with these arguments; None where they do not make the mistake."""
        found = self.wrong(args)
        return self.problem.format(args=args, found=found) if found else None

    def refusal(self, mistake: str) -> str:
        """What is wrong and how to fix it, in one sentence."""
        return f"{mistake}; {self.fix[0].lower()}{self.fix[1:].rstrip('.')}"


@dataclass(frozen=True)
class _WithDefaults:
    """The parsed arguments of a host, with a default for each that this version of it does not have."""

    args: Any
    defaults: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.args, name, self.defaults[name]) if name in self.defaults else getattr(self.args, name)


def refuse(rules: Iterable[FlagRule], args: Any, defaults: Mapping[str, Any], *, host: str = "") -> None:
    """Stop a patched run at the first mistake that is an error.

    Args:
        args: the parsed arguments of the host.
        defaults: values of arguments that the rules read and this version of the host does not have.
        host: named at the beginning of the sentence; "": nothing is.

    Raises:
        ValueError: one sentence that names the flag to change.
    """
    complete = _WithDefaults(args, defaults)
    for rule in rules:
        if rule.severity != "error" or rule.made_by == "unpatched runs":
            continue
        if mistake := rule.mistake(complete):
            raise ValueError((f"{host}: " if host else "") + rule.refusal(mistake))


class _ByPath(NamedTuple):
    value: Callable[[str], Any]
    defaults: Mapping[str, Any]

    def __getitem__(self, path: Any) -> Any:
        found = self.value(path)
        return self.defaults[path] if found is None else found


def refuse_by_path(rules: Iterable[FlagRule], value: Callable[[str], Any], defaults: Mapping[str, Any]) -> None:
    """`refuse` for a configuration that ``value`` reads by dotted path, None where it has no such setting."""
    for rule in rules:
        if mistake := rule.mistake(_ByPath(value, defaults)):
            raise ValueError(rule.refusal(mistake))


def refuse_correction(
    correction: RolloutCorrection,
    where: str,
    statistics: tuple[str, ...] = tuple(STATISTICS),
    *,
    knows_lags: bool = False,
) -> None:
    """Refuse a correction that needs what no host gives us, or what this one does not.

    Args:
        where: names the host in the sentence.
        statistics: those by which a rejection may judge.
        knows_lags: whether the host says which version of the weights sampled a token.
    """
    correction.check_keeps_upper(where)
    correction.check_surrogate_of(where)
    if knows_lags:
        correction.check_without_sampling_logprobs(where)
    else:
        correction.check_without_versions(where)
    unknown = [gate.statistic for gate in correction.reject if gate.statistic not in statistics]
    if unknown:
        raise ValueError(f"statistic {unknown[0]!r} is not known to {where}, use one of {', '.join(statistics)}")


def refused(check: Callable[..., object], *args: Any) -> str:
    """The sentence of the ValueError that ``check(*args)`` raises; "" where it raises none."""
    try:
        check(*args)
    except ValueError as error:
        return str(error)
    return ""


def value_at(config: Any, path: str) -> Any:
    """The value under a dotted path of mappings and objects; None where a part is missing or null."""
    for name in path.split("."):
        config = config.get(name) if hasattr(config, "get") else getattr(config, name, None)
    return config


def uncorrected_rules(
    quantized: Callable[[Any], bool], stale: Callable[[Any], bool], corrected: Callable[[Any], bool], fix: str
) -> tuple[FlagRule, FlagRule]:
    """The rules "quantized-rollouts" and "asynchronous-rollouts": pi and mu differ, and no correction acts.

    Args:
        quantized, stale, corrected: arguments -> whether the rollouts are quantised, whether older weights sample them,
            and whether something acts on the gap or is meant to be seen without it.
        fix: how to correct, one sentence.
    """
    return (
        FlagRule("quantized-rollouts", lambda args: quantized(args) and not corrected(args),
            "rollouts are quantised and no correction acts, although k3 near 1e-2 is usual with FP8",
            fix, good="rollouts are not quantised, or corrected", severity="warning"),
        FlagRule("asynchronous-rollouts", lambda args: stale(args) and not corrected(args),
            "rollouts come from older weights and no correction acts",
            fix, good="rollouts come from the current weights, or are corrected", severity="warning"),
    )  # fmt: skip


def sampler_rules(temperature: str, logprobs_mode: str) -> tuple[FlagRule, FlagRule]:
    """The rules "temperature" and "logprobs-mode" for a host that names both settings by dotted paths."""
    return (
        FlagRule("temperature", lambda args: args[temperature] <= 0,
            "a greedy sampler has no log-prob that the trainer's could be compared with",
            f"Set {temperature} above 0.", good="the sampler's temperature is above 0"),
        FlagRule("logprobs-mode", lambda args: args[logprobs_mode] != "processed_logprobs" and args[temperature] != 1,
            f"{logprobs_mode}={{args[{logprobs_mode}]}} returns log-probs before the temperature, and the trainer "
            "divides its logits by it",
            f"Set {logprobs_mode}=processed_logprobs.", good="log-probs are those after the temperature"),
    )  # fmt: skip


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

MEGATRON_DEFAULTS: dict[str, Any] = {
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

ROUTER_FUSION = FlagRule("router-fusion", lambda args: args.moe_router_fusion and args.moe_enable_routing_replay,
    "the fused router selects its experts before the replay is asked, so the replay is silently ignored",
    "Drop --moe-router-fusion.", good="no routes are replayed by a fused router")  # fmt: skip

MEGATRON_RULES = (
    ROUTER_FUSION,
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
    FlagRule("router-dtype", lambda args: args.num_experts is not None and args.moe_router_dtype in (None, "none"),
        "router logits in the model's precision have ties, which every engine breaks in its own way",
        "Add --moe-router-dtype fp32.", good="router logits are fp32 or more, or no --num-experts is given",
        severity="warning"),
)  # fmt: skip
"""Mistakes in Megatron's own flags, which every host takes."""
