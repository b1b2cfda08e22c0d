"""Safetensors of a Hugging Face checkpoint: read by slices, written file by file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_rc.models.names import HfTensor

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class HfCheckpoint:
    """The tensors of a directory, mapped into memory; only slices that are asked for are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stack = ExitStack()
        self._handles: dict[str, Any] = {}
        if (path / _INDEX).is_file():
            self.listing, self.files = path / _INDEX, _read_index(path / _INDEX)
        elif (path / _SINGLE).is_file():
            self.listing = path / _SINGLE
            self.files = dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)
        else:
            raise ValueError(f"model.hf_path={str(path)!r} has neither {_SINGLE} nor {_INDEX}")

    def __enter__(self) -> HfCheckpoint:
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
        """Compare names and shapes with ``expected``; reads headers only.

        Raises:
            ValueError: naming the file and the first tensor that is missing, unexpected or of another shape.
        """
        known = {tensor.name: tensor for tensor in expected}
        for tensor in known.values():
            if tensor.name not in self.files:
                raise ValueError(f"{self.listing} has no tensor {tensor.name!r}, which its config.json asks for")
            shape = tuple(self._slice(tensor.name).get_shape())
            if shape != tensor.shape:
                raise ValueError(
                    f"{self.path / self.files[tensor.name]} holds a checkpoint of another shape: {tensor.name} is "
                    f"{list(shape)}, config.json asks for {list(tensor.shape)}"
                )
        for name, file in self.files.items():
            if name not in known and not _derived(name, known):
                raise ValueError(f"{self.path / file} has an unexpected tensor {name!r}, unknown to config.json")

    def read(self, tensor: HfTensor, start: int, stop: int) -> Tensor:
        """Rows ``start:stop`` along the split dimension, or the whole tensor."""
        rows = self._slice(tensor.name)
        return rows[:, start:stop] if tensor.split == 1 else rows[start:stop]


def _derived(name: str, known: dict[str, HfTensor]) -> bool:
    """Tensors that some writers store although the configuration already says their values."""
    tied_head = name == "lm_head.weight" and "model.embed_tokens.weight" in known
    return tied_head or name.endswith("rotary_emb.inv_freq")


def _read_index(path: Path) -> dict[str, str]:
    try:
        files = json.loads(path.read_text())["weight_map"]
    except (json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(f"{path} is not a safetensors index: it needs a weight_map") from None
    return dict(files)


class HfWriter:
    """Collects tensors and writes a file whenever ``max_shard_bytes`` would be exceeded."""

    def __init__(self, path: Path, max_shard_bytes: int) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path, self.max_shard_bytes = path, max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = self._total_bytes = 0
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self.max_shard_bytes:
            self._flush()
        # a copy: the caller may hand out views of living parameters
        self._pending[name] = tensor.detach().clone()
        self._pending_bytes += size
        self._total_bytes += size

    def _flush(self) -> None:
        save_file(self._pending, self._temporary(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def _temporary(self, shard: int) -> Path:
        return self.path / f".{shard}.writing"

    def finish(self, hf_config: dict[str, Any], dtype: torch.dtype) -> None:
        """Write the last file, give all files their names, and write the index and config.json."""
        self._flush()
        count = len(self._shards)
        names = [_SINGLE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        for old in {*self.path.glob("model*.safetensors"), self.path / _INDEX} - {self.path / n for n in names}:
            old.unlink(missing_ok=True)
        for shard, name in enumerate(names):
            os.replace(self._temporary(shard), self.path / name)
        if count > 1:
            files = {tensor: file for file, held in zip(names, self._shards, strict=True) for tensor in held}
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(files.items()))}
            _write_json(self.path / _INDEX, index)
        architecture = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}[hf_config["model_type"]]
        _write_json(
            self.path / "config.json",
            {**hf_config, "architectures": [architecture], "dtype": str(dtype).removeprefix("torch.")},
        )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.writing")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(temporary, path)
