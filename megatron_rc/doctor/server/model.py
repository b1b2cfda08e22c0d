"""Checks that server and trainer hold the same model, at a precision that is known."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from megatron_rc.analyze.known import USUAL
from megatron_rc.doctor.registry import Check, Finding, Registry, Undecided, error, good, note, warning
from megatron_rc.doctor.server.facts import Facts, of_flags
from megatron_rc.doctor.server.scores import FINE_K3
from megatron_rc.integrations.flag_rules import FlagRule
from megatron_rc.rollout.sglang.buckets import server_dtype
from megatron_rc.settings.model import DTYPES

MODEL: Registry[Facts] = Registry("model")

SAME_MODEL = "Serve a checkpoint of the model that is trained (--model-path), or point model.hf_path at the served one."
UNCHANGED = "Serve the checkpoint of the model that is trained, without --json-model-override-args."
LAYERS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
          "head_dim")  # fmt: skip
ROTARY = ("rope_theta", "rope_type", "factor", "original_max_position_embeddings", "rms_norm_eps", "hidden_act",
          "attention_bias")  # fmt: skip
EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step",
           "mlp_only_layers")  # fmt: skip


def compare(facts: Facts, *, names: Sequence[str], fix: str) -> Finding:
    """An error unless the fields that both configurations state are equal."""
    served, trained = facts.server.config, facts.trainer.config
    shared = [n for n in names if n in served.require() and n in trained.require()]
    if not shared:
        raise Undecided(f"server and trainer do not both state {names[0]}")
    different = [f"{n} {served[n]!r} (server) and {trained[n]!r} (trainer)" for n in shared if served[n] != trained[n]]
    if different:
        return error(f"the models differ: {', '.join(different)}", fix)
    return good(f"equal: {', '.join(shared)}")


@MODEL.check
def model_type(facts: Facts) -> Finding:
    """Architecture of both models."""
    served, trained = facts.server.model["model_type"], facts.trainer.config["model_type"]
    if served != trained:
        return error(f"the server serves {served}, {trained} is trained", SAME_MODEL)
    return good(f"both are {served}")


@MODEL.check
def vocabulary(facts: Facts) -> Finding:
    """vocab_size of both models, and the ids of the task's tokenizer."""
    size, task = facts.trainer.config["vocab_size"], facts.trainer.task_vocab_size
    served = facts.server.config["vocab_size"]
    if served != size:
        problem = f"vocab_size is {served} on the server and {size} in the trainer; an unknown id ends a server"
        return error(problem, SAME_MODEL)
    if task is not None and task > size:
        problem = f"the task's tokenizer has {task} ids, the models have {size}"
        return error(problem, "Use the model's own tokenizer.")
    return good(f"vocab_size is {size} on both; ids go in and out, so the server's tokenizer is never used")


for name, compares, fields, fix in (
    ("tied-embeddings", "tie_word_embeddings of both models", ("tie_word_embeddings",), SAME_MODEL),
    ("layer-shapes", "depth and widths of both models", LAYERS, SAME_MODEL),
    ("rotary-and-norm", "rotary base and scaling, norm epsilon, activation", ROTARY, UNCHANGED),
):
    MODEL.add(Check(name, compares, partial(compare, names=fields, fix=fix)))


@MODEL.check
def experts(facts: Facts) -> Finding:
    """Experts and routing of both models."""
    if not facts.server.config["num_experts"] and not facts.trainer.config["num_experts"]:
        return good("neither model has experts")
    return compare(facts, names=EXPERTS, fix=SAME_MODEL)


@MODEL.check
def dtype(facts: Facts) -> Finding:
    """--dtype against train.dtype."""
    served, trained = served_dtype(facts), facts.trainer.settings.train.dtype
    if served == trained:
        return good(f"both compute in {served}")
    flag = f"Start the server with --dtype {DTYPES[trained].name}"
    fix = f"{flag}, set train.dtype={served}, or let the correction work."
    return warning(f"the server computes in {served}, the trainer in {trained}", fix)


def served_dtype(facts: Facts) -> str:
    """fp32, bf16 or fp16."""
    config = facts.server.config.require() if facts.server.flags["dtype"] == "auto" else {}
    try:
        name = str(server_dtype(facts.server.server_info, config)).removeprefix("torch.")
    except ValueError as unknown:
        raise Undecided(str(unknown), "Start the server with --dtype.") from None
    return next((dtype for dtype, precision in DTYPES.items() if precision.name == name), name)


def _keeps_another_cache(flags: Any) -> bool:
    return flags["kv_cache_dtype"] not in ("auto", flags["dtype"])


def usual_k3(facts: Facts) -> float:
    """nats per token; the gap up to which healthy dense models of the server's precision were measured.

    A server that quantises weights or its cache counts as one in fp8. Source: docs/real.md, docs/atlas.md.
    """
    flags = facts.server.flags
    try:
        precision = served_dtype(facts)
        if flags["quantization"] or _keeps_another_cache(flags):
            precision = "fp8"
    except Undecided:
        return FINE_K3
    return max(FINE_K3, USUAL.get(precision, 0.0) ** 2 / 2)


@MODEL.check
def quantization(facts: Facts) -> Finding:
    """The served weights against unquantised ones."""
    flags = facts.server.flags
    if facts.server.config and facts.server.config.get("quantization_config"):
        fix = "Serve the unquantised checkpoint (--model-path)."
        return error("the served checkpoint is quantised, and the weights that the trainer sends are not", fix)
    if flags["quantization"]:
        problem = f"the server quantises its weights ({flags['quantization']}); updates of such a server are not tested"
        return warning(problem, "Start the server without --quantization.")
    facts.server.config.require()
    return good("weights are served as they are sent")


MODEL.add(of_flags("Precision of the key-value cache against that of the model", FlagRule(
    "kv-cache-dtype", _keeps_another_cache,
    "the server keeps keys and values as {args[kv_cache_dtype]}, which shifts every log-prob; the trainer keeps none",
    "Start the server with --kv-cache-dtype auto.", severity="warning",
    good="keys and values are kept in the precision of the model")))  # fmt: skip


@MODEL.check
def matmul_precision(facts: Facts) -> Finding:
    """Precision of matrix products and of the output layer."""
    flags, served = facts.server.flags, served_dtype(facts)
    if served == "fp32" and flags["enable_tf32_matmul"]:
        problem = "the server computes fp32 products in TF32, with 10 bits of mantissa"
        return warning(problem, "Start the server without --enable-tf32-matmul.")
    if served != "fp32" and flags["enable_fp32_lm_head"] and facts.trainer.settings.train.dtype == served:
        fix = "Start the server without --enable-fp32-lm-head, so that both round alike."
        return note(f"the server computes logits in fp32, the trainer's output layer in {served}", fix)
    return good("products are computed in the precision of the model")


MODEL.add(of_flags("Adapters on the server against a trainer that has none", FlagRule(
    "adapters", lambda flags: flags["enable_lora"] or flags["lora_paths"],
    "the server is set up for LoRA adapters, which the bridge neither asks for nor updates",
    "Start the server without --enable-lora and --lora-paths.", severity="warning", good="no adapters")))  # fmt: skip

MODEL.add(of_flags("Where the served weights come from", FlagRule(
    "loaded-weights", lambda flags: flags["load_format"] == "dummy",
    "the server started with random weights; a job sends its own before it samples",
    "Start the server without --load-format dummy, or trust the first weight update.", severity="note",
    good="weights of a checkpoint; a job sends its own before it samples")))  # fmt: skip
