"""What else turns logits, or hidden states, into log-probs on this machine, or why it cannot be called.

Peers for vocabulary-parallel logits run in a real process group of one rank.
"""

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

OURS, TORCH, EAGER = "megatron_rc triton", "megatron_rc torch", "PyTorch eager"


class Peer(NamedTuple):
    name: str
    version: str
    call: Callable[..., Any]
    """(logits [N, V] of one shard, targets, with entropy) -> ([N] log-probs, [N] entropy or None), with a gradient;
    of a head (hidden, weight, targets) -> the sum of -log pi(target)."""
    entropy: bool = False
    """Answers the entropy too, with its gradient."""
    sharded: bool = True
    """Made for logits that are sharded over tensor-parallel ranks."""
    head: bool = False


class Peers(NamedTuple):
    present: list[Peer]
    absent: dict[str, str]
    """Name -> why."""

    def rows(self, *, entropy: bool, sharded: bool) -> list[Peer]:
        """Those for logits: with entropy all that answer it, without it those that know shards where that is asked."""
        rows = [peer for peer in self.present if not peer.head]
        return [peer for peer in rows if (peer.entropy if entropy else peer.sharded or not sharded)]


NOBODY = Peers([], {})


def find_peers(device: torch.device, folder: Path | None = None, without: tuple[str, ...] = ()) -> Peers:
    """Every other implementation that can be called here.

    Args:
        folder: where files of peers lie that are not installed, such as flash_attn/ops/triton/cross_entropy.py.
        without: names that are left out.
    """
    peers = Peers([], dict.fromkeys(without, "left out"))
    for name, find in {
        "PyTorch": lambda: _pytorch(device),
        "PyTorch linear_cross_entropy": _pytorch_head,
        "Megatron-Core": lambda: _megatron(device),
        "Liger": _liger,
        "TransformerEngine": _transformer_engine,
        "flash-attention": lambda: _flash_attention(device, folder),
        "cut-cross-entropy": _cut_cross_entropy,
    }.items():
        try:
            peers.present.extend(find() if name not in without else ())
        except Exception as error:  # a peer that breaks at import, however it does, must not end the run
            peers.absent[name] = reason(error)
    return peers


def reason(error: Exception) -> str:
    """The kind of an exception and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def eager(logits: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Any]:
    log_p = torch.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
    logprobs = log_p.gather(-1, targets[:, None])[:, 0]
    return logprobs, -(log_p.exp() * log_p).sum(-1) if with_entropy else None


def negative(losses: Tensor) -> tuple[Tensor, None]:
    return -losses, None


def _one_rank(device: torch.device) -> dist.ProcessGroup:
    """The process group of this process alone, made once."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _pytorch(device: torch.device) -> Iterator[Peer]:
    def head(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy((hidden @ weight.T).float(), targets, reduction="sum")

    yield Peer(EAGER, torch.__version__, eager, entropy=True, sharded=False)
    # a CPU shows that it can be traced; compiling would need a C++ compiler
    compiled = torch.compile(eager, backend="inductor" if device.type == "cuda" else "eager")
    yield Peer("torch.compile", torch.__version__, compiled, entropy=True, sharded=False)
    yield Peer(EAGER, torch.__version__, head, head=True)


def _pytorch_head() -> Iterator[Peer]:
    head = partial(functional.linear_cross_entropy, reduction="sum", options=torch.nn.LinearCrossEntropyOptions())
    yield Peer("PyTorch linear_cross_entropy", torch.__version__, head, head=True)


def _megatron(device: torch.device) -> Iterator[Peer]:
    with warnings.catch_warnings():
        # what it says when it is imported without TransformerEngine and Apex
        warnings.simplefilter("ignore")
        from megatron.core import jit, parallel_state
    if device.type == "cpu":
        jit.disable_jit_fuser()
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy as fused
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy as unfused

    group, name = _one_rank(device), "Megatron-Core"
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    yield Peer(name, version("megatron-core"), lambda z, t, _: negative(unfused(z[:, None], t[:, None])[:, 0]))
    yield Peer(
        f"{name} fused", version("megatron-core"), lambda z, t, _: negative(fused(z[:, None], t[:, None], group)[:, 0])
    )


def _liger() -> Iterator[Peer]:
    from liger_kernel.ops.vocab_parallel_cross_entropy import LigerVocabParallelCEFunction as Rows
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    more = None, -100, 0.0, "megatron", "partition"
    head: Any = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    release = version("liger-kernel")
    yield Peer("Liger", release, lambda z, t, _: negative(Rows.apply(z[:, None], t[:, None], *more)[:, 0]))
    yield Peer("Liger fused linear", release, lambda hidden, weight, t: head(weight, hidden, t), head=True)


def _transformer_engine() -> Iterator[Peer]:
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy as rows

    release = version("transformer-engine")
    yield Peer("TransformerEngine", release, lambda z, t, _: negative(rows(z[None], t[None], 0.0, False, None)[0]))


def _flash_attention(device: torch.device, folder: Path | None) -> Iterator[Peer]:
    """Its Triton file needs no build: the installed one, or the one in the folder of peers."""
    name = "flash_attn.ops.triton.cross_entropy"
    if folder is None:
        module = importlib.import_module(name)
    else:
        file = folder.resolve() / f"{name.replace('.', '/')}.py"
        spec = importlib.util.spec_from_file_location("flash_attention_peer", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    if device.type == "cpu":
        raise RuntimeError("its wrapper asks for a CUDA device")
    options = {"inplace_backward": True, "process_group": _one_rank(device)}
    yield Peer("flash-attention", "", lambda z, t, _: negative(module.cross_entropy_loss(z, t, **options)[0]))


def _cut_cross_entropy() -> Iterator[Peer]:
    from cut_cross_entropy import linear_cross_entropy

    head = partial(linear_cross_entropy, reduction="sum")
    yield Peer("cut-cross-entropy", version("cut-cross-entropy"), head, head=True)
