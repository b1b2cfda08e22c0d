"""Every check of an SGLang server, on a server and a trainer that suit each other and on one defect at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from doctor_facts import (
    RECORDED,
    good,
    server,
    trainer,
    with_answer,
    with_flags,
    with_model,
    with_rollout,
    with_server,
    with_sglang,
    with_trainer,
)  # fmt: skip

from megatron_rc.doctor.registry import Finding
from megatron_rc.doctor.server.examine import SGLANG
from megatron_rc.doctor.server.facts import Facts, ProbeAnswer, TrainerFacts, comparable

DENSE = RECORDED["bad_dense"]["model_config"]
RENORMALISED = RECORDED["good_moe"]["probes"]["truncated"]["body"]["meta_info"]["output_token_sampling_logprobs"]
ENTRIES = RECORDED["good_moe"]["probes"]["plain"]["body"]["meta_info"]["output_token_logprobs"]
LISTED = RECORDED["good_moe"]["probes"]["plain"]["body"]["meta_info"]["output_top_logprobs"]

Change = Callable[[Facts], Facts]


def flags(**fields: object) -> Change:
    return lambda facts: with_flags(facts, **fields)


def model(**fields: object) -> Change:
    return lambda facts: with_model(facts, **fields)


def rollout(**fields: object) -> Change:
    return lambda facts: with_rollout(facts, **fields)


def sglang(**fields: object) -> Change:
    return lambda facts: with_sglang(facts, **fields)


def plain(output_ids: list[int] | None = None, **meta: object) -> Change:
    return lambda facts: with_answer(facts, "plain", output_ids, **meta)


def truncated(output_ids: list[int] | None = None, **meta: object) -> Change:
    return lambda facts: with_answer(facts, "truncated", output_ids, **meta)


def served(**fields: object) -> Change:
    return lambda facts: with_server(facts, **fields)


def info(**fields: object) -> Change:
    return lambda facts: with_server(facts, model_info={**facts.server.model_info, **fields})


def trained_dtype(name: str) -> Change:
    return lambda facts: with_trainer(facts, job=trainer(DENSE, train={"dtype": name}).job)


def without_path(path: str) -> Change:
    return lambda facts: with_server(facts, paths=tuple(p for p in facts.server.paths or () if p != path))


def refused_probe(name: str) -> Change:
    answer = ProbeAnswer(4, refusal="it answered 400: top_k is too large")
    return lambda facts: with_server(facts, probes={**facts.server.probes, name: answer})


def rejected_probe(facts: Facts) -> Facts:
    answer = replace(facts.server.probes["plain"], rejection="nan_logprob, a log-prob is null")
    return with_server(facts, probes={**facts.server.probes, "plain": answer})


def both(*changes: Change) -> Change:
    def change(facts: Facts) -> Facts:
        for one in changes:
            facts = one(facts)
        return facts

    return change


def all_listed_alike(facts: Facts) -> Facts:
    return with_answer(facts, "plain", output_top_logprobs=[[[-3.6, 5, None], [-3.6, 6, None]], *LISTED[1:]])


DEFECTS: list[tuple[str, Change, str, str, str]] = [
    ("version", flags(version="0.5.9"), "warning", "SGLang 0.5.9 is outside 0.5.20 to 0.5.23", "sglang==0.5.23"),
    ("version", flags(version="0.6.0rc1"), "warning", "outside", "sglang==0.5.23"),
    ("engine", rollout(engine="hf"), "warning", "engine 'hf'", "rollout.engine=sglang"),
    ("control-endpoints", without_path("/flush_cache"), "error", "no /flush_cache", "0.5.20 or newer"),
    ("control-endpoints", without_path("/weights_checker"), "warning", "half-finished update", "0.5.20"),
    ("serving-state", served(is_paused=True), "error", "paused", "/continue_generation"),
    ("serving-state", info(is_generation=False), "error", "does not generate", "--is-embedding"),
    ("weight-version", info(weight_version="mine"), "warning", "no trainer", "--weight-version"),
    ("disaggregation", flags(disaggregation_mode="prefill"), "warning", "prefill", "--disaggregation-mode"),
    ("parallel-layout", flags(tp_size=4), "note", "tp=4", "old/k3"),
    ("parallel-layout", both(flags(dp_size=2), sglang(weight_sync="tensor")), "error", "dp_size=2", "weight_sync=disk"),
    ("parallel-layout", both(flags(pp_size=2), sglang(weight_sync="distributed")), "error", "pp_size=2", "disk"),
    ("attention-backend", flags(decode_attention_backend="triton"), "note", "torch_native and decode triton",
     "--attention-backend"),
    ("chunked-prefill", flags(chunked_prefill_size=8), "note", "more than 8 tokens", "--chunked-prefill-size"),
    ("chunked-prefill", flags(enable_mixed_chunk=True), "note", "share a batch", "--enable-mixed-chunk"),
    ("cache-across-updates", flags(enable_lmcache=True), "error", "enable_lmcache", "--enable-lmcache"),
    ("cache-across-updates", flags(hicache_storage_backend="file"), "error", "old weights", "--hicache"),
    ("routes", flags(enable_return_routed_experts=False), "error", "silently", "--enable-return-routed-experts"),
    ("routes", both(flags(enable_return_routed_experts=False), sglang(capture_routes=False)), "note",
     "neither compared nor replayed", "--enable-return-routed-experts"),
    ("routes", model(num_local_experts=0), "error", "has no experts", "capture_routes=false"),
    ("context-length", rollout(max_new_tokens=243), "error", "need 255 tokens, server and model take 254",
     "--context-length"),
    ("context-length", flags(max_total_num_tokens=20), "error", "cache holds 20", "--max-total-tokens"),
    ("context-length", flags(allow_auto_truncate=True), "error", "silently", "--allow-auto-truncate"),
    ("concurrency", flags(max_total_num_tokens=500), "note", "need 896 tokens of cache, it holds 500; a retracted",
     "rollout.sglang.concurrency"),
    ("concurrency", flags(internal_states=[{"effective_max_running_requests_per_dp": 8}]), "note", "24 wait",
     "--max-running-requests"),
    ("concurrency", flags(max_queued_requests=4, internal_states=[{"effective_max_running_requests_per_dp": 8}]),
     "warning", "holds 12 and refuses", "--max-queued-requests"),
    ("exposure", flags(host="0.0.0.0"), "warning", "0.0.0.0 port 30000", "--host 127.0.0.1"),
    ("exposure", flags(host="::"), "warning", "replace the weights", "--host 127.0.0.1"),
    ("exposure", flags(host="gpu-7"), "warning", "gpu-7", "firewall"),
    ("request-logging", flags(log_requests=True), "note", "prompts and responses", "--log-requests"),
    ("model-type", info(model_type="llama"), "error", "serves llama, qwen3_moe is trained", "--model-path"),
    ("vocabulary", model(vocab_size=41), "error", "41 on the server and 37 in the trainer", "--model-path"),
    ("vocabulary", lambda f: with_trainer(f, task_vocab_size=50), "error", "tokenizer has 50 ids", "own tokenizer"),
    ("tied-embeddings", model(tie_word_embeddings=True), "error", "tie_word_embeddings True (server)", "--model-path"),
    ("layer-shapes", model(num_hidden_layers=3, head_dim=8), "error", "num_hidden_layers 3 (server) and 2 (trainer)",
     "--model-path"),
    ("rotary-and-norm", model(rope_parameters={"rope_type": "default", "rope_theta": 1e4}), "error",
     "rope_theta 10000.0 (server) and 1000000.0 (trainer)", "--json-model-override-args"),
    ("rotary-and-norm", model(rms_norm_eps=1e-5), "error", "rms_norm_eps", "--json-model-override-args"),
    ("experts", model(num_experts_per_tok=2), "error", "num_experts_per_tok 2", "--model-path"),
    ("experts", model(norm_topk_prob=False), "error", "norm_topk_prob False", "--model-path"),
    ("dtype", flags(dtype="bfloat16"), "warning", "bf16, the trainer in fp32", "--dtype float32"),
    ("dtype", flags(dtype="auto"), "warning", "fp16, the trainer in fp32", "--dtype float32"),
    ("quantization", flags(quantization="fp8"), "warning", "(fp8)", "--quantization"),
    ("quantization", model(quantization_config={"quant_method": "fp8"}), "error", "quantised", "--model-path"),
    ("kv-cache-dtype", flags(kv_cache_dtype="fp8_e5m2"), "warning", "fp8_e5m2", "--kv-cache-dtype auto"),
    ("matmul-precision", flags(enable_tf32_matmul=True), "warning", "TF32", "--enable-tf32-matmul"),
    ("matmul-precision", both(flags(dtype="bfloat16", enable_fp32_lm_head=True), trained_dtype("bf16")), "note",
     "logits in fp32", "--enable-fp32-lm-head"),
    ("adapters", flags(enable_lora=True), "warning", "LoRA", "--enable-lora"),
    ("adapters", flags(lora_paths=["a"]), "warning", "LoRA", "--lora-paths"),
    ("loaded-weights", flags(load_format="dummy"), "note", "random weights", "--load-format dummy"),
    ("temperature", lambda f: replace(f, server=server("bad_dense"), trainer=trainer(DENSE, {"temperature": 0.7})),
     "error", "1.00 times", "SGLANG_RETURN_ORIGINAL_LOGPROB"),
    ("temperature", lambda f: replace(f, server=server("bad_dense")), "warning", "does not matter",
     "rollout.temperature=1"),
    ("kept-ids", rollout(top_p=0.9), "error", "finite top_k", "rollout.top_k to a number from 2 to 4096"),
    ("kept-ids", rollout(top_k=5000), "error", "more than the 4096", "--sampling-mask-max-tokens 5000"),
    ("kept-ids", both(rollout(top_k=4), flags(speculative_algorithm="EAGLE")), "error", "EAGLE",
     "--speculative-algorithm"),
    ("kept-ids", both(rollout(top_k=4), served(request_fields=("input_ids",))), "error", "cannot return", "0.5.20"),
    ("sampling-defaults", flags(preferred_sampling_params={"repetition_penalty": 1.2}), "error", "repetition_penalty",
     "--preferred-sampling-params"),
    ("penalties-and-bias", flags(watermark_default_enabled=True), "error", "watermarks", "--enable-watermark"),
    ("penalties-and-bias", flags(dllm_algorithm="LowConfidence"), "error", "diffusion", "--dllm-algorithm"),
    ("penalties-and-bias", flags(enable_custom_logit_processor=True), "note", "bring none",
     "--enable-custom-logit-processor"),
    ("input-logprobs", rollout(temperature=0.5), "note", "ignore temperature=0.5", "input_token_logprobs"),
    ("stop-tokens", served(generation_config={"eos_token_id": [1, 2]}), "warning", "(1 of 2)", "eos_token_id"),
    ("speculative-decoding", flags(speculative_algorithm="EAGLE"), "warning", "not trained", "--speculative-algorithm"),
    ("speculative-decoding", flags(speculative_algorithm="EAGLE", speculative_accept_threshold_acc=0.9), "error",
     "do not follow their log-probs", "--speculative-accept-threshold"),
    ("on-policy-target", flags(rl_on_policy_target="fsdp"), "warning", "bf16", "--rl-on-policy-target"),
    ("determinism", flags(), "note", "seeds are ignored", "--enable-deterministic-inference"),
    ("answer-counts", plain(output_token_logprobs=ENTRIES[:-1]), "error", "7 log-probs", "tested SGLang"),
    ("answer-counts", plain(output_token_logprobs=[*ENTRIES, ENTRIES[0]]), "error", "9 log-probs", "tested SGLang"),
    ("answer-counts", plain(prompt_tokens=5), "error", "4 tokens was counted as 5", "tested SGLang"),
    ("answer-counts", plain(output_token_logprobs=ENTRIES[::-1]), "error", "other tokens", "tested SGLang"),
    ("answer-accepted", rejected_probe, "error", "nan_logprob", "tested SGLang"),
    ("answer-accepted", both(rollout(top_k=4), refused_probe("truncated")), "error", "answered 400", "tested SGLang"),
    ("answer-logprobs", plain(output_token_logprobs=[[None, 1, None]]), "error", "no finite", "tested SGLang"),
    ("answer-logprobs", plain(output_token_logprobs=[[-math.inf, 1, None]]), "error", "no finite", "tested SGLang"),
    ("answer-logprobs", plain(output_token_logprobs=[[0.1, 1, None]]), "error", "positive", "tested SGLang"),
    ("answer-logprobs", plain(output_token_logprobs=None), "error", "no log-probs", "tested SGLang"),
    ("answer-kept-ids", truncated(output_token_sampling_mask=None), "note", "silently", "rollout.top_k=-1"),
    ("answer-kept-ids", both(rollout(top_k=4), truncated(output_token_sampling_mask=None)), "error", "silent", "top_p"),
    ("answer-kept-ids", refused_probe("truncated"), "note", "refused", "rollout.top_k=-1"),
    ("answer-kept-ids", truncated(output_token_sampling_logprobs=RENORMALISED[1:]), "error", "7 log-probs", "top_k"),
    ("answer-kept-ids", truncated(output_token_sampling_mask=[[36]] * 8), "error", "lacks its token", "top_k"),
    ("answer-kept-ids", truncated(output_token_sampling_logprobs=[0.5] * 8), "error", "positive", "top_k"),
    ("answer-routes", plain(routed_experts=None), "error", "silently", "--enable-return-routed-experts"),
    ("answer-routes", plain(routed_experts="AAAA"), "error", "3 bytes of routes, 11 tokens x 2 layers x 3", "--enable"),
    ("answer-routes", plain(routed_experts="not base64"), "error", "not base64", "--enable"),
    ("answer-spans", plain(weight_versions=None), "error", "which weights", "max_staleness"),
    ("answer-spans", plain(weight_versions=[{"version": "default", "start": 0, "end": 7}]), "error", "do not cover",
     "max_staleness"),
]  # fmt: skip


def finding(name: str, facts: Facts) -> Finding:
    return SGLANG[name].run(facts)


@pytest.mark.parametrize("name", [check.name for check in SGLANG if check.name != "determinism"])
def test_a_suitable_server_passes(name: str) -> None:
    assert finding(name, good()).status == "good", finding(name, good())


@pytest.mark.parametrize(
    ("name", "change", "found"),
    [
        ("kept-ids", rollout(top_p=0.9, top_k=8), "up to 4096 a token"),
        ("generation-config", served(generation_config={"temperature": 0.6}), "OpenAI endpoints only"),
        ("experts", lambda _: Facts(server("bad_dense"), trainer(DENSE)), "neither model"),
        (
            "routes",
            lambda _: Facts(server("bad_dense"), trainer(DENSE, {"sglang": {"capture_routes": False}})),
            "no exp",
        ),
        ("answer-routes", lambda _: Facts(server("bad_dense")), "no experts"),
        ("chunked-prefill", flags(chunked_prefill_size=-1), "off"),
        ("cache-across-updates", flags(disable_radix_cache=True), "no prefix cache"),
        ("cache-across-updates", flags(), "flushed at every weight update"),
        ("exposure", both(flags(host="0.0.0.0"), flags(api_key="k")), "asks for a key"),
        ("exposure", flags(host="::1"), "own machine only"),
        ("answer-accepted", refused_probe("truncated"), "would train on it"),
        ("weight-version", info(weight_version="17"), "'17'"),
    ],
)
def test_what_is_harmless_passes(name: str, change: Change, found: str) -> None:
    seen = finding(name, change(good()))
    assert seen.status == "good" and found in seen.found


def test_a_deterministic_server_passes_too() -> None:
    assert finding("determinism", with_flags(good(), enable_deterministic_inference=True)).status == "good"


@pytest.mark.parametrize(
    ("name", "change", "status", "found", "fix"), DEFECTS, ids=lambda v: v if type(v) is str else ""
)
def test_a_defect_is_found_and_its_fix_named(name: str, change: Change, status: str, found: str, fix: str) -> None:
    seen = finding(name, change(good()))
    assert (seen.status, seen.decided) == (status, True)
    assert found in seen.found and fix in seen.fix
    for sentence in (seen.found, seen.fix):
        assert not re.search(r"\. [A-Z]", sentence), f"more than one sentence: {sentence}"


def test_every_check_has_a_defect_that_it_finds() -> None:
    judged = {"generation-config"}  # its files never change what /generate samples; it may be undecided only
    assert {name for name, *_ in DEFECTS} | judged == {check.name for check in SGLANG}


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("generation-config", flags(frontend="rust"), "rust frontend"),
        ("generation-config", served(generation_config=None), "generation_config.json is not known"),
        ("vocabulary", served(model_config=None), "config.json is not known"),
        ("version", flags(version="unknown"), "'unknown'"),
        ("dtype", flags(dtype="int8"), "'int8'"),
        ("control-endpoints", served(paths=None), "does not list"),
        ("temperature", all_listed_alike, "too close"),
        ("temperature", plain(output_top_logprobs=None), "listed no likeliest tokens"),
        ("answer-counts", served(is_paused=True), "paused server"),
        ("answer-counts", refused_probe("plain"), "was refused"),
        ("answer-routes", flags(enable_return_routed_experts=False), "not captured"),
        ("answer-spans", info(weight_version="7"), "changed during the probe"),
        ("attention-backend", flags(attention_backend=None), "has not said"),
        ("layer-shapes", served(model_config={}), "do not both state num_hidden_layers"),
        ("concurrency", flags(internal_states=[{}]), "how many requests"),
        ("chunked-prefill", lambda f: Facts(with_server(f, context_length=None).server), "length of prompts"),
    ],
)
def test_what_cannot_be_decided_is_said_and_not_guessed(name: str, change: Change, reason: str) -> None:
    seen = finding(name, change(good()))
    assert (seen.status, seen.decided) == ("note", False)
    assert reason in seen.found


@pytest.mark.parametrize("name", [check.name for check in SGLANG])
def test_no_check_fails_when_nothing_is_known(name: str) -> None:
    silent = with_server(good(), server_info={}, model_info={}, model_config=None, generation_config=None, paths=None,
                         request_fields=None, probes={})  # fmt: skip
    seen = finding(name, replace(silent, trainer=TrainerFacts()))
    assert (seen.status, seen.decided) == ("note", False)


def test_without_a_trainer_only_what_the_server_alone_shows_is_judged() -> None:
    alone = Facts(server("bad_dense"))
    assert {f.check: f.status for f in SGLANG.run(alone) if f.decided and f.status in ("error", "warning")} == {
        "sampling-defaults": "error",
        "temperature": "error",
        "weight-version": "warning",
        "exposure": "warning",
    }


def test_a_layout_is_noted_without_a_trainer_too() -> None:
    assert finding("parallel-layout", Facts(with_flags(good(), tp_size=4).server)).status == "note"


def test_configurations_of_old_and_new_transformers_compare_equal() -> None:
    new = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "num_local_experts": 8, "dtype": "bfloat16"}
    old = {"rope_theta": 1e6, "rope_scaling": None, "num_experts": 8, "torch_dtype": "bfloat16"}
    assert {k: v for k, v in comparable(old).items() if k != "torch_dtype"} == {
        k: v for k, v in comparable(new).items() if k != "rope_parameters"
    }
    yarn = {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    assert comparable(yarn)["rope_type"] == "yarn" and comparable(yarn)["factor"] == 4.0
