"""The section ``rollout.sglang`` of a job's settings."""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from megatron_rc.schema.choice import Choice
from megatron_rc.schema.limits import check_at_least, check_positive


class TransportKind(NamedTuple):
    """A way to bring weights to servers, and what it needs."""

    sender: str
    """Module of `megatron_rc.rollout.sglang`, and the Transport in it."""
    sentence: str
    needs_folder: bool = False
    """It needs `sync_dir`."""
    needs_devices: bool = False
    """It needs the trainer's devices, unless trainer and servers all run on CPUs."""


PORTABLE_TRANSPORT = "tensor"
"""Needs neither, so that it reaches any server from any process."""
TRANSPORTS = {
    "disk": TransportKind(
        "send_disk:DiskSync",
        "servers load a checkpoint from `sync_dir`; for any server and layout, and the slowest.",
        needs_folder=True,
    ),
    PORTABLE_TRANSPORT: TransportKind(
        "send_tensor:TensorSync", "requests carry the weights; for small models and servers on the same host."
    ),
    "distributed": TransportKind(
        "send_group:GroupSync",
        "the trainer broadcasts the weights over NCCL or gloo; for servers on other GPUs.",
        needs_devices=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class SGLangSettings:
    """Servers that sample, and how requests and weights reach them."""

    urls: tuple[str, ...] = ("http://127.0.0.1:30000",)
    """Address of every server, or of one sglang-router."""
    concurrency: int = 256
    """Most requests in flight from one trainer process."""
    timeout_s: float = 600.0
    """Seconds to wait for one answer."""
    retries: int = 3
    """New attempts of a request that failed, where a retry is safe."""
    backoff_s: float = 1.0
    """Mean wait in seconds before the first new attempt; it doubles with each further one."""
    partial: bool = True
    """Continue a response that was stopped before its end, instead of discarding it."""
    weight_sync: Annotated[str, Choice(TRANSPORTS)] = "disk"
    """How weights reach the servers."""
    sync_dir: str | None = None
    """Folder for weight_sync disk that trainer and servers see under the same path; null takes OUTPUT/sync."""
    bucket_bytes: int = 512 * 1024**2
    """Bytes of weights sent at once; a sync takes this much memory plus one tensor."""
    capture_routes: bool = False
    """Ask for the experts of every token; the servers need --enable-return-routed-experts. Settings of `moe` that need
    them ask, too."""
    max_lag: int | None = None
    """Discard a response if weights more than this many versions old sampled one of its tokens; null discards none."""
    max_rejected_share: float = 0.05
    """The job stops when a larger share of a step's responses came back damaged."""
    dump_rejected: bool = False
    """Write the damaged responses to OUTPUT/rejected."""

    def __post_init__(self) -> None:
        if not self.urls:
            raise ValueError("urls must name at least one server")
        check_at_least(1, concurrency=self.concurrency, bucket_bytes=self.bucket_bytes)
        check_at_least(0, retries=self.retries, max_rejected_share=self.max_rejected_share)
        check_positive(timeout_s=self.timeout_s, backoff_s=self.backoff_s)
        if self.max_lag is not None:
            check_at_least(0, max_lag=self.max_lag)
