"""Every difference between the served and the trained model that doctor finds."""

from __future__ import annotations

import pytest
from doctor_facts import RECORDED, Change, Defect, both, flags, info, model, trained, trainer

from megatron_rc.doctor.server.facts import comparable
from megatron_rc.doctor.server.model import MODEL


def trained_dtype(name: str) -> Change:
    return trained(job=trainer(RECORDED["bad_dense"]["model_config"], train={"dtype": name}).job)


DEFECTS = [
    Defect("model-type", info(model_type="llama"), error="serves llama, qwen3_moe is trained", fix="--model-path"),
    Defect("vocabulary", model(vocab_size=41), error="41 on the server and 37 in the trainer", fix="--model-path"),
    Defect("vocabulary", trained(task_vocab_size=50), error="tokenizer has 50 ids", fix="own tokenizer"),
    Defect(
        "tied-embeddings",
        model(tie_word_embeddings=True),
        error="tie_word_embeddings True (server)",
        fix="--model-path",
    ),
    Defect(
        "layer-shapes",
        model(num_hidden_layers=3, head_dim=8),
        error="num_hidden_layers 3 (server) and 2 (trainer)",
        fix="--model-path",
    ),
    Defect(
        "rotary-and-norm",
        model(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
        error="rope_theta 10000.0 (server) and 1000000.0 (trainer)",
        fix="--json-model-override-args",
    ),
    Defect("rotary-and-norm", model(rms_norm_eps=1e-05), error="rms_norm_eps", fix="--json-model-override-args"),
    Defect("experts", model(num_experts_per_tok=2), error="num_experts_per_tok 2", fix="--model-path"),
    Defect("experts", model(norm_topk_prob=False), error="norm_topk_prob False", fix="--model-path"),
    Defect("dtype", flags(dtype="bfloat16"), warning="bf16, the trainer in fp32", fix="--dtype float32"),
    Defect("dtype", flags(dtype="auto"), warning="fp16, the trainer in fp32", fix="--dtype float32"),
    Defect("quantization", flags(quantization="fp8"), warning="(fp8)", fix="--quantization"),
    Defect("quantization", model(quantization_config={"quant_method": "fp8"}), error="quantised", fix="--model-path"),
    Defect("kv-cache-dtype", flags(kv_cache_dtype="fp8_e5m2"), warning="fp8_e5m2", fix="--kv-cache-dtype auto"),
    Defect("matmul-precision", flags(enable_tf32_matmul=True), warning="TF32", fix="--enable-tf32-matmul"),
    Defect(
        "matmul-precision",
        both(flags(dtype="bfloat16", enable_fp32_lm_head=True), trained_dtype("bf16")),
        note="logits in fp32",
        fix="--enable-fp32-lm-head",
    ),
    Defect("adapters", flags(enable_lora=True), warning="LoRA", fix="--enable-lora"),
    Defect("adapters", flags(lora_paths=["a"]), warning="LoRA", fix="--lora-paths"),
    Defect("loaded-weights", flags(load_format="dummy"), note="random weights", fix="--load-format dummy"),
]


@pytest.mark.parametrize("defect", DEFECTS, ids=str)
def test_a_defect_is_found_and_its_fix_named(defect: Defect) -> None:
    defect.assert_found()


def test_every_check_finds_a_defect() -> None:
    assert {defect.check for defect in DEFECTS} == {check.name for check in MODEL}


def test_configurations_of_old_and_new_transformers_compare_equal() -> None:
    new = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "num_local_experts": 8, "dtype": "bfloat16"}
    old = {"rope_theta": 1e6, "rope_scaling": None, "num_experts": 8, "torch_dtype": "bfloat16"}
    assert {k: v for k, v in comparable(old).items() if k != "torch_dtype"} == {
        k: v for k, v in comparable(new).items() if k != "rope_parameters"
    }
    yarn = {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    assert comparable(yarn)["rope_type"] == "yarn" and comparable(yarn)["factor"] == 4.0
