"""A trainer's side of SGLang: an engine that is patient for seconds only, and updates of servers that misbehave."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_answers import EXPERTS, LAYERS, TOP_K, VOCABULARY
from faulty_sglang import FaultySglang
from faulty_weights import weights_of

from megatron_rc.rollout.sglang.engine import SGLangEngine, alone
from megatron_rc.rollout.sglang.pool import Pool
from megatron_rc.rollout.sglang.weights import update_servers, weight_sync
from megatron_rc.settings.sglang import SGLangSettings

MODEL: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS, "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K, "max_position_embeddings": 256, "torch_dtype": "float32",
}  # fmt: skip
CONFIG = {"model_type": "qwen3", "vocab_size": 37, "max_position_embeddings": 64}
PATH = {"disk": "/update_weights_from_disk", "tensor": "/update_weights_from_tensor"}
"""The transports that reach servers in threads of one process."""


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


class Job:
    def __init__(self, urls: list[str], transport: Any, folder: Path, **options: Any) -> None:
        self.pool = Pool(urls, concurrency=4, timeout_s=60)
        given = {"bucket_bytes": 600, "sync_dir": str(folder), "timeout_s": 60.0, **options}
        self.sync = weight_sync(SGLangSettings(weight_sync=transport, **given), CONFIG)
        self.taken = 0

    def stream(self, seed: int, without: str = "", instead: dict[str, torch.Tensor] | None = None) -> Iterator[Any]:
        for name, tensor in (weights_of(seed) | (instead or {})).items():
            self.taken += 1
            if name != without:
                yield name, tensor

    def update(self, seed: int, version: int, **changes: Any) -> None:
        update_servers(self.pool, self.sync, self.stream(seed, **changes), version)

    @property
    def out(self) -> list[str | None]:
        return [server.out for server in self.pool.servers]


def holds(server: FaultySglang, seed: int) -> bool:
    return all(torch.equal(server.weights[name], tensor) for name, tensor in weights_of(seed).items())


@pytest.fixture
def start() -> Iterator[Any]:
    """Starts (job, server, ...), which end with the test; ``updated``: after a first update, of version 1."""
    with ExitStack() as stack:

        def started(transport: str, folder: Path, count: int = 2, info: Any = None, updated: bool = False) -> Any:
            servers = [stack.enter_context(FaultySglang(info=info)) for _ in range(count)]
            job = Job([server.url for server in servers], transport, folder)
            stack.callback(job.pool.close)
            stack.callback(job.sync.close)
            if updated:
                job.update(1, version=1)
            return job, *servers

        yield started
