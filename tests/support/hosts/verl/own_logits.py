"""verl's own function from logits to log-probs and entropy, out of the tree that VERL_DIR names."""

import ast
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ENGINE, TENSOR_PARALLEL = "verl/workers/engine/megatron/transformer_impl.py", "verl/utils/megatron/tensor_parallel.py"
_FUNCTIONS = ("_VocabParallelEntropy", "vocab_parallel_entropy", "vocab_parallel_log_probs_from_logits")


def tree() -> str | None:
    return os.environ.get("VERL_DIR")


def _definitions(path: Path, names: tuple[str, ...], inside: str | None = None) -> ast.Module:
    module = ast.parse(path.read_bytes())
    body = module.body
    if inside is not None:
        (body,) = (node.body for node in body if isinstance(node, ast.ClassDef) and node.name == inside)
    module.body = [node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names]
    assert len(module.body) == len(names)
    return module


def logits_processor(folder: str) -> Any:
    """`MegatronEngineWithLMHead._lm_head_logits_processor` of a tree; it needs megatron-core and nothing of verl's."""
    import torch
    import torch._dynamo
    import torch.distributed as dist
    from megatron.core import parallel_state

    # its entropy compiles one line, which takes long and changes no result
    torch._dynamo.config.disable = True
    names: dict[str, Any] = {"torch": torch, "dist": dist, "mpu": parallel_state, "Callable": Any, "TensorDict": Any}
    for path, wanted, inside in (
        (TENSOR_PARALLEL, _FUNCTIONS, None),
        (ENGINE, ("_lm_head_logits_processor",), "MegatronEngineWithLMHead"),
    ):
        exec(compile(_definitions(Path(folder, path), wanted, inside), path, "exec"), names)
    engine = SimpleNamespace(engine_config=SimpleNamespace(entropy_from_logits_with_chunking=False))
    return lambda *args, **kwargs: names["_lm_head_logits_processor"](engine, *args, **kwargs)
