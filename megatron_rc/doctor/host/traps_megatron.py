"""Known traps in the flags of hosts, each with its fix; what `patch` removes is a trap only without it."""

from __future__ import annotations

from megatron_rc.doctor.host.facts import HostFacts
from megatron_rc.doctor.host.flags import EXPANDED
from megatron_rc.doctor.host.traps_slime import SLIME_OR_MILES as SLIME_OR_MILES
from megatron_rc.doctor.registry import Outcome, Registry, bad, good

COMMON: Registry[HostFacts] = Registry("common traps")
MEGATRON_LM: Registry[HostFacts] = Registry("megatron-lm")
MEGATRON_TRAINING: Registry[HostFacts] = Registry("megatron-training")

RUN_PATCHED = "run the script through `megatron-rc patch --rc-preset NAME`"


@COMMON.check("shell-variables", compares="words that the shell replaces", severity="note", fix=EXPANDED)
def shell_variables(facts: HostFacts) -> Outcome:
    hidden = facts.flags.variables
    if hidden:
        return bad(f"flags may hide in {', '.join(hidden[:5])}, so what is not seen below may be set")
    return good("every flag is spelled out")


@COMMON.check(
    "router-fusion",
    compares="--moe-router-fusion against routing replay",
    severity="error",
    fix="Drop --moe-router-fusion.",
)
def router_fusion(facts: HostFacts) -> Outcome:
    replay = [name for name in _REPLAY if name in facts.flags]
    if replay and "moe-router-fusion" in facts.flags:
        return bad(f"the fused router chooses its experts before --{replay[0]} is asked, which is silently ignored")
    return good("the router is not fused" if replay else "no routes are replayed")


@COMMON.check(
    "replay-and-recompute",
    compares="routing replay against recomputed layers and interleaved stages",
    severity="warning",
    fix="Set RouterReplayAction.REPLAY_BACKWARD before the backward pass, or drop --recompute-granularity full.",
)
def replay_and_recompute(facts: HostFacts) -> Outcome:
    if "moe-enable-routing-replay" not in facts.flags or facts.flags.text("recompute-granularity", "none") != "full":
        return good("no layer with replayed routes is computed again in the backward pass")
    found = "a recomputed layer routes anew unless routes are replayed in the backward pass"
    if any(name in facts.flags for name in _INTERLEAVED):
        return bad(
            f"{found}, and those are taken first in, first out, which is not the order of interleaved stages",
            severity="error",
            fix="Drop --recompute-granularity full, or interleaved pipeline stages.",
        )
    return bad(found)


@COMMON.check(
    "replay-and-mtp",
    compares="routing replay against multi-token-prediction layers",
    severity="warning",
    fix="Match replayed routes to decoder layers by walking the model, not by the order of registration.",
)
def replay_and_mtp(facts: HostFacts) -> Outcome:
    if "moe-enable-routing-replay" in facts.flags and facts.flags.number("mtp-num-layers", 0) > 0:
        return bad("routers of --mtp-num-layers register themselves beside those of the decoder")
    return good("no router but the decoder's takes part in a replay")


@COMMON.check(
    "router-dtype",
    compares="precision of the router",
    severity="warning",
    fix="Add --moe-router-dtype fp32.",
)
def router_dtype(facts: HostFacts) -> Outcome:
    if facts.has_experts and facts.flags.text("moe-router-dtype", "none") == "none":
        return bad("router logits in the model's precision come out as ties, which every engine breaks in its own way")
    return good("router logits are fp32 or more" if facts.has_experts else "no --num-experts is given")


@COMMON.check(
    "dataset-helpers",
    compares="what training compiles at its start against the files that are installed",
    severity="warning",
    fix="Copy the Makefile of NVIDIA/Megatron-LM's megatron/core/datasets there, or set "
    "megatron.core.datasets.utils.compile_helpers = lambda: None before pretrain: a wheel has them compiled.",
)
def dataset_helpers(facts: HostFacts) -> Outcome:
    facts.require_importable()
    if facts.helpers_folder is None or not facts.host.module.startswith("megatron."):
        return good("make finds what it needs, or is not called")
    return bad(
        f"rank 0 runs make in {facts.helpers_folder}, which has no Makefile, and stops, unless your program prevents it"
    )


@MEGATRON_TRAINING.check(
    "full-iteration-graph",
    compares="CUDA graphs against metrics of the loss function",
    severity="error",
    fix="Drop --cuda-graph-impl full_iteration.",
)
def full_iteration_graph(facts: HostFacts) -> Outcome:
    if _is_full_iteration(facts):
        return bad("a captured iteration replays the loss function without calling it, which the patch refuses")
    return good("the loss function is called in every step")


@MEGATRON_LM.check("rl-step", compares="--perform-rl-step", severity="error", fix="Add --perform-rl-step.")
def rl_step(facts: HostFacts) -> Outcome:
    return good("rollouts are sampled") if "perform-rl-step" in facts.flags else bad("no rollout is sampled")


@MEGATRON_LM.check(
    "rollout-logprobs",
    compares="what the loss is given of the sampler",
    severity="error",
    fix="Add --rl-inference-logprobs-is-correction.",
)
def rollout_logprobs(facts: HostFacts) -> Outcome:
    if "rl-inference-logprobs-is-correction" not in facts.flags:
        return bad("the sampler's log-probs do not reach the loss, so nothing can be corrected")
    return good("the sampler's log-probs reach the loss")


