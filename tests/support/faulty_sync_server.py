"""A small server with SGLang's endpoints for weight updates, which loads for real and misbehaves on demand."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file

SHAPES = {
    "model.embed_tokens.weight": (37, 8),
    "model.layers.0.self_attn.q_proj.weight": (16, 8),
    "model.layers.0.self_attn.k_proj.weight": (8, 8),
    "model.layers.0.self_attn.v_proj.weight": (8, 8),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.norm.weight": (8,),
}
CONFIG = {"model_type": "qwen3", "vocab_size": 37, "max_position_embeddings": 64}


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def probe_logprobs(weights: dict[str, torch.Tensor], prompt: list[int]) -> list[float]:
    """What a server of these weights answers: some numbers that follow from the weights."""
    total = sum(float(tensor.double().abs().sum()) for tensor in weights.values())
    return [-(1 + (total * 0.1 + 0.37 * t) % 3) for t in range(1, len(prompt))]


class FaultySyncServer:
    """Serves in a thread of this process between ``start`` and ``die``; ``servers_in_processes`` has others.

    ``faults[path]`` = (calls that go well before, what then goes wrong): a status to answer; "die": the process or
    thread ends; "hang": no answer; "ignore": an answer and nothing done; "damage": done, and one weight changed.
    """

    def __init__(self, info: dict[str, Any] | None = None, *, process: bool = False) -> None:
        self.info = {"dtype": "float32", "device": "cpu", "tp_size": 1, **(info or {})}
        self.faults: dict[str, tuple[int, int | str]] = {}
        self.calls: Counter[str] = Counter()
        self.bodies: list[tuple[str, Any]] = []
        self.weights = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.version = "default"
        self.paused = self.session = False
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._process = process
        self._released = threading.Event()
        self._lock = threading.Lock()
        self._http: ThreadingHTTPServer | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> FaultySyncServer:
        faulty = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # headers and body leave together: apart, the second waits 40 ms for the first to be acknowledged
            wbufsize = -1

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answered = faulty._answer(self.path, json.loads(body or b"{}"))
                if answered is None:
                    self.close_connection = True
                    return
                status, answer = answered
                content = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/plain" if isinstance(answer, str) else "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._http.daemon_threads = True
        self._http.block_on_close = False
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def die(self) -> None:
        if self._process:
            os._exit(1)
        self._released.set()
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None

    def _answer(self, path: str, body: Any) -> tuple[int, Any] | None:
        if self._http is None:
            # a connection that was open when it died
            return None
        with self._lock:
            good, fault = self.faults.get(path, (10**9, ""))
            fault = fault if self.calls[path] >= good else ""
            self.calls[path] += 1
            self.bodies.append((path, body))
        if fault == "die":
            self.die()
            return None
        if fault == "hang":
            self._released.wait()
            return None
        if isinstance(fault, int):
            return fault, {"success": False, "message": f"told to answer {fault}"}
        if fault == "ignore":
            return 200, {"success": True, "message": "Success"}
        handler = getattr(self, "do" + path.replace("/", "_"), None)
        if handler is None:
            return 404, {"detail": "Not Found"}
        answer = handler(body)
        if fault == "damage":
            self.weights["model.norm.weight"][0] += 1
        return answer if isinstance(answer, tuple) else (200, answer)

    def do_fault(self, body: Any) -> Any:
        self.faults = {path: (self.calls[path] + good, what) for path, (good, what) in body.items()}
        return {}

    def do_state(self, body: Any) -> Any:
        sums = {name: float(tensor.double().sum()) for name, tensor in self.weights.items()}
        return {"sums": sums, "paused": self.paused, "calls": self.calls}

    def do_forget_groups(self, body: Any) -> Any:
        """As a process that was started anew at this url."""
        self._groups.clear()
        return {}

    def do_server_info(self, body: Any) -> Any:
        return self.info

    def do_model_info(self, body: Any) -> Any:
        return {"weight_version": self.version, "model_type": "qwen3"}

    def do_pause_generation(self, body: Any) -> Any:
        self.paused = True
        return {"status": "ok"}

    def do_continue_generation(self, body: Any) -> Any:
        self.paused = False
        return {"status": "ok"}

    def do_begin_weight_update(self, body: Any) -> Any:
        opened, self.session = self.session, True
        return (400, {"success": False, "message": "a session is already open"}) if opened else {"success": True}

    def do_end_weight_update(self, body: Any) -> Any:
        opened, self.session = self.session, False
        return {"success": True} if opened else (400, {"success": False, "message": "no session is open"})

    def do_flush_cache(self, body: Any) -> Any:
        return "Cache flushed.\n"

    def do_update_weight_version(self, body: Any) -> Any:
        self.version = body["new_version"]
        return {"success": True}

    def do_weights_checker(self, body: Any) -> Any:
        parts: dict[str, list[str]] = {}
        for name in SHAPES:
            fused = "model.layers.0.self_attn.qkv_proj.weight" if "self_attn" in name else name
            parts.setdefault(fused, []).append(name)
        sums = {
            fused: hashlib.sha256(b"".join(self.weights[name].numpy().tobytes() for name in names)).hexdigest()[:16]
            for fused, names in parts.items()
        }
        return {"success": True, "ranks": [{"checksums": sums}]}

    def do_generate(self, body: Any) -> Any:
        while self.paused:
            time.sleep(0.01)
        prompt = body["input_ids"]
        entries = zip([None, *probe_logprobs(self.weights, prompt)], prompt, [None] * len(prompt), strict=True)
        return {"output_ids": [0], "meta_info": {"input_token_logprobs": list(entries)}}

    def do_update_weights_from_disk(self, body: Any) -> Any:
        folder = Path(body["model_path"])
        if not folder.is_dir():
            return 400, {"success": False, "message": "Failed to get weights iterator"}
        for file in folder.glob("*.safetensors"):
            self._load(load_file(file))
        return {"success": True}

    def do_update_weights_from_tensor(self, body: Any) -> Any:
        if not self.session:
            return 400, {"success": False, "message": "must run between begin_weight_update() and end_weight_update()"}
        assert len(body["serialized_named_tensors"]) == self.info["tp_size"]
        # the last one, as its last rank would
        bucket = pickle.loads(base64.b64decode(body["serialized_named_tensors"][-1]))
        self._load(
            {
                meta.name: bucket["flattened_tensor"][meta.start_idx : meta.end_idx].view(meta.dtype).view(meta.shape)
                for meta in bucket["metadata"]
            }
        )
        return {"success": True}

    def do_init_weights_update_group(self, body: Any) -> Any:
        from torch.distributed import distributed_c10d

        address = f"tcp://{body['master_address']}:{body['master_port']}"
        timeout = timedelta(seconds=60)
        store, rank, size = next(dist.rendezvous(address, body["rank_offset"], body["world_size"], timeout=timeout))
        name = body["group_name"]
        group, _ = distributed_c10d._new_process_group_helper(
            size,
            rank,
            [],
            distributed_c10d.Backend(body["backend"]),
            dist.PrefixStore(name, store),
            group_name=name,
            timeout=timeout,
        )
        distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
        self._groups[name] = group
        return {"success": True}

    def do_destroy_weights_update_group(self, body: Any) -> Any:
        if body["group_name"] not in self._groups:
            return 400, {"success": False, "message": "The group to be destroyed does not exist."}
        dist.destroy_process_group(self._groups.pop(body["group_name"]))
        return {"success": True}

    def do_update_weights_from_distributed(self, body: Any) -> Any:
        if body["group_name"] not in self._groups:
            return 400, {"success": False, "message": "Group not in []"}
        sizes = [torch.Size(shape).numel() * 4 for shape in body["shapes"]]
        data = torch.empty(sum(sizes), dtype=torch.uint8)
        try:
            dist.broadcast(data, src=0, group=self._groups[body["group_name"]])
        except RuntimeError as error:
            return 400, {"success": False, "message": f"Failed to receive weights: {error}"}
        named = zip(body["names"], data.split(sizes), body["shapes"], strict=True)
        self._load({name: part.view(torch.float32).view(shape) for name, part, shape in named})
        return {"success": True}

    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            # as a real one does: an unknown name is no error
            if name in self.weights:
                self.weights[name].copy_(tensor)


def _serve(connection: Any) -> None:
    torch.set_num_threads(1)
    connection.send(FaultySyncServer(process=True).start().url)
    connection.recv()


@contextmanager
def servers_in_processes(count: int) -> Iterator[list[str]]:
    """Urls of servers in processes of their own: a torch.distributed group has one member a process."""
    # forked from one process that has imported torch, instead of importing it in each
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["safetensors.torch"])
    pipes = [context.Pipe() for _ in range(count)]
    processes = [context.Process(target=_serve, args=(theirs,), daemon=True) for _, theirs in pipes]
    for process in processes:
        process.start()
    try:
        yield [ours.recv() for ours, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
