"""Every defect in how a server runs that doctor finds."""

from __future__ import annotations

import pytest
from doctor_facts import Change, Defect, both, flags, info, model, rollout, served, sglang

from megatron_rc.doctor.server.serving import SERVING


def without_path(path: str) -> Change:
    return lambda facts: served(paths=tuple(p for p in facts.server.paths or () if p != path))(facts)


DEFECTS = [
    Defect("version", flags(version="0.5.9"), warning="SGLang 0.5.9 is outside 0.5.20 to 0.5.23", fix="sglang==0.5.23"),
    Defect("version", flags(version="0.6.0rc1"), warning="outside", fix="sglang==0.5.23"),
    Defect("engine", rollout(engine="hf"), warning="engine 'hf'", fix="rollout.engine=sglang"),
    Defect("control-endpoints", without_path("/flush_cache"), error="no /flush_cache", fix="0.5.20 or newer"),
    Defect("control-endpoints", without_path("/weights_checker"), warning="half-finished update", fix="0.5.20"),
    Defect("serving-state", served(is_paused=True), error="paused", fix="/continue_generation"),
    Defect("serving-state", info(is_generation=False), error="does not generate", fix="--is-embedding"),
    Defect("weight-version", info(weight_version="mine"), warning="no trainer", fix="--weight-version"),
    Defect("disaggregation", flags(disaggregation_mode="prefill"), warning="prefill", fix="--disaggregation-mode"),
    Defect("parallel-layout", flags(tp_size=4), note="tp=4", fix="old/k3"),
    Defect(
        "parallel-layout",
        both(flags(dp_size=2), sglang(weight_sync="tensor")),
        error="dp_size=2",
        fix="weight_sync=disk",
    ),
    Defect("parallel-layout", both(flags(pp_size=2), sglang(weight_sync="distributed")), error="pp_size=2", fix="disk"),
    Defect(
        "attention-backend",
        flags(decode_attention_backend="triton"),
        note="torch_native and decode triton",
        fix="--attention-backend",
    ),
    Defect("chunked-prefill", flags(chunked_prefill_size=8), note="more than 8 tokens", fix="--chunked-prefill-size"),
    Defect("chunked-prefill", flags(enable_mixed_chunk=True), note="share a batch", fix="--enable-mixed-chunk"),
    Defect("cache-across-updates", flags(enable_lmcache=True), error="enable_lmcache", fix="--enable-lmcache"),
    Defect("cache-across-updates", flags(hicache_storage_backend="file"), error="old weights", fix="--hicache"),
    Defect("routes", flags(enable_return_routed_experts=False), error="silently", fix="--enable-return-routed-experts"),
    Defect(
        "routes",
        both(flags(enable_return_routed_experts=False), sglang(capture_routes=False)),
        note="neither compared nor replayed",
        fix="--enable-return-routed-experts",
    ),
    Defect("routes", model(num_local_experts=0), error="has no experts", fix="capture_routes=false"),
    Defect(
        "context-length",
        rollout(max_new_tokens=243),
        error="need 255 tokens, server and model take 254",
        fix="--context-length",
    ),
    Defect("context-length", flags(max_total_num_tokens=20), error="cache holds 20", fix="--max-total-tokens"),
    Defect("context-length", flags(allow_auto_truncate=True), error="silently", fix="--allow-auto-truncate"),
    Defect(
        "concurrency",
        flags(max_total_num_tokens=500),
        note="need 896 tokens of cache, it holds 500; a retracted",
        fix="rollout.sglang.concurrency",
    ),
    Defect(
        "concurrency",
        flags(internal_states=[{"effective_max_running_requests_per_dp": 8}]),
        note="24 wait",
        fix="--max-running-requests",
    ),
    Defect(
        "concurrency",
        flags(max_queued_requests=4, internal_states=[{"effective_max_running_requests_per_dp": 8}]),
        warning="holds 12 and refuses",
        fix="--max-queued-requests",
    ),
    Defect("exposure", flags(host="0.0.0.0"), warning="0.0.0.0 port 30000", fix="--host 127.0.0.1"),
    Defect("exposure", flags(host="::"), warning="replace the weights", fix="--host 127.0.0.1"),
    Defect("exposure", flags(host="gpu-7"), warning="gpu-7", fix="firewall"),
    Defect("request-logging", flags(log_requests=True), note="prompts and responses", fix="--log-requests"),
]


@pytest.mark.parametrize("defect", DEFECTS, ids=str)
def test_a_defect_is_found_and_its_fix_named(defect: Defect) -> None:
    defect.assert_found()


def test_every_check_finds_a_defect() -> None:
    assert {defect.check for defect in DEFECTS} == {check.name for check in SERVING}
