"""Checks of an SGLang server: every defect, by the registry of its check, and what passes or cannot be decided."""

import base64
import math
from dataclasses import replace
from functools import partial
from typing import Any

import doctor_facts
import pytest
from doctor_facts import Defect, answer, both, flags, good, info, model, refused_probe, rollout, served, server, sglang

from megatron_rc.doctor.registry import Finding
from megatron_rc.doctor.server.answers import ANSWERS
from megatron_rc.doctor.server.examine import SGLANG
from megatron_rc.doctor.server.facts import Facts, TrainerFacts, comparable
from megatron_rc.doctor.server.model import MODEL
from megatron_rc.doctor.server.sampling import SAMPLING
from megatron_rc.doctor.server.serving import SERVING

DENSE = doctor_facts.RECORDED["bad_dense"]["model_config"]
META = good().server.probes["plain"].meta
ENTRIES = META["output_token_logprobs"]
RENORMALISED = good().server.probes["truncated"].meta["output_token_sampling_logprobs"]


def first_logprob(value: Any) -> Any:
    return answer("plain", output_token_logprobs=[[value, *ENTRIES[0][1:]], *ENTRIES[1:]])


def shorter(facts: Facts) -> Facts:
    output_ids = facts.server.probes["plain"].body["output_ids"][:7]
    spans = [{"version": "default", "start": 0, "end": 7}]
    fields = {"completion_tokens": 7, "output_token_logprobs": ENTRIES[:7], "weight_versions": spans}
    routes = base64.b64encode(base64.b64decode(META["routed_experts"])[: 4 * 10 * 2 * 3]).decode()
    return answer("plain", output_ids, **fields, routed_experts=routes)(facts)


NEEDED = rollout(top_k=4)
"""The job samples with kept ids."""
plain, truncated = partial(answer, "plain"), partial(answer, "truncated")


def dense(**rollout: Any) -> doctor_facts.Change:
    """Another server and the trainer of its model, with these settings of rollout."""
    return lambda _: Facts(server("bad_dense"), doctor_facts.trainer(DENSE, rollout))


def without_path(path: str) -> doctor_facts.Change:
    return lambda facts: served(paths=tuple(p for p in facts.server.paths or () if p != path))(facts)


IN_BF16 = doctor_facts.trained(job=doctor_facts.trainer(DENSE, train={"dtype": "bf16"}).job)


