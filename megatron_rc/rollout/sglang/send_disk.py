"""Weight sync over a folder that trainer and servers share."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_rc.rollout.sglang.control import on_every
from megatron_rc.rollout.sglang.http import Server

_PREFIX = "weights-"
_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}


class DiskSync:
    """Write a checkpoint, and have every server load it.

    A truncated file ends the server's process and a missing one is accepted silently: the checkpoint appears under
    its name only when whole, on the disk and of the right size. The folder of the version that is served stays, so
    that a server can be restarted from it; older ones are deleted.
    """

    bracketed = False

    def __init__(
        self, sync_dir: str | Path, hf_config: Mapping[str, Any], *, shard_bytes: int, timeout_s: float
    ) -> None:
        """
        Args:
            sync_dir: of this job alone; the servers see it under the same path. Folders named weights-* in it are
                deleted when a newer version is served.
            hf_config: content of config.json.
            shard_bytes: at which another file is begun; this much host memory is held.
        """
        self._sync_dir, self._hf_config = Path(sync_dir).absolute(), dict(hf_config)
        self._shard_bytes, self._timeout_s = shard_bytes, timeout_s

    def refusal(self, info: Mapping[str, Any]) -> str | None:
        return None

    def send(self, servers: Sequence[Server], weights: Iterator[tuple[str, Tensor]], version: int) -> dict[str, str]:
        """Sentences of the servers that failed, by url."""
        written = self._write(weights, version)
        body = {"model_path": str(written), "flush_cache": False}
        done, failures = on_every(servers, lambda s: s.post("/update_weights_from_disk", body, self._timeout_s))
        if done:
            for old in self._sync_dir.glob(f"{_PREFIX}*"):
                if old != written:
                    # what cannot be deleted now is tried again after the next update
                    shutil.rmtree(old, ignore_errors=True)
        return failures

    def close(self) -> None:
        """Nothing to give back: the last version stays for servers that restart."""

    def _write(self, weights: Iterator[tuple[str, Tensor]], version: int) -> Path:
        # the random part keeps apart what a resumed job writes under the same version
        name = f"{_PREFIX}{version}-{uuid.uuid4().hex[:8]}"
        folder, final = self._sync_dir / f"{name}.writing", self._sync_dir / name
        try:
            folder.mkdir(parents=True)
            _write_checkpoint(folder, weights, self._hf_config, self._shard_bytes)
            _synchronize(folder)
            os.rename(folder, final)
            _synchronize(self._sync_dir)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            free = _free_gib(self._sync_dir)
            raise ValueError(
                f"rollout.sglang.sync_dir={str(self._sync_dir)!r} cannot take the weights, {free} free: {error}"
            ) from None
        return final


def _write_checkpoint(
    folder: Path, weights: Iterator[tuple[str, Tensor]], hf_config: dict[str, Any], shard_bytes: int
) -> None:
    files: dict[str, str] = {}
    pending: dict[str, Tensor] = {}
    pending_bytes = total_bytes = shards = 0
    dtype = torch.float32

    def flush() -> None:
        nonlocal pending, pending_bytes, shards
        shards += 1
        file = folder / f"model-{shards:05}.safetensors"
        save_file(pending, file, metadata={"format": "pt"})
        _check_whole(file, pending)
        _synchronize(file)
        files.update(dict.fromkeys(pending, file.name))
        pending, pending_bytes = {}, 0

    for name, tensor in weights:
        if pending and pending_bytes + tensor.nbytes > shard_bytes:
            flush()
        # a copy: the tensor may be a view of a parameter, and share its storage with others
        pending[name] = tensor.to("cpu", copy=True).contiguous()
        pending_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
        dtype = tensor.dtype
    flush()
    index = {"metadata": {"total_size": total_bytes}, "weight_map": files}
    architecture = {k: [v] for k, v in [("architectures", _ARCHITECTURES.get(hf_config["model_type"]))] if v}
    config = {**architecture, **hf_config, "dtype": str(dtype).removeprefix("torch.")}
    for file_name, content in [("model.safetensors.index.json", index), ("config.json", config)]:
        (folder / file_name).write_text(json.dumps(content, indent=2) + "\n")
        _synchronize(folder / file_name)


def _check_whole(file: Path, tensors: Mapping[str, Tensor]) -> None:
    with open(file, "rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        start = stream.tell()
    end = start + max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    found = {
        name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in header.items() if name in tensors
    }
    if file.stat().st_size != end or found != {name: tensor.nbytes for name, tensor in tensors.items()}:
        raise OSError(f"{file.name} is not whole after writing")


def _synchronize(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free_gib(folder: Path) -> str:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return f"{shutil.disk_usage(existing).free / 2**30:.1f} GiB"
