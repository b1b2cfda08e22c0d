"""Checks of how a server runs: its version, layout, caches, limits, routes and who can reach it."""

from __future__ import annotations

import ipaddress
from dataclasses import replace

from megatron_rc.doctor.registry import Outcome, Registry, Undecided, bad, good
from megatron_rc.doctor.server.facts import Facts
from megatron_rc.rollout.sglang.engine import BELOW_CONTEXT
from megatron_rc.rollout.sglang.weights import weight_sync
from megatron_rc.versions import SGLANG, SGLANG_WEIGHT_VERSION, release_of

SERVING: Registry[Facts] = Registry("serving")

CONTROL_PATHS = ("/pause_generation", "/continue_generation", "/flush_cache", "/update_weight_version",
                 "/abort_request")  # fmt: skip


@SERVING.check(
    "version",
    compares=f"SGLang's version against {SGLANG}",
    severity="warning",
    fix=f"Install sglang=={SGLANG.newest} for the server.",
)
def version(facts: Facts) -> Outcome:
    found = facts.server.flags["version"]
    if release_of(found) is None:
        raise Undecided(f"the server calls its version {found!r}")
    if found in SGLANG:
        return good(f"SGLang {found}")
    return bad(f"SGLang {found} is outside {SGLANG}, for which the bridge is written")


@SERVING.check(
    "engine",
    compares="rollout.engine against a job that uses servers",
    severity="warning",
    fix="Set rollout.engine=sglang.",
)
def engine(facts: Facts) -> Outcome:
    chosen = facts.trainer.settings.rollout.engine
    return (
        good("the job samples from servers") if chosen == "sglang" else bad(f"the job samples with engine {chosen!r}")
    )


@SERVING.check(
    "control-endpoints",
    compares="endpoints of a weight update against those of the server",
    severity="error",
    fix=f"Serve with SGLang {SGLANG_WEIGHT_VERSION} or newer.",
)
def control_endpoints(facts: Facts) -> Outcome:
    if facts.server.paths is None:
        raise Undecided("the server does not list its endpoints", "Unset DISABLE_OPENAPI_DOC for the server.")
    missing = [path for path in CONTROL_PATHS if path not in facts.server.paths]
    if missing:
        return bad(f"the server has no {', '.join(missing)}")
    if "/weights_checker" not in facts.server.paths:
        return bad("the server has no /weights_checker, so a half-finished update can go unseen", severity="warning")
    bracket = "/begin_weight_update" in facts.server.paths
    return good("pause, flush, version and checksum are there" + ("" if bracket else "; updates need no bracket"))


@SERVING.check(
    "serving-state",
    compares="whether the server answers",
    severity="error",
    fix="POST /continue_generation to the server; requests wait until then.",
)
def serving_state(facts: Facts) -> Outcome:
    if facts.server.is_paused:
        return bad("the server is paused or not ready")
    if not facts.server.model["is_generation"]:
        return bad("the server does not generate", fix="Start the server without --is-embedding.")
    return good("ready")


@SERVING.check(
    "weight-version",
    compares="the name of the served weights against the trainer's numbers",
    severity="warning",
    fix="Start the server without --weight-version, or let one job alone update it.",
)
def weight_version(facts: Facts) -> Outcome:
    name = facts.server.model["weight_version"]
    if name == "default" or str(name).isdecimal():
        return good(f"{name!r}; a job sends its own weights and number before it samples")
    return bad("the weights have a name that no trainer of this package gave")


@SERVING.check(
    "disaggregation",
    compares="prefill and decode on one server",
    severity="warning",
    fix="Start the server without --disaggregation-mode.",
)
def disaggregation(facts: Facts) -> Outcome:
    mode = facts.server.flags["disaggregation_mode"]
    if mode in (None, "null"):
        return good("one server does both")
    return bad(f"disaggregation mode {mode}: kept ids need more settings there, and the bridge is not tested with it")


@SERVING.check(
    "parallel-layout",
    compares="processes of the server against rollout.sglang.weight_sync",
    severity="note",
    fix="Compare the log-probs of both once (old/k3 in the report); nothing is to be set.",
)
def parallel_layout(facts: Facts) -> Outcome:
    flags = facts.server.flags
    sizes = {name: flags[f"{name}_size"] for name in ("tp", "dp", "pp", "ep")}
    layout = ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
    if not layout:
        return good("one process computes a token")
    if facts.trainer.job is not None:
        settings = replace(facts.trainer.job.rollout.sglang, sync_dir=".")
        if refusal := weight_sync(settings, {}).transport.refusal(facts.server.server_info):
            fix = "Set rollout.sglang.weight_sync=disk, or start one server per replica (--dp-size 1)."
            return bad(refusal, severity="error", fix=fix)
    return bad(f"{layout}: sums run in another order than in one process, which shifts log-probs in their last bits")


@SERVING.check(
    "attention-backend",
    compares="attention of prefill against that of decode",
    severity="note",
    fix="Set --attention-backend alone, not --prefill-attention-backend and --decode-attention-backend.",
)
def attention_backend(facts: Facts) -> Outcome:
    flags = facts.server.flags
    both = flags["attention_backend"]
    prefill, decode = flags["prefill_attention_backend"] or both, flags["decode_attention_backend"] or both
    if prefill is None:
        raise Undecided("the server has not said which attention backend it chose")
    if prefill == decode:
        return good(f"{prefill} for both; it is never the trainer's kernel, the rounding between them is what k3 shows")
    return bad(f"prefill runs {prefill} and decode {decode}: a continued response is rounded in two ways")


