"""What else turns logits into log-probs, and entropy, on this machine: called alike, or named with the reason why not.

A peer takes logits [N, V_local] of one shard and answers ([N] log-probs, [N] entropy or None) with a gradient. Those
for vocabulary-parallel logits run in a real process group of one rank.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from timing.bench import reason

LogProbs = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]


class Peer(NamedTuple):
    name: str
    version: str
    call: LogProbs
    """(logits, targets, with entropy) -> (log-probs, entropy)."""
    entropy: bool = False
    """Answers the entropy too, with its gradient."""
    vocab_parallel: bool = True
    """Made for logits that are sharded over tensor-parallel ranks."""
    in_place: bool = False
    """Writes the gradient over the logits."""
    differentiable: bool = True


class Peers(NamedTuple):
    present: list[Peer]
    absent: dict[str, str]
    """Name -> why."""
    heads: dict[str, Any]
    """Those that take hidden states, by name: timing.cross_entropy.HeadPeer."""


def find_peers(device: torch.device, transformer_engine: Path | None, flash_attention: Path | None) -> Peers:
    """Ours, PyTorch, and every other implementation that can be called here.

    Args:
        transformer_engine: the folder `transformer_engine` of a checkout or of an unpacked wheel, where it is not
            installed.
        flash_attention: the file `flash_attn/ops/triton/cross_entropy.py` of a checkout, likewise.
    """
    peers = Peers([ours("triton"), ours("torch"), *_pytorch(device)], {}, {})
    finders: dict[str, Callable[[], Iterator[Peer]]] = {
        "Megatron-Core": lambda: _megatron(device),
        "Liger": _liger,
        "TransformerEngine": lambda: _transformer_engine(transformer_engine),
        "flash-attention": lambda: flash_attention_peer(flash_attention, device),
    }
    for name, find in finders.items():
        try:
            peers.present.extend(find())
        except Exception as error:  # a peer that breaks at import, however it does, must not end the run
            peers.absent[name] = reason(error)
    return peers


def one_rank_group(device: torch.device) -> dist.ProcessGroup:
    """The process group of this process alone, made once."""
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
        )
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def eager(logits: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
    log_p = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    logprobs = log_p.gather(-1, targets[:, None])[:, 0]
    return logprobs, -(log_p.exp() * log_p).sum(-1) if with_entropy else None


def ours(backend: str, *, mask: Tensor | None = None, temperature: float = 1.0) -> Peer:
    from megatron_rc import __version__, vocab_parallel_logprobs

    options: dict[str, Any] = {"mask": mask, "temperature": temperature, "inplace_backward": True, "backend": backend}

    def call(logits: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        answer = vocab_parallel_logprobs(logits, targets, with_entropy=with_entropy, **options)
        return answer if isinstance(answer, tuple) else (answer, None)

    return Peer(f"megatron_rc {backend}", __version__, call, entropy=True, in_place=True)


def _pytorch(device: torch.device) -> Iterator[Peer]:
    yield Peer("PyTorch eager", torch.__version__, eager, entropy=True, vocab_parallel=False)
    # a CPU shows that it can be traced; compiling would need a C++ compiler
    compiled = torch.compile(eager, backend="inductor" if device.type == "cuda" else "eager")

    def call(logits: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        torch._dynamo.maybe_mark_dynamic(logits, 0)
        torch._dynamo.maybe_mark_dynamic(targets, 0)
        return compiled(logits, targets, with_entropy)

    yield Peer("torch.compile", torch.__version__, call, entropy=True, vocab_parallel=False)


def _megatron(device: torch.device) -> Iterator[Peer]:
    with warnings.catch_warnings(), without_if_broken("transformer_engine"):
        # what it says when it is imported without TransformerEngine and Apex
        warnings.simplefilter("ignore")
        from megatron.core import jit, parallel_state

    if device.type == "cpu":
        jit.disable_jit_fuser()
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    group = one_rank_group(device)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()

    def unfused(logits: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, None]:
        return -vocab_parallel_cross_entropy(logits[:, None], targets[:, None])[:, 0], None

    def fused(logits: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, None]:
        return -fused_vocab_parallel_cross_entropy(logits[:, None], targets[:, None], group)[:, 0], None

    yield Peer("Megatron-Core", version("megatron-core"), unfused)
    yield Peer("Megatron-Core fused", version("megatron-core"), fused)


def _liger() -> Iterator[Peer]:
    from liger_kernel.ops.grpo_loss import fused_selective_log_softmax
    from liger_kernel.ops.vocab_parallel_cross_entropy import LigerVocabParallelCEFunction

    def vocab_parallel(logits: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, None]:
        loss = LigerVocabParallelCEFunction.apply(
            logits[:, None], targets[:, None], None, -100, 0.0, "megatron", "partition"
        )
        return -loss[:, 0], None

    def selective(logits: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, None]:
        # the last row of its input is never read: one row less than the others do
        return fused_selective_log_softmax(logits.detach()[None], targets[None, :-1], 1.0)[0], None

    yield Peer("Liger vocab-parallel", version("liger-kernel"), vocab_parallel)
    yield Peer("Liger selective", version("liger-kernel"), selective, vocab_parallel=False, differentiable=False)


def _transformer_engine(folder: Path | None) -> Iterator[Peer]:
    folder = folder or _installed("transformer_engine")
    with _empty_packages("transformer_engine", folder, ("common", "common/triton")):
        module = _load(folder / "pytorch/triton/cross_entropy.py")

    class CrossEntropy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
            loss, *saved = module.cross_entropy_forward(logits, targets, 0.0, False, None, -100, True)
            logits, stats, targets, ctx.count, ctx.rank, ctx.size = saved
            ctx.save_for_backward(logits, stats, targets)
            return loss

        @staticmethod
        def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
            rest = 0.0, False, ctx.rank, ctx.size, -100
            return module.cross_entropy_backward(*ctx.saved_tensors, ctx.count, upstream, *rest), None

    def call(logits: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, None]:
        return -CrossEntropy.apply(logits[None], targets[None])[0], None

    yield Peer("TransformerEngine Triton", _digest(module), call, in_place=True)


def flash_attention_peer(file: Path | None, device: torch.device) -> Iterator[Peer]:
    file = file or _installed("flash_attn") / "ops/triton/cross_entropy.py"
    if device.type == "cpu":
        raise RuntimeError("its wrapper asks for a CUDA device")
    module = _load(file)
    group = one_rank_group(device)

    def call(logits: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, None]:
        losses, _ = module.cross_entropy_loss(logits, targets, inplace_backward=True, process_group=group)
        return -losses, None

    yield Peer("flash-attention Triton", _digest(module), call, in_place=True)


def _installed(package: str) -> Path:
    """Its folder, found without importing it: its compiled libraries are not needed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named {package!r}, and no path to it was given")
    return Path(next(iter(spec.submodule_search_locations)))