@MEGATRON_LM.check(
    "temperature",
    compares="--rl-default-temperature against the trainer's log-probs",
    severity="error",
    fix=f"Set it to 1, or {RUN_PATCHED} and --inference-dynamic-batching-logprobs-mode processed_logprobs.",
)
def temperature(facts: HostFacts) -> Outcome:
    value = facts.flags.number("rl-default-temperature", 1.0)
    if value == 1:
        return good("sampled and trained at temperature 1")
    if not facts.is_patched:
        return bad(f"sampled at temperature {value:g}, while get_logprobs computes log-probs at temperature 1")
    mode = facts.flags.text("inference-dynamic-batching-logprobs-mode", "raw_logprobs")
    if mode != "processed_logprobs":
        return bad(
            f"the sampler returns {mode}, those at temperature 1, of tokens sampled at {value:g}",
            fix="Add --inference-dynamic-batching-logprobs-mode processed_logprobs.",
        )
    return good(f"sampler and patched trainer have log-probs at temperature {value:g}")


@MEGATRON_LM.check(
    "top-p-top-k",
    compares="--rl-default-top-p and --rl-default-top-k against the trainer's log-probs",
    severity="error",
    fix="Drop --rl-default-top-p and --rl-default-top-k.",
)
def top_p_top_k(facts: HostFacts) -> Outcome:
    top_p, top_k = facts.flags.number("rl-default-top-p", 0), facts.flags.number("rl-default-top-k", -1)
    if top_p not in (0, 1) or top_k > 0:
        return bad("the sampler does not tell which ids it kept, so the trainer's log-probs are over other ones")
    return good("the whole vocabulary is sampled from")


@MEGATRON_LM.check(
    "ratio-bound",
    compares="how often and how far the importance weight is bounded",
    severity="error",
    fix="Drop --rl-importance-sampling-truncation-coef: the correction bounds the weight.",
)
def ratio_bound(facts: HostFacts) -> Outcome:
    has_coef = "rl-importance-sampling-truncation-coef" in facts.flags
    if facts.is_patched and has_coef:
        return bad("the host's truncation would come on top of the correction's, and the patch refuses it")
    if not facts.is_patched and not has_coef and "rl-inference-logprobs-is-correction" in facts.flags:
        return bad(
            "the importance weight has no upper bound",
            severity="warning",
            fix=f"Set --rl-importance-sampling-truncation-coef 2, or {RUN_PATCHED}.",
        )
    return good("the importance weight is bounded once" if has_coef or facts.is_patched else "there is no weight")


@MEGATRON_LM.check(
    "packed-logprobs",
    compares="--rl-use-sequence-packing against rollout log-probs that are missing",
    severity="warning",
    fix=f"To leave such tokens out, {RUN_PATCHED}.",
)
def packed_logprobs(facts: HostFacts) -> Outcome:
    packs = "rl-use-sequence-packing" in facts.flags and "rl-inference-logprobs-is-correction" in facts.flags
    if packs and not facts.is_patched:
        return bad("a packed token whose rollout log-prob is missing gets log-prob 0, and so pi as its weight")
    return good("no missing log-prob is taken for 0")


@MEGATRON_LM.check(
    "gathered-logits",
    compares="memory of the log-probs over tensor-parallel ranks",
    severity="warning",
    fix=f"To keep logits sharded, {RUN_PATCHED}.",
)
def gathered_logits(facts: HostFacts) -> Outcome:
    ranks = facts.flags.number("tensor-model-parallel-size", 1)
    if ranks > 1 and not facts.is_patched:
        return bad(f"get_logprobs gathers the whole vocabulary on each of the {ranks:g} tensor-parallel ranks")
    return good("logits stay as they are")


@MEGATRON_LM.check(
    "captured-denominator",
    compares="CUDA graphs against denominators that change from batch to batch",
    severity="error",
    fix="Drop --cuda-graph-impl full_iteration.",
)
def captured_denominator(facts: HostFacts) -> Outcome:
    if facts.is_patched and _is_full_iteration(facts):
        return bad("a captured iteration keeps the denominator of its first batch, which the patch refuses")
    return good("no iteration is captured with its denominator")


@MEGATRON_LM.check(
    "replayed-routes",
    compares="--moe-enable-routing-replay against who hands over routes",
    severity="warning",
    fix="Drop --moe-enable-routing-replay, or set RouterReplay's data from your own code.",
)
def replayed_routes(facts: HostFacts) -> Outcome:
    if "moe-enable-routing-replay" in facts.flags:
        return bad("megatron/rl never hands routes of the sampler to the trainer, so none are replayed")
    return good("no replay is expected of megatron/rl")


@MEGATRON_LM.check(
    "stale-policies",
    compares="--rl-partial-rollouts against one policy a response",
    severity="note",
    fix="Watch k3 and the effective sample size, or drop --rl-partial-rollouts.",
)
def stale_policies(facts: HostFacts) -> Outcome:
    if "rl-partial-rollouts" in facts.flags:
        return bad("tokens of one response come from several versions of the policy; the ratio measures that, too")
    return good("every response comes from one version of the policy")


_REPLAY = ("moe-enable-routing-replay", "use-routing-replay", "use-rollout-routing-replay")
_INTERLEAVED = (
    *("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank"),
    *("virtual-pipeline-model-parallel-size", "microbatch-group-size-per-virtual-pipeline-stage"),
)


def _is_full_iteration(facts: HostFacts) -> bool:
    impl, scope = facts.flags.text("cuda-graph-impl", "none"), facts.flags.text("cuda-graph-scope", "")
    return "full_iteration" in (impl, scope)