@SERVING.check(
    "chunked-prefill",
    compares="--chunked-prefill-size against the context",
    severity="note",
    fix="Raise --chunked-prefill-size above the longest prompt, or -1 to turn it off.",
)
def chunked_prefill(facts: Facts) -> Outcome:
    flags = facts.server.flags
    size, longest = flags["chunked_prefill_size"], facts.trainer.longest_prompt or facts.server.context_length
    if flags["enable_mixed_chunk"]:
        return bad(
            "prefill and decode share a batch (mixed chunks), so rounding depends on the load",
            fix="Start the server without --enable-mixed-chunk.",
        )
    if size is None or size <= 0:
        return good("off: a prompt is computed at once")
    if longest is None:
        raise Undecided("the length of prompts is not known", "Give the trainer's settings with --config job.yaml.")
    if longest <= size:
        return good(f"no prompt of up to {longest} tokens is cut at {size}")
    return bad(f"prompts of more than {size} tokens are computed in pieces, with other rounding than in the trainer")


@SERVING.check(
    "cache-across-updates",
    compares="caches that outlive a weight update",
    severity="error",
    fix="Start the server without the outside cache (--hicache-storage-backend, --enable-lmcache, --enable-flexkv).",
)
def cache_across_updates(facts: Facts) -> Outcome:
    flags = facts.server.flags
    outside = [n for n in ("hicache_storage_backend", "enable_lmcache", "enable_flexkv") if flags.get(n)]
    if outside:
        return bad(f"{', '.join(outside)} keeps keys and values of old weights where a flush does not reach")
    if flags["disable_radix_cache"]:
        return good("no prefix cache")
    return good("the prefix cache is flushed at every weight update of the bridge")


@SERVING.check(
    "routes",
    compares="rollout.sglang.capture_routes against --enable-return-routed-experts",
    severity="error",
    fix="Start the server with --enable-return-routed-experts.",
)
def routes(facts: Facts) -> Outcome:
    wanted = facts.trainer.job is not None and facts.trainer.job.rollout.sglang.capture_routes
    if not facts.server.has_experts:
        if wanted:
            found = "routes are asked for and the served model has no experts"
            return bad(found, fix="Set rollout.sglang.capture_routes=false.")
        return good("the served model has no experts")
    if facts.server.flags["enable_return_routed_experts"]:
        return good("the server returns the experts of every token")
    if wanted:
        return bad("routes are asked for, and without its flag the server leaves them out silently")
    return bad("the server cannot return routes, so experts can be neither compared nor replayed", severity="note")


@SERVING.check(
    "context-length",
    compares="context and cache of the server against prompt + rollout.max_new_tokens",
    severity="error",
    fix="Raise --context-length or lower rollout.max_new_tokens.",
)
def context_length(facts: Facts) -> Outcome:
    flags = facts.server.flags
    if flags["allow_auto_truncate"]:
        return bad("the server cuts prompts that are too long, silently", fix="Start it without --allow-auto-truncate.")
    needed = facts.trainer.longest_sequence
    limits = [facts.server.context_length, facts.trainer.config.get("max_position_embeddings")]
    if longest := flags["max_req_input_len"]:
        limits.append(longest + BELOW_CONTEXT)
    limit = min(n for n in limits if n)
    if needed > limit:
        return bad(f"the longest prompt and response need {needed} tokens, server and model take {limit}")
    pool = flags["max_total_num_tokens"]
    if needed > pool:
        return bad(
            f"the longest prompt and response need {needed} tokens, the server's cache holds {pool}",
            fix="Raise --max-total-tokens or --mem-fraction-static.",
        )
    return good(f"the longest prompt and response need {needed} of {limit} tokens")


@SERVING.check(
    "concurrency",
    compares="requests in flight against what the server runs at once",
    severity="note",
    fix="Lower rollout.sglang.concurrency, or raise --max-running-requests and the cache (--mem-fraction-static).",
)
def concurrency(facts: Facts) -> Outcome:
    flags, rollout = facts.server.flags, facts.trainer.settings.rollout
    sent = min(rollout.sglang.concurrency, rollout.prompts_per_step * rollout.samples_per_prompt)
    states = flags["internal_states"]
    if not states or "effective_max_running_requests_per_dp" not in states[0]:
        raise Undecided("the server does not tell how many requests it runs at once")
    running = states[0]["effective_max_running_requests_per_dp"] * flags["dp_size"]
    queue = flags["max_queued_requests"]
    if queue is not None and sent > running + queue:
        return bad(
            f"one trainer process sends {sent} requests, the server holds {running + queue} and refuses the others",
            severity="warning",
            fix="Start the server without --max-queued-requests, or lower rollout.sglang.concurrency.",
        )
    at_once = min(sent, running)
    demand, pool = at_once * facts.trainer.longest_sequence, flags["max_total_num_tokens"] * flags["dp_size"]
    if demand > pool:
        harm = "; a retracted response loses its routes" if rollout.sglang.capture_routes else ""
        return bad(f"{at_once} responses of full length need {demand} tokens of cache, it holds {pool}{harm}")
    if sent > running:
        return bad(f"one trainer process sends {sent} requests, of which {sent - running} wait on the server")
    return good(f"{sent} requests of one trainer process fit")


@SERVING.check(
    "exposure",
    compares="the address the server listens on against its keys",
    severity="warning",
    fix="Start the server with --host 127.0.0.1, or keep others out by a firewall.",
)
def exposure(facts: Facts) -> Outcome:
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
    return bad(f"whoever reaches {host} port {flags['port']} can replace the weights: the server asks for no key")


@SERVING.check(
    "request-logging",
    compares="whether prompts are written to the server's log",
    severity="note",
    fix="Start the server without --log-requests.",
)
def request_logging(facts: Facts) -> Outcome:
    if facts.server.flags["log_requests"]:
        return bad("the server logs requests, prompts and responses included")
    return good("requests are not logged")