@contextmanager
def without_if_broken(name: str) -> Iterator[None]:
    """Hides a package that is found and cannot be imported, such as a transformer_engine whose libraries are missing:
    Megatron-Core asks whether it can be imported, and is prepared for ImportError alone."""
    try:
        importlib.import_module(name)
    except ImportError:
        yield
    except Exception:
        with _modules({name: None}):
            yield
    else:
        yield


@contextmanager
def _modules(entries: dict[str, ModuleType | None]) -> Iterator[None]:
    """Entries of sys.modules for a while; None makes the import fail. Afterwards the packages are gone again, with all
    that was imported below them: others look whether the name can be imported."""
    sys.modules.update(entries)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for loaded in [m for m in sys.modules if any(m == name or m.startswith(f"{name}.") for name in entries)]:
            del sys.modules[loaded]


def _load(file: Path) -> ModuleType:
    file = file.resolve()
    spec = importlib.util.spec_from_file_location(f"peer_{'_'.join(file.with_suffix('').parts[1:])}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _empty_packages(name: str, folder: Path, inner: tuple[str, ...]) -> AbstractContextManager[None]:
    """Packages of that name without their __init__, for as long as a file that imports from them is loaded."""
    entries: dict[str, ModuleType | None] = {}
    for where in ("", *inner):
        module = ModuleType(".".join([name, *Path(where).parts]))
        module.__path__ = [str(folder / where)]
        entries[module.__name__] = module
    return _modules(entries)


def _digest(module: ModuleType) -> str:
    assert module.__file__ is not None
    return f"sha256 {hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()[:12]}"
