"""Weight sync inside the requests themselves, which needs neither a shared folder nor another protocol than HTTP."""

import base64
import pickle
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from megatron_rc.rollout.sglang.buckets import Bucket, buckets
from megatron_rc.rollout.sglang.control import on_every
from megatron_rc.rollout.sglang.http import Server
from megatron_rc.rollout.sglang.transport import Transport


class TensorSync(Transport):
    """Send flat buckets by value, as the pickles of plain values that a server expects; none is ever read here.

    A request to a server without tensor parallelism carries ``bucket_bytes`` of weights, to which base64 adds a third.
    A server with tensor parallelism n needs n copies, so its requests carry 1/n of them. While a request is made, about
    five times ``bucket_bytes`` of host memory are in use (measured: 5.2).
    """

    undivided = ("dp_size",)

    def send(self, servers: Sequence[Server], weights: Iterator[tuple[str, Tensor]], version: int) -> dict[str, str]:
        failures: dict[str, str] = {}
        copies = {server.url: int(server.info.get("tp_size") or 1) for server in servers}
        for bucket in buckets(weights, self._settings.bucket_bytes // max(copies.values()), "cpu"):
            payload = _serialized(bucket)

            def post(server: Server, payload: str = payload) -> None:
                body = {
                    "serialized_named_tensors": [payload] * copies[server.url],
                    "load_format": "flattened_bucket",
                    "flush_cache": False,
                }
                server.post("/update_weights_from_tensor", body, self._settings.timeout_s)

            failures |= on_every([server for server in servers if server.url not in failures], post)[1]
            if len(failures) == len(servers):
                break
        return failures


def _serialized(bucket: Bucket) -> str:
    metadata = [
        SimpleNamespace(name=name, shape=shape, dtype=bucket.dtype, start_idx=start, end_idx=end, numel=end - start)
        for name, shape, start, end in bucket.spans()
    ]
    # a tensor is pickled with all of its storage, and a bucket may fill only a part of it
    data = bucket.data.clone() if bucket.data.nbytes < bucket.data.untyped_storage().nbytes() else bucket.data
    assert data.dtype == torch.uint8
    return base64.b64encode(pickle.dumps({"flattened_tensor": data, "metadata": metadata})).decode()
