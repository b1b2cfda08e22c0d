"""verl's own function from logits to log-probs and entropy, out of the tree that VERL_DIR names."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
from hosts.cut_out import run_definitions

ENGINE, TENSOR_PARALLEL = "verl/workers/engine/megatron/transformer_impl.py", "verl/utils/megatron/tensor_parallel.py"
_FUNCTIONS = ("_VocabParallelEntropy", "vocab_parallel_entropy", "vocab_parallel_log_probs_from_logits")


def tree(source: str) -> str | None:
    """The tree of source "verl", which VERL_DIR names; None for the stand-in. Skips the test where none is named."""
    if source == "verl" and not os.environ.get("VERL_DIR"):
        pytest.skip("VERL_DIR names no source tree of verl")
    return os.environ["VERL_DIR"] if source == "verl" else None


def logits_processor(folder: str) -> Any:
    """`MegatronEngineWithLMHead._lm_head_logits_processor` of a tree; it needs megatron-core and nothing of verl's."""
    import torch
    import torch._dynamo
    import torch.distributed as dist
    from megatron.core import parallel_state

    # its entropy compiles one line, which takes long and changes no result
    torch._dynamo.config.disable = True
    names: dict[str, Any] = {"torch": torch, "dist": dist, "mpu": parallel_state, "Callable": Any, "TensorDict": Any}
    run_definitions(f"{folder}/{TENSOR_PARALLEL}", _FUNCTIONS, names)
    run_definitions(f"{folder}/{ENGINE}", ("_lm_head_logits_processor",), names, inside="MegatronEngineWithLMHead")
    engine = SimpleNamespace(engine_config=SimpleNamespace(entropy_from_logits_with_chunking=False))
    return lambda *args, **kwargs: names["_lm_head_logits_processor"](engine, *args, **kwargs)
