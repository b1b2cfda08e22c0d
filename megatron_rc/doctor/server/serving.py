"""Checks of how a server runs: its version, layout, caches, limits, routes and who can reach it."""

import ipaddress
from dataclasses import replace

from megatron_rc.doctor.registry import Finding, Registry, Undecided, error, good, note, warning
from megatron_rc.doctor.server.facts import GIVE_TRAINER, Facts, of_flags
from megatron_rc.integrations.flag_rules import FlagRule
from megatron_rc.rollout.sglang.engine import BELOW_CONTEXT
from megatron_rc.rollout.sglang.weights import weight_sync
from megatron_rc.versions import SGLANG, SGLANG_WEIGHT_VERSION, release_of

SERVING: Registry[Facts] = Registry("serving")

CONTROL_PATHS = ("/pause_generation", "/continue_generation", "/flush_cache", "/update_weight_version",
                 "/abort_request")  # fmt: skip


@SERVING.check
def version(facts: Facts) -> Finding:
    """SGLang's version against the tested ones."""
    served = facts.server.flags["version"]
    if release_of(served) is None:
        raise Undecided(f"the server calls its version {served!r}")
    if served in SGLANG:
        return good(f"SGLang {served}")
    fix = f"Install sglang=={SGLANG.newest} for the server."
    return warning(f"SGLang {served} is outside {SGLANG}, for which the bridge is written", fix)


@SERVING.check
def engine(facts: Facts) -> Finding:
    """rollout.engine against a job that uses servers."""
    rollout = facts.trainer.settings.rollout
    if rollout.kind.has_servers:
        return good("the job samples from servers")
    return warning(f"the job samples with engine {rollout.engine!r}", "Set rollout.engine=sglang.")


@SERVING.check
def control_endpoints(facts: Facts) -> Finding:
    """Endpoints of a weight update against those of the server."""
    paths, fix = facts.server.paths, f"Serve with SGLang {SGLANG_WEIGHT_VERSION} or newer."
    if paths is None:
        raise Undecided("the server does not list its endpoints", "Unset DISABLE_OPENAPI_DOC for the server.")
    missing = [path for path in CONTROL_PATHS if path not in paths]
    if missing:
        return error(f"the server has no {', '.join(missing)}", fix)
    if "/weights_checker" not in paths:
        return warning("the server has no /weights_checker, so a half-finished update can go unseen", fix)
    session = "" if "/begin_weight_update" in paths else "; updates need no session"
    return good(f"pause, flush, version and checksum are there{session}")


@SERVING.check
def serving_state(facts: Facts) -> Finding:
    """Whether the server answers."""
    if facts.server.is_paused:
        fix = "POST /continue_generation to the server; requests wait until then."
        return error("the server is paused or not ready", fix)
    if not facts.server.model["is_generation"]:
        return error("the server does not generate", "Start the server without --is-embedding.")
    return good("ready")


@SERVING.check
def weight_version(facts: Facts) -> Finding:
    """The name of the served weights against the trainer's numbers."""
    name = facts.server.model["weight_version"]
    if name == "default" or str(name).isdecimal():
        return good(f"{name!r}; a job sends its own weights and number before it samples")
    fix = "Start the server without --weight-version, or let one job alone update it."
    return warning("the weights have a name that no trainer of this package gave", fix)


SERVING.add(of_flags("Prefill and decode on one server", FlagRule(
    "disaggregation", lambda flags: flags["disaggregation_mode"] not in (None, "null"),
    "disaggregation mode {args[disaggregation_mode]}: kept ids need more settings there, and the bridge is not tested "
    "with it",
    "Start the server without --disaggregation-mode.", severity="warning", good="one server does both")))  # fmt: skip


@SERVING.check
def parallel_layout(facts: Facts) -> Finding:
    """Processes of the server against rollout.sglang.weight_sync."""
    sizes = {name: facts.server.flags[f"{name}_size"] for name in ("tp", "dp", "pp", "ep")}
    layout = ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
    if not layout:
        return good("one process computes a token")
    if facts.trainer.job is not None:
        settings = replace(facts.trainer.job.rollout.sglang, sync_dir=".")
        if refusal := weight_sync(settings, {}).transport.refusal(facts.server.server_info):
            fix = "Set rollout.sglang.weight_sync=disk, or start one server per replica (--dp-size 1)."
            return error(refusal, fix)
    problem = f"{layout}: sums run in another order than in one process, which shifts log-probs in their last bits"
    return note(problem, "Compare the log-probs of both once (old/k3 in the report); nothing is to be set.")


@SERVING.check
def attention_backend(facts: Facts) -> Finding:
    """Attention of prefill against that of decode."""
    flags = facts.server.flags
    both = flags["attention_backend"]
    prefill, decode = flags["prefill_attention_backend"] or both, flags["decode_attention_backend"] or both
    if prefill is None:
        raise Undecided("the server does not say which attention backend it uses")
    if prefill == decode:
        return good(f"{prefill} for both; it is never the trainer's kernel, the rounding between them is what k3 shows")
    fix = "Set --attention-backend alone, not --prefill-attention-backend and --decode-attention-backend."
    return note(f"prefill runs {prefill} and decode {decode}: a continued response is rounded in two ways", fix)


