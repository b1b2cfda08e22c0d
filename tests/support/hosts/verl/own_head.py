"""verl's own path from hidden states to log-probs and entropy, out of a source tree of verl, on CPU.

Its two functions run as they are. So do its Triton kernels, interpreted, without the assertions that tensors are on
CUDA, in processes of their own:

    TRITON_INTERPRET=1 PYTHONPATH=tests/support python -W ignore own_head.py TREE ANSWERS.pt [HEAD.json]

writes what every rank answers to `head_job.case`, by (ranks, sequence parallelism); HEAD.json is what the tests compare
with elsewhere.
"""

import ast
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hosts.cut_out import run_definitions
from hosts.verl import head_job
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from megatron_rc.training import emulation

FORWARD, KERNELS = "verl/models/mcore/model_forward_fused.py", "verl/utils/kernel"
FUNCTIONS = ("fused_output_processor", "_fused_GPTModel_forward")
LAYOUTS = ((1, False), (2, False), (2, True))
"""Tensor-parallel ranks, and whether they split the rows."""


class _OnCPU(ast.NodeTransformer):
    def visit_Assert(self, node: ast.Assert) -> ast.Assert | None:
        return None if "is_cuda" in ast.unparse(node) else node


def _device() -> ModuleType:
    """verl.utils.device for one stream of a CPU."""
    module: Any = ModuleType("verl.utils.device")
    stream = SimpleNamespace(record_event=lambda event: None, wait_event=lambda event: None)
    module.get_torch_device = lambda: SimpleNamespace(
        Stream=lambda device: stream, Event=lambda: None, current_stream=lambda: stream,
        stream=lambda stream: contextlib.nullcontext(),
    )  # fmt: skip
    module.is_cuda_available = False
    module.get_device_capability = module.get_device_name = lambda: "cpu"
    return module


def _take_masks_of_scalars() -> None:
    """The interpreter takes masks that a comparison of scalars has made integers."""
    from triton.runtime.interpreter import InterpreterBuilder

    store: Any = InterpreterBuilder.create_masked_store

    def with_booleans(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return store(self, ptrs, value, mask, *rest)

    InterpreterBuilder.create_masked_store = with_booleans


def kernel(tree: str, folder: Path) -> Any:
    """verl's `linear_cross_entropy`, in a process under TRITON_INTERPRET=1; ``folder`` takes its files."""
    package = folder / "verl_kernel"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in ("kernels.py", "linear_cross_entropy.py"):
        (package / name).write_text(ast.unparse(_OnCPU().visit(ast.parse(Path(tree, KERNELS, name).read_bytes()))))
    for module in (ModuleType("verl"), ModuleType("verl.utils"), _device()):
        sys.modules[module.__name__] = module
    _take_masks_of_scalars()
    torch.cuda.nvtx.range = lambda name: contextlib.nullcontext()  # type: ignore[assignment]
    sys.path.insert(0, str(folder))
    return importlib.import_module("verl_kernel.linear_cross_entropy").linear_cross_entropy


def functions(tree: str, linear_cross_entropy: Any) -> dict[str, Any]:
    """`FUNCTIONS` of the tree, with this kernel."""
    names: dict[str, Any] = {
        "parallel_state": parallel_state,
        "gather_from_sequence_parallel_region": gather_from_sequence_parallel_region,
        "linear_cross_entropy": linear_cross_entropy,
        "CausalLMOutputForPPO": SimpleNamespace,
        "deprecate_inference_params": lambda context, params: context,
        "has_config_logger_enabled": lambda config: False,
    }
    run_definitions(Path(tree, FORWARD), FUNCTIONS, names)
    return {name: names[name] for name in FUNCTIONS}


def _rank(rank: int, tree: str, folder: str, ranks: int) -> None:
    emulation.emulate_cuda_on_cpu()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{ranks}", rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    own = Path(folder, f"{ranks}-{rank}")
    own.mkdir()
    made = functions(tree, kernel(tree, own))
    layouts = [layout for layout in LAYOUTS if layout[0] == ranks]
    answers = {layout: head_job.answers(made, head_job.case(), rank, *layout) for layout in layouts}
    torch.save(answers, own / "answers.pt")
    dist.destroy_process_group()


def answers(tree: str) -> dict[tuple[int, bool], list[Any]]:
    """By layout: for every rank, the answers of verl's own functions and kernels, which other processes compute."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
        command = [sys.executable, "-W", "ignore", __file__, tree, f"{folder}/answers.pt"]
        subprocess.run(command, env=environment, check=True, timeout=900)
        return torch.load(f"{folder}/answers.pt", weights_only=False)


def _main(tree: str, target: str, record: str | None = None) -> None:
    out: dict[tuple[int, bool], list[Any]] = {layout: [] for layout in LAYOUTS}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (1, 2):
            mp.start_processes(_rank, args=(tree, folder, ranks), nprocs=ranks, start_method="spawn")
            for rank in range(ranks):
                for layout, found in torch.load(f"{folder}/{ranks}-{rank}/answers.pt", weights_only=False).items():
                    out[layout].append([tuple(answer) for answer in found])
    torch.save(out, target)
    if record is not None:
        Path(record).write_text(json.dumps(head_job.recorded(head_job.Answer(*out[1, False][0][0]))) + "\n")


if __name__ == "__main__":
    _main(*sys.argv[1:])
