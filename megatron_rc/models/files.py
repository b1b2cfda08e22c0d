"""The safetensors files of a Hugging Face checkpoint: read slice by slice, written file by file."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_rc.files import read_json, replace_text, synchronize
from megatron_rc.models.families import family_of
from megatron_rc.models.names import HfTensor

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_ROTARY = "rotary_emb.inv_freq"
"""End of the name of a tensor that follows from config.json."""


class HfCheckpoint:
    """The tensors of a folder, mapped into memory; only the slices that `read` returns are loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stack = ExitStack()
        self._handles: dict[str, Any] = {}
        if (path / _INDEX).is_file():
            self.listing, files = path / _INDEX, read_json(path / _INDEX).get("weight_map")
            if not isinstance(files, dict):
                raise ValueError(f"{self.listing} is not a safetensors index: it needs a weight_map")
            self.files: dict[str, str] = files
        elif (path / _SINGLE).is_file():
            self.listing = path / _SINGLE
            self.files = dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)
        else:
            raise ValueError(f"model.hf_path={str(path)!r} has neither {_SINGLE} nor {_INDEX}")

    def __enter__(self) -> "HfCheckpoint":
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def _open(self, file: str) -> Any:
        if file not in self._handles:
            if not (self.path / file).is_file():
                raise ValueError(f"{self.path / file} is named by {_INDEX} but does not exist")
            try:
                self._handles[file] = self._stack.enter_context(safe_open(self.path / file, "pt"))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{self.path / file} is not a whole safetensors file: {error}") from None
        return self._handles[file]

    def _slice(self, name: str) -> Any:
        file = self.files[name]
        try:
            return self._open(file).get_slice(name)
        except SafetensorError:
            raise ValueError(f"{self.path / file} has no tensor {name!r}, which {_INDEX} says it holds") from None

    def check(self, expected: Iterable[HfTensor]) -> None:
        """Compare names and shapes with ``expected``, from the headers alone.

        Raises:
            ValueError: a tensor is missing, unexpected or of another shape; the error names it and its file.
        """
        known = {tensor.name: tensor for tensor in expected}
        for tensor in known.values():
            if tensor.name not in self.files:
                raise ValueError(f"{self.listing} has no tensor {tensor.name!r}, which its config.json asks for")
            shape = tuple(self._slice(tensor.name).get_shape())
            if shape != tensor.shape:
                shapes = f"{tensor.name} is {list(shape)}, config.json asks for {list(tensor.shape)}"
                raise ValueError(f"{self.path / self.files[tensor.name]} holds a checkpoint of another shape: {shapes}")
        for name, file in self.files.items():
            # some writers store what other tensors or config.json determine
            derived = name.endswith(_ROTARY) or (name == "lm_head.weight" and "model.embed_tokens.weight" in known)
            if name not in known and not derived:
                raise ValueError(f"{self.path / file} has an unexpected tensor {name!r}, unknown to config.json")

    def read(self, tensor: HfTensor, start: int, stop: int) -> Tensor:
        """Rows ``start:stop`` along the split dimension, or the whole tensor."""
        rows = self._slice(tensor.name)
        return rows[:, start:stop] if tensor.split == 1 else rows[start:stop]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor under its name, one at a time, except those that the rotary embedding is computed from."""
        for name in self.files:
            if not name.endswith(_ROTARY):
                yield name, self._slice(name)[:]


class Writer:
    """Writes a checkpoint tensor by tensor; a file gets its name only when it is whole and on the disk."""

    def __init__(self, path: Path, shard_bytes: int) -> None:
        """Make the folder; a file of ``shard_bytes``, the most that is held in host memory, is followed by another."""
        path.mkdir(parents=True, exist_ok=True)
        self.path, self.shard_bytes = path, shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = self._total_bytes = 0
        self._shards: list[list[str]] = []
        self._dtype = torch.float32

    def add(self, name: str, tensor: Tensor) -> None:
        """Copy ``tensor``; first write a file if it would grow beyond ``shard_bytes``."""
        if self._pending and self._pending_bytes + tensor.nbytes > self.shard_bytes:
            self._flush()
        # the tensor may be a view of a parameter that changes, and share its storage with others
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes
        self._dtype = tensor.dtype

    def finish(self, hf_config: Mapping[str, Any]) -> None:
        """Write the last file, name all files, and write the index and config.json."""
        self._flush()
        count = len(self._shards)
        names = [_SINGLE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        for old in {*self.path.glob("model*.safetensors"), self.path / _INDEX} - {self.path / n for n in names}:
            old.unlink(missing_ok=True)
        for shard, name in enumerate(names):
            os.replace(self._unfinished(shard), self.path / name)
        if count > 1:
            files = {tensor: file for file, held in zip(names, self._shards, strict=True) for tensor in held}
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(files.items()))}
            replace_text(self.path / _INDEX, json.dumps(index, indent=2) + "\n")
        architecture = family_of(hf_config["model_type"]).architecture
        config = {**hf_config, "architectures": [architecture], "dtype": str(self._dtype).removeprefix("torch.")}
        replace_text(self.path / "config.json", json.dumps(config, indent=2) + "\n")

    def _flush(self) -> None:
        file = self._unfinished(len(self._shards))
        save_file(self._pending, file, metadata={"format": "pt"})
        _check_whole(file, self._pending)
        synchronize(file)
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def _unfinished(self, shard: int) -> Path:
        return self.path / f".{shard}.writing"


def _check_whole(file: Path, tensors: Mapping[str, Tensor]) -> None:
    with open(file, "rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        start = stream.tell()
    header.pop("__metadata__")
    spans = {name: entry["data_offsets"] for name, entry in header.items()}
    end = start + max((last for _, last in spans.values()), default=0)
    sizes = {name: last - first for name, (first, last) in spans.items()}
    if file.stat().st_size != end or sizes != {name: tensor.nbytes for name, tensor in tensors.items()}:
        raise OSError(f"{file} is not whole after writing")