@SERVING.check
def chunked_prefill(facts: Facts) -> Finding:
    """--chunked-prefill-size against the context."""
    flags = facts.server.flags
    size, longest = flags["chunked_prefill_size"], facts.trainer.longest_prompt or facts.server.context_length
    if flags["enable_mixed_chunk"]:
        fix = "Start the server without --enable-mixed-chunk."
        return note("prefill and decode share a batch (mixed chunks), so rounding depends on the load", fix)
    if size is None or size <= 0:
        return good("off: a prompt is computed at once")
    if longest is None:
        raise Undecided("the length of prompts is not known", GIVE_TRAINER)
    if longest <= size:
        return good(f"no prompt of up to {longest} tokens is cut at {size}")
    problem = f"prompts of more than {size} tokens are computed in pieces, with other rounding than in the trainer"
    return note(problem, "Raise --chunked-prefill-size above the longest prompt, or -1 to turn it off.")


@SERVING.check
def cache_across_updates(facts: Facts) -> Finding:
    """Caches that outlive a weight update."""
    flags = facts.server.flags
    external = [name for name in ("hicache_storage_backend", "enable_lmcache", "enable_flexkv") if flags.get(name)]
    if external:
        return error(
            f"{', '.join(external)} keeps keys and values of old weights where a flush does not reach",
            "Start the server without the external cache "
            "(--hicache-storage-backend, --enable-lmcache, --enable-flexkv).",
        )
    if flags["disable_radix_cache"]:
        return good("no prefix cache")
    return good("the prefix cache is flushed at every weight update of the bridge")


@SERVING.check
def routes(facts: Facts) -> Finding:
    """rollout.sglang.capture_routes against --enable-return-routed-experts."""
    wanted = facts.trainer.job is not None and facts.trainer.job.rollout.sglang.capture_routes
    if not facts.server.has_experts:
        if wanted:
            problem = "routes are asked for and the served model has no experts"
            return error(problem, "Set rollout.sglang.capture_routes=false.")
        return good("the served model has no experts")
    if facts.server.flags["enable_return_routed_experts"]:
        return good("the server returns the experts of every token")
    fix = "Start the server with --enable-return-routed-experts."
    if wanted:
        return error("routes are asked for, and without its flag the server leaves them out silently", fix)
    return note("the server cannot return routes, so experts can be neither compared nor replayed", fix)


@SERVING.check
def context_length(facts: Facts) -> Finding:
    """Context and cache of the server against prompt + rollout.max_new_tokens."""
    flags = facts.server.flags
    if flags["allow_auto_truncate"]:
        return error("the server cuts prompts that are too long, silently", "Start it without --allow-auto-truncate.")
    needed = facts.trainer.longest_sequence
    limits = [facts.server.context_length, facts.trainer.config.get("max_position_embeddings")]
    if longest := flags["max_req_input_len"]:
        limits.append(longest + BELOW_CONTEXT)
    limit = min(n for n in limits if n)
    if needed > limit:
        fix = "Raise --context-length or lower rollout.max_new_tokens."
        return error(f"the longest prompt and response need {needed} tokens, server and model take {limit}", fix)
    pool = flags["max_total_num_tokens"]
    if needed > pool:
        fix = "Raise --max-total-tokens or --mem-fraction-static."
        return error(f"the longest prompt and response need {needed} tokens, the server's cache holds {pool}", fix)
    return good(f"the longest prompt and response need {needed} of {limit} tokens")


@SERVING.check
def concurrency(facts: Facts) -> Finding:
    """Requests in flight against what the server runs at once."""
    flags, rollout = facts.server.flags, facts.trainer.settings.rollout
    sent = min(rollout.sglang.concurrency, rollout.prompts_per_step * rollout.samples_per_prompt)
    states = flags["internal_states"]
    if not states or "effective_max_running_requests_per_dp" not in states[0]:
        raise Undecided("the server does not say how many requests it runs at once")
    running = states[0]["effective_max_running_requests_per_dp"] * flags["dp_size"]
    queue = flags["max_queued_requests"]
    if queue is not None and sent > running + queue:
        return warning(
            f"one trainer process sends {sent} requests, the server holds {running + queue} and refuses the others",
            "Start the server without --max-queued-requests, or lower rollout.sglang.concurrency.",
        )
    at_once = min(sent, running)
    demand, pool = at_once * facts.trainer.longest_sequence, flags["max_total_num_tokens"] * flags["dp_size"]
    fix = "Lower rollout.sglang.concurrency, or raise --max-running-requests and the cache (--mem-fraction-static)."
    if demand > pool:
        harm = "; a retracted response loses its routes" if rollout.sglang.capture_routes else ""
        return note(f"{at_once} responses of full length need {demand} tokens of cache, it holds {pool}{harm}", fix)
    if sent > running:
        return note(f"one trainer process sends {sent} requests, and {sent - running} of them wait on the server", fix)
    return good(f"{sent} requests of one trainer process fit")


@SERVING.check
def exposure(facts: Facts) -> Finding:
    """The address that the server listens on against its keys."""
    flags = facts.server.flags
    host = flags["host"]
    try:
        is_local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = False
    if is_local:
        return good("reachable from its own machine only")
    if flags["api_key"] or flags["admin_api_key"]:
        return good("it asks for a key")
    problem = f"whoever reaches {host} port {flags['port']} can replace the weights: the server asks for no key"
    return warning(problem, "Start the server with --host 127.0.0.1, or keep others out by a firewall.")


SERVING.add(of_flags("Whether prompts are written to the server's log", FlagRule(
    "request-logging", lambda flags: flags["log_requests"],
    "the server logs requests, prompts and responses included",
    "Start the server without --log-requests.", severity="note", good="requests are not logged")))  # fmt: skip
