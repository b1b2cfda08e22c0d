"""Checks that server and trainer hold the same model, at a precision that is known."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rc.doctor.registry import Outcome, Registry, Undecided, bad, good
from megatron_rc.doctor.server.facts import Facts
from megatron_rc.models.config import DTYPES
from megatron_rc.rollout.sglang.buckets import server_dtype

MODEL: Registry[Facts] = Registry("model")

SAME_MODEL = "Serve a checkpoint of the model that is trained (--model-path), or point model.hf_path at the served one."
LAYER_FIELDS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                "head_dim")  # fmt: skip
ROTARY_FIELDS = ("rope_theta", "rope_type", "factor", "original_max_position_embeddings", "rms_norm_eps", "hidden_act",
                 "attention_bias")  # fmt: skip
EXPERT_FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step",
                 "mlp_only_layers")  # fmt: skip


def compared(facts: Facts, names: Sequence[str]) -> Outcome:
    """Fields that both configurations state must be equal."""
    served, trained = facts.server.config, facts.trainer.config
    shared = [n for n in names if n in served.require() and n in trained.require()]
    if not shared:
        raise Undecided(f"server and trainer do not both state {names[0]}")
    different = [f"{n} {served[n]!r} (server) and {trained[n]!r} (trainer)" for n in shared if served[n] != trained[n]]
    if different:
        return bad(f"the models differ: {', '.join(different)}")
    return good(f"equal: {', '.join(shared)}")


@MODEL.check("model-type", compares="architecture of both models", severity="error", fix=SAME_MODEL)
def model_type(facts: Facts) -> Outcome:
    served, trained = facts.server.model["model_type"], facts.trainer.config["model_type"]
    return good(f"both are {served}") if served == trained else bad(f"the server serves {served}, {trained} is trained")


@MODEL.check(
    "vocabulary",
    compares="vocab_size of both models, and the ids of the task's tokenizer",
    severity="error",
    fix=SAME_MODEL,
)
def vocabulary(facts: Facts) -> Outcome:
    size, task = facts.trainer.config["vocab_size"], facts.trainer.task_vocab_size
    served = facts.server.config["vocab_size"]
    if served != size:
        return bad(
            f"vocab_size is {served} on the server and {size} in the trainer; an id outside its own ends a server"
        )
    if task is not None and task > size:
        return bad(f"the task's tokenizer has {task} ids, the models have {size}", fix="Use the model's own tokenizer.")
    return good(f"vocab_size is {size} on both; ids go in and out, so the server's tokenizer is never used")


@MODEL.check(
    "tied-embeddings",
    compares="tie_word_embeddings of both models",
    severity="error",
    fix=SAME_MODEL,
)
def tied_embeddings(facts: Facts) -> Outcome:
    return compared(facts, ("tie_word_embeddings",))


@MODEL.check("layer-shapes", compares="depth and widths of both models", severity="error", fix=SAME_MODEL)
def layer_shapes(facts: Facts) -> Outcome:
    return compared(facts, LAYER_FIELDS)


@MODEL.check(
    "rotary-and-norm",
    compares="rotary base and scaling, norm epsilon, activation",
    severity="error",
    fix="Serve the checkpoint of the model that is trained, without --json-model-override-args.",
)
def rotary_and_norm(facts: Facts) -> Outcome:
    return compared(facts, ROTARY_FIELDS)


@MODEL.check("experts", compares="experts and routing of both models", severity="error", fix=SAME_MODEL)
def experts(facts: Facts) -> Outcome:
    if not facts.server.config["num_experts"] and not facts.trainer.config["num_experts"]:
        return good("neither model has experts")
    return compared(facts, EXPERT_FIELDS)


@MODEL.check(
    "dtype",
    compares="--dtype against train.dtype",
    severity="warning",
    fix="Start the server with --dtype of the trainer's precision, or change train.dtype.",
)
def dtype(facts: Facts) -> Outcome:
    served, trained = served_dtype(facts), facts.trainer.settings.train.dtype
    if served == trained:
        return good(f"both compute in {served}")
    return bad(
        f"the server computes in {served}, the trainer in {trained}",
        fix=f"Start the server with --dtype {DTYPES[trained].name}, set train.dtype={served}, "
        "or let the correction work.",
    )


def served_dtype(facts: Facts) -> str:
    """fp32, bf16 or fp16."""
    config = facts.server.config.require() if facts.server.flags["dtype"] == "auto" else {}
    try:
        found = str(server_dtype(facts.server.server_info, config)).removeprefix("torch.")
    except ValueError as unknown:
        raise Undecided(str(unknown), "Start the server with --dtype.") from None
    return next((dtype for dtype, precision in DTYPES.items() if precision.name == found), found)


@MODEL.check(
    "quantization",
    compares="the served weights against unquantised ones",
    severity="warning",
    fix="Start the server without --quantization.",
)
def quantization(facts: Facts) -> Outcome:
    flags = facts.server.flags
    if facts.server.config and facts.server.config.get("quantization_config"):
        return bad(
            "the served checkpoint is quantised, and the weights that the trainer sends are not",
            severity="error",
            fix="Serve the unquantised checkpoint (--model-path).",
        )
    if flags["quantization"]:
        return bad(
            f"the server quantises its weights ({flags['quantization']}); updates of such a server are not tested"
        )
    facts.server.config.require()
    return good("weights are served as they are sent")


@MODEL.check(
    "kv-cache-dtype",
    compares="precision of the key-value cache against that of the model",
    severity="warning",
    fix="Start the server with --kv-cache-dtype auto.",
)
def kv_cache_dtype(facts: Facts) -> Outcome:
    chosen = facts.server.flags["kv_cache_dtype"]
    if chosen in ("auto", facts.server.flags["dtype"]):
        return good("keys and values are kept in the precision of the model")
    return bad(f"the server keeps keys and values as {chosen}, which shifts every log-prob; the trainer keeps none")


@MODEL.check(
    "matmul-precision",
    compares="precision of matrix products and of the output layer",
    severity="warning",
    fix="Start the server without --enable-tf32-matmul.",
)
def matmul_precision(facts: Facts) -> Outcome:
    flags = facts.server.flags
    served = served_dtype(facts)
    if served == "fp32" and flags["enable_tf32_matmul"]:
        return bad("the server computes fp32 products in TF32, with 10 bits of mantissa")
    if served != "fp32" and flags["enable_fp32_lm_head"] and facts.trainer.settings.train.dtype == served:
        return bad(
            f"the server computes logits in fp32, the trainer's output layer in {served}",
            severity="note",
            fix="Start the server without --enable-fp32-lm-head, so that both round alike.",
        )
    return good("products are computed in the precision of the model")


@MODEL.check(
    "adapters",
    compares="adapters on the server against a trainer that has none",
    severity="warning",
    fix="Start the server without --enable-lora and --lora-paths.",
)
def adapters(facts: Facts) -> Outcome:
    flags = facts.server.flags
    if flags["enable_lora"] or flags["lora_paths"]:
        return bad("the server is set up for LoRA adapters, which the bridge neither asks for nor updates")
    return good("no adapters")


@MODEL.check(
    "loaded-weights",
    compares="where the served weights come from",
    severity="note",
    fix="Start the server without --load-format dummy, or trust the first weight update.",
)
def loaded_weights(facts: Facts) -> Outcome:
    if facts.server.flags["load_format"] == "dummy":
        return bad("the server started with random weights; a job sends its own before it samples")
    return good("weights of a checkpoint; a job sends its own before it samples")