OF_SERVING = [
    Defect("version", flags(version="0.5.9"), warning="SGLang 0.5.9 is outside 0.5.20 to 0.5.23", fix="sglang==0.5.23"),
    Defect("version", flags(version="0.6.0rc1"), warning="outside", fix="sglang==0.5.23"),
    Defect("engine", rollout(engine="embedded"), warning="engine 'embedded'", fix="rollout.engine=sglang"),
    Defect("control-endpoints", without_path("/flush_cache"), error="no /flush_cache", fix="0.5.20 or newer"),
    Defect("control-endpoints", without_path("/weights_checker"), warning="half-finished update", fix="0.5.20"),
    Defect("serving-state", served(is_paused=True), error="paused", fix="/continue_generation"),
    Defect("serving-state", info(is_generation=False), error="does not generate", fix="--is-embedding"),
    Defect("weight-version", info(weight_version="mine"), warning="no trainer", fix="--weight-version"),
    Defect("disaggregation", flags(disaggregation_mode="prefill"), warning="prefill", fix="--disaggregation-mode"),
    Defect("parallel-layout", flags(tp_size=4), note="tp=4", fix="old/k3"),
    Defect("parallel-layout", both(flags(dp_size=2), sglang(weight_sync="tensor")), error="dp_size=2",
           fix="weight_sync=disk"),
    Defect("parallel-layout", both(flags(pp_size=2), sglang(weight_sync="distributed")), error="pp_size=2", fix="disk"),
    Defect("attention-backend", flags(decode_attention_backend="triton"), note="torch_native and decode triton",
           fix="--attention-backend"),
    Defect("chunked-prefill", flags(chunked_prefill_size=8), note="more than 8 tokens", fix="--chunked-prefill-size"),
    Defect("chunked-prefill", flags(enable_mixed_chunk=True), note="share a batch", fix="--enable-mixed-chunk"),
    Defect("cache-across-updates", flags(enable_lmcache=True), error="enable_lmcache", fix="--enable-lmcache"),
    Defect("cache-across-updates", flags(hicache_storage_backend="file"), error="old weights", fix="--hicache"),
    Defect("routes", flags(enable_return_routed_experts=False), error="silently", fix="--enable-return-routed-experts"),
    Defect("routes", both(flags(enable_return_routed_experts=False), sglang(capture_routes=False)),
           note="neither compared nor replayed", fix="--enable-return-routed-experts"),
    Defect("routes", model(num_local_experts=0), error="has no experts", fix="capture_routes=false"),
    Defect("context-length", rollout(max_new_tokens=243), error="need 255 tokens, server and model take 254",
           fix="--context-length"),
    Defect("context-length", flags(max_total_num_tokens=20), error="cache holds 20", fix="--max-total-tokens"),
    Defect("context-length", flags(allow_auto_truncate=True), error="silently", fix="--allow-auto-truncate"),
    Defect("concurrency", flags(max_total_num_tokens=500), note="need 896 tokens of cache, it holds 500; a retracted",
           fix="rollout.sglang.concurrency"),
    Defect("concurrency", flags(internal_states=[{"effective_max_running_requests_per_dp": 8}]), note="24 of them wait",
           fix="--max-running-requests"),
    Defect("concurrency", flags(max_queued_requests=4, internal_states=[{"effective_max_running_requests_per_dp": 8}]),
           warning="holds 12 and refuses", fix="--max-queued-requests"),
    Defect("exposure", flags(host="0.0.0.0"), warning="0.0.0.0 port 30000", fix="--host 127.0.0.1"),
    Defect("exposure", flags(host="::"), warning="replace the weights", fix="--host 127.0.0.1"),
    Defect("exposure", flags(host="gpu-7"), warning="gpu-7", fix="firewall"),
    Defect("request-logging", flags(log_requests=True), note="prompts and responses", fix="--log-requests"),
]  # fmt: skip
OF_MODEL = [
    Defect("model-type", info(model_type="llama"), error="serves llama, qwen3_moe is trained", fix="--model-path"),
    Defect("vocabulary", model(vocab_size=41), error="41 on the server and 37 in the trainer", fix="--model-path"),
    Defect("vocabulary", doctor_facts.trained(task_vocab_size=50), error="tokenizer has 50 ids", fix="own tokenizer"),
    Defect("tied-embeddings", model(tie_word_embeddings=True), error="tie_word_embeddings True", fix="--model-path"),
    Defect("layer-shapes", model(num_hidden_layers=3, head_dim=8), error="num_hidden_layers 3 (server) and 2 (trainer)",
           fix="--model-path"),
    Defect("rotary-and-norm", model(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
           error="rope_theta 10000.0 (server) and 1000000.0 (trainer)", fix="--json-model-override-args"),
    Defect("rotary-and-norm", model(rms_norm_eps=1e-05), error="rms_norm_eps", fix="--json-model-override-args"),
    Defect("experts", model(num_experts_per_tok=2), error="num_experts_per_tok 2", fix="--model-path"),
    Defect("experts", model(norm_topk_prob=False), error="norm_topk_prob False", fix="--model-path"),
    Defect("dtype", flags(dtype="bfloat16"), warning="bf16, the trainer in fp32", fix="--dtype float32"),
    Defect("dtype", flags(dtype="auto"), warning="fp16, the trainer in fp32", fix="--dtype float32"),
    Defect("quantization", flags(quantization="fp8"), warning="(fp8)", fix="--quantization"),
    Defect("quantization", model(quantization_config={"quant_method": "fp8"}), error="quantised", fix="--model-path"),
    Defect("kv-cache-dtype", flags(kv_cache_dtype="fp8_e5m2"), warning="fp8_e5m2", fix="--kv-cache-dtype auto"),
    Defect("matmul-precision", flags(enable_tf32_matmul=True), warning="TF32", fix="--enable-tf32-matmul"),
    Defect("matmul-precision", both(flags(dtype="bfloat16", enable_fp32_lm_head=True), IN_BF16),
           note="logits in fp32", fix="--enable-fp32-lm-head"),
    Defect("adapters", flags(enable_lora=True), warning="LoRA", fix="--enable-lora"),
    Defect("adapters", flags(lora_paths=["a"]), warning="LoRA", fix="--lora-paths"),
    Defect("loaded-weights", flags(load_format="dummy"), note="random weights", fix="--load-format dummy"),
]  # fmt: skip
OF_SAMPLING = [
    Defect("temperature", dense(temperature=0.7), error="1.00 times", fix="SGLANG_RETURN_ORIGINAL_LOGPROB"),
    Defect("temperature", lambda f: replace(f, server=server("bad_dense")), warning="does not matter",
           fix="rollout.temperature=1"),
    Defect("kept-ids", rollout(top_p=0.9), error="finite top_k", fix="rollout.top_k to a number from 2 to 4096"),
    Defect("kept-ids", rollout(top_k=5000), error="more than the 4096", fix="--sampling-mask-max-tokens 5000"),
    Defect("kept-ids", both(rollout(top_k=4), flags(speculative_algorithm="EAGLE")), error="EAGLE",
           fix="--speculative-algorithm"),
    Defect("kept-ids", both(rollout(top_k=4), served(request_fields=("input_ids",))), error="cannot return",
           fix="0.5.20"),
    Defect("sampling-defaults", flags(preferred_sampling_params={"repetition_penalty": 1.2}),
           error="repetition_penalty", fix="--preferred-sampling-params"),
    Defect("penalties-and-bias", flags(watermark_default_enabled=True), error="watermarks", fix="--enable-watermark"),
    Defect("penalties-and-bias", flags(dllm_algorithm="LowConfidence"), error="diffusion", fix="--dllm-algorithm"),
    Defect("penalties-and-bias", flags(enable_custom_logit_processor=True), note="bring none",
           fix="--enable-custom-logit-processor"),
    Defect("input-logprobs", rollout(temperature=0.5), note="ignore temperature=0.5", fix="input_token_logprobs"),
    Defect("stop-tokens", served(generation_config={"eos_token_id": [1, 2]}), warning="(1 of 2)", fix="eos_token_id"),
    Defect("speculative-decoding", flags(speculative_algorithm="EAGLE"), warning="not trained",
           fix="--speculative-algorithm"),
    Defect("speculative-decoding", flags(speculative_algorithm="EAGLE", speculative_accept_threshold_acc=0.9),
           error="do not follow their log-probs", fix="--speculative-accept-threshold"),
    Defect("on-policy-target", flags(rl_on_policy_target="fsdp"), warning="bf16", fix="--rl-on-policy-target"),
    Defect("determinism", flags(), note="seeds are ignored", fix="--enable-deterministic-inference"),
]  # fmt: skip
OF_ANSWERS = [
    Defect("answer-accepted", first_logprob(None),
           error="discard the answer to a plain request: nan_logprob, a log-prob is null", fix="tested SGLang"),
    Defect("answer-accepted", plain(prompt_tokens=5), error="prompt_tokens is 5, expected 4"),
    Defect("answer-accepted", plain(output_token_logprobs=ENTRIES[::-1]), error="other tokens"),
    Defect("answer-accepted", plain(weight_versions=[{"version": "default", "start": 0, "end": 7}]),
           error="cover 7 of 8 tokens"),
    Defect("answer-accepted", both(NEEDED, refused_probe("truncated")), error="answered 400"),
    Defect("answer-accepted", both(NEEDED, truncated(output_token_sampling_mask=None)), error="missing_support"),
    Defect("answer-counts", plain(output_token_logprobs=ENTRIES[:-1]), error="7 log-probs came back for 8 tokens",
           fix="tested SGLang"),
    Defect("answer-counts", plain(output_token_logprobs=[*ENTRIES, ENTRIES[0]]), error="9 log-probs"),
    Defect("answer-counts", plain(output_token_logprobs=None), error="0 log-probs"),
    Defect("answer-counts", shorter, error="8 tokens were asked for and 7 came"),
    Defect("answer-logprobs", first_logprob(None), error="null", fix="tested SGLang"),
    Defect("answer-logprobs", first_logprob(-math.inf), error="infinite"),
    Defect("answer-logprobs", first_logprob(0.1), error="above 0"),
    Defect("answer-kept-ids", truncated(output_token_sampling_mask=None), note="no kept ids", fix="rollout.top_k=-1"),
    Defect("answer-kept-ids", both(NEEDED, truncated(output_token_sampling_mask=None)), error="no kept ids"),
    Defect("answer-kept-ids", refused_probe("truncated"), note="refused"),
    Defect("answer-kept-ids", both(NEEDED, refused_probe("truncated")), error="refused"),
    Defect("answer-kept-ids", truncated(output_token_sampling_logprobs=RENORMALISED[1:]), error="7 log-probs"),
    Defect("answer-kept-ids", truncated(output_token_sampling_mask=[[36]] * 8), error="not among its kept ids"),
    Defect("answer-kept-ids", truncated(output_token_sampling_mask=[list(range(37))] * 8),
           error="more kept ids than top_k=4"),
    Defect("answer-kept-ids", truncated(output_token_sampling_logprobs=[0.5] * 8), error="above 0"),
    Defect("answer-routes", plain(routed_experts=None), error="no routes", fix="--enable-return-routed-experts"),
    Defect("answer-routes", plain(routed_experts="AAAA"), error="3 bytes, expected 66 expert ids"),
    Defect("answer-spans", plain(weight_versions=None), error="which weights", fix="max_lag"),
]  # fmt: skip
DEFECTS = {"serving": OF_SERVING, "model": OF_MODEL, "sampling": OF_SAMPLING, "answers": OF_ANSWERS}
CHECKS = {"serving": SERVING, "model": MODEL, "sampling": SAMPLING, "answers": ANSWERS}
CANNOT_FAIL = {"sampling": {"generation-config"}}
"""Its files never change what /generate samples."""


@pytest.mark.parametrize("defect", [defect for defects in DEFECTS.values() for defect in defects], ids=str)
def test_a_defect_is_found_and_its_fix_named(defect: Defect) -> None:
    defect.assert_found()


@pytest.mark.parametrize("registry", DEFECTS)
def test_every_check_finds_a_defect(registry: str) -> None:
    found = {defect.check for defect in DEFECTS[registry]} | CANNOT_FAIL.get(registry, set())
    assert found == {check.name for check in CHECKS[registry]}


@pytest.mark.parametrize("name", sorted({check.name for check in ANSWERS} - {"answer-accepted", "answer-kept-ids"}))
def test_an_answer_that_is_damaged_elsewhere_leaves_a_check_undecided(name: str) -> None:
    finding = ANSWERS[name].run(answer("plain", prompt_tokens=5)(good()))
    assert (finding.status, finding.decided) == ("note", False)
    assert finding.found == "the answer is damaged: prompt_tokens is 5, expected 4"


def test_configurations_of_old_and_new_transformers_compare_equal() -> None:
    new = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "num_local_experts": 8, "dtype": "bfloat16"}
    old = {"rope_theta": 1e6, "rope_scaling": None, "num_experts": 8, "torch_dtype": "bfloat16"}
    assert {k: v for k, v in comparable(old).items() if k != "torch_dtype"} == {
        k: v for k, v in comparable(new).items() if k != "rope_parameters"
    }
    yarn = {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    assert comparable(yarn)["rope_type"] == "yarn" and comparable(yarn)["factor"] == 4.0
    of_layers = {"text_config": {"moe_num_experts": [1, 64]}, "num_experts": None}
    assert comparable(of_layers)["num_experts"] == 64 and comparable({})["num_experts"] == 0


ALL_ALIKE = [[[-3.6, 5, None], [-3.6, 6, None]], *META["output_top_logprobs"][1:]]


def finding(name: str, facts: Facts) -> Finding:
    return SGLANG[name].run(facts)


@pytest.mark.parametrize("name", [check.name for check in SGLANG if check.name != "determinism"])
def test_a_suitable_server_passes(name: str) -> None:
    assert finding(name, good()).status == "good", finding(name, good())


HARMLESS: list[tuple[str, doctor_facts.Change, str]] = [
    ("kept-ids", rollout(top_p=0.9, top_k=8), "up to 4096 per token"),
    ("generation-config", served(generation_config={"temperature": 0.6}), "OpenAI endpoints only"),
    ("experts", dense(), "neither model"),
    ("routes", dense(sglang={"capture_routes": False}), "no exp"),
    ("answer-routes", lambda _: Facts(server("bad_dense")), "no experts"),
    ("chunked-prefill", flags(chunked_prefill_size=-1), "off"),
    ("cache-across-updates", flags(disable_radix_cache=True), "no prefix cache"),
    ("cache-across-updates", flags(), "flushed at every weight update"),
    ("exposure", both(flags(host="0.0.0.0"), flags(api_key="k")), "asks for a key"),
    ("exposure", flags(host="::1"), "own machine only"),
    ("answer-accepted", refused_probe("truncated"), "would train on it"),
    ("weight-version", info(weight_version="17"), "'17'"),
    ("determinism", flags(enable_deterministic_inference=True), "do not depend on the batch"),
]
UNDECIDED: list[tuple[str, doctor_facts.Change, str]] = [
    ("generation-config", flags(frontend="rust"), "rust frontend"),
    ("generation-config", served(generation_config=None), "generation_config.json is not known"),
    ("vocabulary", served(model_config=None), "config.json is not known"),
    ("version", flags(version="unknown"), "'unknown'"),
    ("dtype", flags(dtype="int8"), "'int8'"),
    ("control-endpoints", served(paths=None), "does not list"),
    ("temperature", answer("plain", output_top_logprobs=ALL_ALIKE), "too close"),
    ("temperature", answer("plain", output_top_logprobs=None), "listed no likeliest tokens"),
    ("answer-counts", served(is_paused=True), "paused server"),
    ("answer-counts", refused_probe("plain"), "was refused"),
    ("answer-routes", flags(enable_return_routed_experts=False), "does not return routes"),
    ("answer-spans", info(weight_version="7"), "changed during the probe"),
    ("attention-backend", flags(attention_backend=None), "does not say which"),
    ("layer-shapes", served(model_config={}), "do not both state num_hidden_layers"),
    ("concurrency", flags(internal_states=[{}]), "how many requests"),
    ("chunked-prefill", lambda f: Facts(served(context_length=None)(f).server), "length of prompts"),
]


@pytest.mark.parametrize("case", [*HARMLESS, *UNDECIDED], ids=lambda case: case[0])
def test_what_is_harmless_passes_and_what_cannot_be_decided_is_said(case: tuple[str, doctor_facts.Change, str]) -> None:
    name, change, found = case
    seen = finding(name, change(good()))
    assert (seen.status, seen.decided) == (("good", True) if case in HARMLESS else ("note", False))
    assert found in seen.found


@pytest.mark.parametrize("name", [check.name for check in SGLANG])
def test_no_check_fails_when_nothing_is_known(name: str) -> None:
    nothing = {"server_info": {}, "model_info": {}, "model_config": None, "generation_config": None}
    silent = served(**nothing, paths=None, request_fields=None, probes={})(good())
    seen = finding(name, Facts(silent.server, TrainerFacts()))
    assert (seen.status, seen.decided) == ("note", False)


def test_without_a_trainer_only_what_the_server_alone_shows_is_judged() -> None:
    alone = Facts(server("bad_dense"))
    judged = [f for f in SGLANG.run(alone) if f.decided]
    assert {f.check for f in judged if f.status == "error"} == {"sampling-defaults", "temperature"}
    assert {f.check for f in judged if f.status == "warning"} == {"weight-version", "exposure"}
    assert finding("parallel-layout", Facts(flags(tp_size=4)(good()).server)).status == "note"
