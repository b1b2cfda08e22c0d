"""Weight sync by broadcast: trainer and servers join a torch.distributed group of their own, NCCL or gloo."""

import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megatron_rc.rollout.sglang.buckets import Bucket, buckets
from megatron_rc.rollout.sglang.control import on_every
from megatron_rc.rollout.sglang.http import Server, ServerError, own_address
from megatron_rc.rollout.sglang.transport import Transport

_POLL_SECONDS = 0.002  # delay of each broadcast at most; an update has one per bucket
_JOIN_SECONDS = 60.0  # a server joins after its current step, and NCCL sets up meanwhile
_DESTROY_SECONDS = 10.0  # bounds the end of a job; nothing depends on the answer


class _Group(NamedTuple):
    name: str
    handle: dist.ProcessGroup
    servers: Sequence[Server]


class GroupSync(Transport):
    """Broadcast bucket by bucket to all servers at once.

    ``bucket_bytes`` are held once in the trainer and once on every server; ``timeout_s`` is the limit for one bucket.
    When a server fails inside the group, the group is broken up, joined again without it, and the same bucket is sent
    again: a bucket may be loaded twice. Servers that cannot leave a broken broadcast fail with it.
    """

    undivided = ("dp_size", "pp_size")
    _group: _Group | None = None

    def send(self, servers: Sequence[Server], weights: Iterator[tuple[str, Tensor]], version: int) -> dict[str, str]:
        failures: dict[str, str] = {}
        backend = _backend(servers)
        device = torch.device("cpu" if backend == "gloo" else torch.cuda.current_device())
        try:
            for bucket in buckets(weights, self._settings.bucket_bytes, device):
                failures |= self._deliver([s for s in servers if s.url not in failures], bucket, backend)
                if len(failures) == len(servers):
                    break
        except BaseException:
            self._leave()
            raise
        return failures

    def _deliver(self, servers: Sequence[Server], bucket: Bucket, backend: str) -> dict[str, str]:
        failures: dict[str, str] = {}
        # the first failure may come from a server that restarted and left the group: all get a second chance
        is_first = True
        while live := [server for server in servers if server.url not in failures]:
            failed = self._join(live, backend) or self._broadcast(live, bucket)
            if not failed:
                break
            self._leave(notify=[server for server in live if server.url not in failed])
            if not is_first:
                failures |= failed
            is_first = False
        return failures

    def close(self) -> None:
        """Break up the group on both sides."""
        if self._group is not None:
            self._leave(notify=self._group.servers)

    def _join(self, servers: Sequence[Server], backend: str) -> dict[str, str]:
        """Form the group of ``servers`` unless it exists; returns a sentence per server that failed, by url."""
        if self._group is not None and set(self._group.servers) == set(servers):
            return {}
        self.close()
        # joining waits for all servers, so find out first which ones are gone
        gone = on_every(servers, lambda s: s.get("/model_info", _JOIN_SECONDS))[1]
        if gone:
            return gone
        sizes = [int(server.info.get("tp_size") or 1) for server in servers]
        world_size = 1 + sum(sizes)
        offsets = {server.url: 1 + sum(sizes[:i]) for i, server in enumerate(servers)}
        # never used twice: a server that missed the end of a group still holds its name
        name = f"weights-{uuid.uuid4().hex}"
        store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_JOIN_SECONDS)
        )

        def ask(server: Server) -> None:
            where = urlsplit(server.url)
            body = {
                "master_address": own_address(where.hostname or "", where.port or 80),
                "master_port": store.port,
                "rank_offset": offsets[server.url],
                "world_size": world_size,
                "group_name": name,
                "backend": backend,
            }
            server.post("/init_weights_update_group", body, _JOIN_SECONDS)

        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(on_every, servers, ask)
            try:
                handle = _join_group(store, name, world_size, backend, self._settings.timeout_s)
            except RuntimeError as error:
                failures = asked.result()[1]
                sentence = f"not all servers joined the group within {_JOIN_SECONDS:g} s: {error}"
                return failures or {server.url: sentence for server in servers}
            failures = asked.result()[1]
        self._group = _Group(name, handle, list(servers))
        return failures

    def _broadcast(self, servers: Sequence[Server], bucket: Bucket) -> dict[str, str]:
        assert self._group is not None
        group, timeout_s = self._group, self._settings.timeout_s
        body = {
            "names": bucket.names,
            "dtypes": [str(bucket.dtype).removeprefix("torch.")] * len(bucket.names),
            "shapes": [list(shape) for shape in bucket.shapes],
            "group_name": group.name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        with ThreadPoolExecutor(len(servers)) as threads:
            asked = {
                server.url: threads.submit(server.post, "/update_weights_from_distributed", body, timeout_s)
                for server in servers
            }
            broken = _broadcast(bucket.data, group.handle, list(asked.values()), timeout_s)
            if broken is not None:
                # end the broadcast of servers that are still in it, before waiting for their answers
                self._leave()
                _outlive(group.handle, timeout_s)
            failures = {url: sentence for url, future in asked.items() if (sentence := _error(future))}
            if broken is not None:
                _destroy([server for server in servers if server.url not in failures], group.name)
            return failures or (dict.fromkeys(asked, broken) if broken is not None else {})

    def _leave(self, notify: Sequence[Server] = ()) -> None:
        """Break up the group here, and on the servers in ``notify``."""
        if self._group is None:
            return
        group, self._group = self._group, None
        group.handle.abort()
        dist.destroy_process_group(group.handle)
        _destroy(notify, group.name)


def _destroy(servers: Sequence[Server], name: str) -> None:
    # failures do not matter: the name is not used again
    on_every(servers, lambda s: s.post("/destroy_weights_update_group", {"group_name": name}, _DESTROY_SECONDS))


def _backend(servers: Sequence[Server]) -> str:
    devices = {str(server.info.get("device", "cuda")) for server in servers}
    if devices == {"cpu"}:
        return "gloo"
    if devices == {"cuda"} and torch.cuda.is_available():
        return "nccl"
    needed = "servers on CPUs, or servers and a trainer on CUDA devices"
    raise ValueError(f"weight_sync=distributed needs {needed}; the servers run on {', '.join(sorted(devices))}")


def _join_group(store: dist.Store, name: str, world_size: int, backend: str, timeout_s: float) -> dist.ProcessGroup:
    """Rank 0 of a group separate from torch.distributed's default one, built the way the servers build theirs.

    torch has no public call for a group of processes that share no default group.
    """
    handle, _ = distributed_c10d._new_process_group_helper(
        world_size,
        0,
        [],
        distributed_c10d.Backend(backend),
        distributed_c10d.PrefixStore(name, store),
        group_name=distributed_c10d.GroupName(name),
        timeout=timedelta(seconds=_JOIN_SECONDS),
    )
    distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), handle)
    distributed_c10d._world.pg_group_ranks[handle] = {rank: rank for rank in range(world_size)}
    return handle


def _broadcast(data: Tensor, handle: dist.ProcessGroup, asked: Sequence[Future[Any]], timeout_s: float) -> str | None:
    """Broadcast ``data``; returns a sentence if that failed."""
    deadline = time.monotonic() + timeout_s
    try:
        work = dist.broadcast(data, src=0, group=handle, async_op=True)
        assert work is not None
        while not work.is_completed():
            if any(future.done() and _error(future) is not None for future in asked):
                return "another server failed during the broadcast"
            if time.monotonic() > deadline:
                return f"the broadcast was not over after {timeout_s:g} s"
            time.sleep(_POLL_SECONDS)
        work.wait()
    except RuntimeError as error:
        return f"the broadcast failed: {error}"
    return None


def _outlive(handle: dist.ProcessGroup, seconds: float) -> None:
    """Keep a broken group until its last broadcast times out: gloo cannot cancel it, and freeing the group waits."""
    threading.Thread(target=lambda kept: time.sleep(seconds), args=(handle,), daemon=True).start()


def _error(future: Future[Any]) -> str | None:
    try:
        future.result()
    except ServerError as error:
        return str(error)
    return None
