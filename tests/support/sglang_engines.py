"""The SGLang engine as tests want it: patient for seconds, not for minutes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from faulty_answers import EXPERTS, LAYERS, TOP_K, VOCABULARY

from megatron_rc.rollout.sglang.engine import SGLangEngine, alone
from megatron_rc.settings.sglang import SGLangSettings

MODEL: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS, "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K, "max_position_embeddings": 256, "torch_dtype": "float32",
}  # fmt: skip


@contextmanager
def sglang_engine(*urls: str, model: dict[str, Any] = MODEL, **changes: Any) -> Iterator[SGLangEngine]:
    """An engine with ``changes`` of SGLangSettings or of the engine's own arguments."""
    arguments: dict[str, Any] = {"agree": alone, "writer": True}
    arguments |= {name: changes.pop(name) for name in ("agree", "writer", "return_routes", "probe") if name in changes}
    patience = {"concurrency": 64, "timeout_s": 20.0, "retries": 2, "backoff_s": 0.02}
    engine = SGLangEngine(SGLangSettings(urls=urls, weight_sync="tensor", **patience | changes), model, **arguments)
    try:
        yield engine
    finally:
        engine.close()
