"""The weights that the faulty server holds, and the endpoints that update them as a real server's do."""

import base64
import hashlib
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d

SHAPES = {
    "model.embed_tokens.weight": (37, 8), "model.layers.0.self_attn.q_proj.weight": (16, 8),
    "model.layers.0.self_attn.k_proj.weight": (8, 8), "model.layers.0.self_attn.v_proj.weight": (8, 8),
    "model.layers.0.input_layernorm.weight": (8,), "model.norm.weight": (8,),
}  # fmt: skip
BLOCKING = ("/init_weights_update_group", "/update_weights_from_distributed", "/destroy_weights_update_group")
"""Endpoints that wait for other processes."""


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def probe_logprobs(weights: dict[str, torch.Tensor], prompt: list[int]) -> list[float]:
    """What a server with these weights answers: some numbers that follow from the weights."""
    total = sum(float(tensor.double().abs().sum()) for tensor in weights.values())
    return [-(1 + (total * 0.1 + 0.37 * t) % 3) for t in range(1, len(prompt))]


class WeightEndpoints:
    """Handlers by path; an answer is JSON, or a status with JSON."""

    info: dict[str, Any]

    def __init__(self) -> None:
        self.weights = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.session = False
        self._groups: dict[str, dist.ProcessGroup] = {}

    def do_begin_weight_update(self, body: Any) -> Any:
        opened, self.session = self.session, True
        return (400, {"message": "a session is already open"}) if opened else {"success": True}

    def do_end_weight_update(self, body: Any) -> Any:
        opened, self.session = self.session, False
        return {"success": True} if opened else (400, {"message": "no session is open"})

    def do_weights_checker(self, body: Any) -> Any:
        parts: dict[str, list[str]] = {}
        for name in SHAPES:
            fused = "model.layers.0.self_attn.qkv_proj.weight" if "self_attn" in name else name
            parts.setdefault(fused, []).append(name)
        held = {fused: b"".join(self.weights[n].numpy().tobytes() for n in names) for fused, names in parts.items()}
        return {"ranks": [{"checksums": {name: hashlib.sha256(data).hexdigest()[:16] for name, data in held.items()}}]}

    def do_update_weights_from_disk(self, body: Any) -> Any:
        folder = Path(body["model_path"])
        if not folder.is_dir():
            return 400, {"message": "Failed to get weights iterator"}
        for file in folder.glob("*.safetensors"):
            self._load(load_file(file))
        return {"success": True}

    def do_update_weights_from_tensor(self, body: Any) -> Any:
        if not self.session:
            return 400, {"message": "must run between begin_weight_update() and end_weight_update()"}
        assert len(body["serialized_named_tensors"]) == self.info["tp_size"]
        # the last one, as its last rank would
        bucket = pickle.loads(base64.b64decode(body["serialized_named_tensors"][-1]))
        data = bucket["flattened_tensor"]
        self._load({m.name: data[m.start_idx : m.end_idx].view(m.dtype).view(m.shape) for m in bucket["metadata"]})
        return {"success": True}

    def do_init_weights_update_group(self, body: Any) -> Any:
        name, timeout = body["group_name"], timedelta(seconds=60)
        address = f"tcp://{body['master_address']}:{body['master_port']}"
        store, rank, size = next(dist.rendezvous(address, body["rank_offset"], body["world_size"], timeout=timeout))
        backend, prefixed = distributed_c10d.Backend(body["backend"]), dist.PrefixStore(name, store)
        group, _ = distributed_c10d._new_process_group_helper(
            size, rank, [], backend, prefixed, group_name=name, timeout=timeout
        )
        distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
        self._groups[name] = group
        return {"success": True}

    def do_destroy_weights_update_group(self, body: Any) -> Any:
        if body["group_name"] not in self._groups:
            return 400, {"message": "The group to be destroyed does not exist."}
        dist.destroy_process_group(self._groups.pop(body["group_name"]))
        return {"success": True}

    def do_update_weights_from_distributed(self, body: Any) -> Any:
        if body["group_name"] not in self._groups:
            return 400, {"message": "Group not in []"}
        sizes = [torch.Size(shape).numel() * 4 for shape in body["shapes"]]
        data = torch.empty(sum(sizes), dtype=torch.uint8)
        try:
            dist.broadcast(data, src=0, group=self._groups[body["group_name"]])
        except RuntimeError as error:
            return 400, {"message": f"Failed to receive weights: {error}"}
        named = zip(body["names"], data.split(sizes), body["shapes"], strict=True)
        self._load({name: part.view(torch.float32).view(shape) for name, part, shape in named})
        return {"success": True}

    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            # as a real one does: an unknown name is no error
            if name in self.weights:
                self.weights[name].copy_(tensor)

    def do_forget_groups(self, body: Any) -> Any:
        """Become like a process that was started anew at this url."""
        self._groups.clear()
        return {}
