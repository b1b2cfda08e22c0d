"""Weight sync inside the requests themselves: needs neither a shared folder nor a route other than HTTP."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_rc.rollout.sglang.buckets import Bucket, buckets
from megatron_rc.rollout.sglang.control import on_every, unreachable
from megatron_rc.rollout.sglang.http import Server
from megatron_rc.settings import SGLangSettings


class TensorSync:
    """Send flat buckets by value.

    The server expects pickles. They are made of plain values, so no memory is shared and the hosts may differ; none is
    ever read here.
    """

    bracketed = True

    def __init__(self, settings: SGLangSettings, hf_config: Mapping[str, Any]) -> None:
        """
        Args:
            settings: a request to an undivided server carries ``bucket_bytes`` of weights. Base64 adds a third, and a
                server with tensor parallelism n needs n copies, so its requests carry 1/n of them. While a request is
                made, about five times ``bucket_bytes`` of host memory are in use (measured: 5.2).
        """
        self._bucket_bytes, self._timeout_s = settings.bucket_bytes, settings.timeout_s

    def refusal(self, info: Mapping[str, Any]) -> str | None:
        return unreachable(info, "tensor", "dp_size")

    def send(self, servers: Sequence[Server], weights: Iterator[tuple[str, Tensor]], version: int) -> dict[str, str]:
        """Sentences of the servers that failed, by url; the others have all the weights."""
        failures: dict[str, str] = {}
        copies = {server.url: int(server.info.get("tp_size") or 1) for server in servers}
        for bucket in buckets(weights, self._bucket_bytes // max(copies.values()), "cpu"):
            payload = _serialized(bucket)

            def post(server: Server, payload: str = payload) -> None:
                body = {
                    "serialized_named_tensors": [payload] * copies[server.url],
                    "load_format": "flattened_bucket",
                    "flush_cache": False,
                }
                server.post("/update_weights_from_tensor", body, self._timeout_s)

            failures |= on_every([server for server in servers if server.url not in failures], post)[1]
            if len(failures) == len(servers):
                break
        return failures

    def close(self) -> None:
        """Nothing is kept between updates."""


def _serialized(bucket: Bucket) -> str:
    metadata = [
        SimpleNamespace(name=name, shape=shape, dtype=bucket.dtype, start_idx=start, end_idx=end, numel=end - start)
        for name, shape, start, end in bucket.spans()
    ]
    # a tensor is pickled with all of its storage, of which a bucket may fill a part
    data = bucket.data.clone() if bucket.data.nbytes < bucket.data.untyped_storage().nbytes() else bucket.data
    assert data.dtype == torch.uint8
    return base64.b64encode(pickle.dumps({"flattened_tensor": data, "metadata": metadata})).decode()
