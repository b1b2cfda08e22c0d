"""A small HTTP server on loopback that speaks SGLang's protocol and misbehaves on demand."""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from faulty_answers import damaged, kept_ids, logprob_of, routes_of, tokens_after

from megatron_rc.versions import SGLANG

INFO: dict[str, Any] = {
    "version": SGLANG.newest,
    "enable_return_routed_experts": True,
    "enable_deterministic_inference": False,
    "sampling_mask_max_tokens": 4096,
    "max_req_input_len": 250,
    "preferred_sampling_params": None,
}
_HALF_WAY = ("drop", "truncated")


class _Drop(Exception):
    """Close the connection, after these bytes."""


class FaultySglang:
    """One server in a thread of its own; a block of ``with`` starts and stops it.

    ``fault`` is asked about every /generate, with the number of the request and its body, and names what goes wrong:
    reset, 500, 503, 400, slow (an abort ends it), stuck (nothing does), drop, truncated, html, or a damage of
    ``damaged``; None: nothing. ``broken`` does so for control paths: a status to answer, or "die".
    """

    def __init__(
        self,
        fault: Callable[[int, dict[str, Any]], str | None] = lambda number, body: None,
        *,
        info: dict[str, Any] | None = None,
        model_type: str = "qwen3_moe",
        token_seconds: float = 0.0,
        workers: Sequence[str] | None = None,
        port: int = 0,
    ) -> None:
        self.fault = fault
        self.info = INFO | (info or {})
        self.model_type = model_type
        self.token_seconds = token_seconds
        self.workers = workers
        self.port = port
        self.version = "default"
        self.weights = hashlib.sha256(b"default")
        self.probe_logprob = -1.0
        self.broken: dict[str, int | str] = {}
        self.asked: list[dict[str, Any]] = []
        """Bodies of all /generate."""
        self.calls: Counter[str] = Counter()
        self.aborted: list[str] = []
        self.most_running = 0
        self.running: dict[str, asyncio.Event] = {}
        self._continued = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faulty-sglang", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FaultySglang:
        self._thread.start()
        self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        self.die()
        self._call(self._cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def listen(self, version: str | None = None) -> None:
        """Start, or start again after ``die``; a new process serves the weights it was started with."""

        async def start() -> None:
            self._server = await asyncio.start_server(self._connection, "127.0.0.1", self.port, backlog=1024)
            self.port = self._server.sockets[0].getsockname()[1]
            self.version = version or self.version
            self._continued.set()

        self._call(start())

    def die(self) -> None:
        """Refuse connections from now on, and drop those there are."""
        self._call(self._die())

    def _call(self, coroutine: Awaitable[None]) -> None:
        async def run() -> None:
            await coroutine

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    async def _die(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()

    async def _cancel_all(self) -> None:
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *headers = head.decode().split("\r\n")
                sizes = [line.split(":")[1] for line in headers if line.lower().startswith("content-length")]
                data = await reader.readexactly(int(sizes[0])) if sizes else b""
                path = first.split()[1]
                self.calls[path] += 1
                status, answer, sent = await self._answer(path, json.loads(data) if data else {})
                content = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
                kind = "text/plain" if path == "/flush_cache" else "application/json"
                lines = f"HTTP/1.1 {status} X", f"content-type: {kind}", f"content-length: {len(content)}", "", ""
                writer.write(
                    "\r\n".join(lines).encode() + (content[: len(content) // 2] if sent == "drop" else content)
                )
                await writer.drain()
                if sent == "drop":
                    raise _Drop
        except (_Drop, asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.transport.abort()

    async def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any, str]:
        """(status, JSON, how it is sent)."""
        broken = self.broken.get(path)
        if broken == "die":
            await self._die()
            raise _Drop
        if isinstance(broken, int):
            return broken, {"success": False, "message": f"told to answer {broken}"}, ""
        if path == "/generate":
            return await self._generate(body)
        if path == "/workers" and self.workers is not None:
            listed = [{"url": url, "is_healthy": True, "worker_type": "regular"} for url in self.workers]
            return 200, {"workers": listed, "total": len(listed)}, ""
        handler = getattr(self, "_" + path.lstrip("/"), None)
        if handler is None:
            return 404, {"detail": "Not Found"}, ""
        status, answer = handler(body)
        return status, answer, ""

    async def _generate(self, body: dict[str, Any]) -> tuple[int, Any, str]:
        if "rid" not in body:  # the probe of a weight update
            return 200, self.answer_of(body | {"rid": ""}, 1, aborted=False), ""
        number = len(self.asked)
        self.asked.append(body)
        fault = self.fault(number, body)
        await self._continued.wait()
        if fault == "reset":
            raise _Drop
        if fault in ("500", "503", "400"):
            return int(fault), {"error": {"message": f"told to answer {fault}, input [[1, 2, 3]]"}}, ""
        rid, budget = body["rid"], body["sampling_params"]["max_new_tokens"]
        aborted = self.running[rid] = asyncio.Event()
        self.most_running = max(self.most_running, len(self.running))
        try:
            wait = 1e6 if fault in ("slow", "stuck") else self.token_seconds * budget
            start = self._loop.time()
            if fault == "stuck":
                await asyncio.Event().wait()
            if wait:
                try:
                    await asyncio.wait_for(aborted.wait(), wait)
                    fault = "slow" if fault == "slow" else "aborted"
                except TimeoutError:
                    pass
        finally:
            del self.running[rid]
        passed = self._loop.time() - start
        done = budget
        if fault == "aborted":
            done = min(budget, int(passed / self.token_seconds))
        elif fault in ("slow", "abort"):
            done = budget // 2
        answer = self.answer_of(body, done, aborted=fault in ("slow", "abort", "aborted"))
        if fault in _HALF_WAY:
            text = json.dumps(answer)
            return 200, text[: len(text) // 2] if fault == "truncated" else text, fault
        if fault == "html":
            return 200, "<html>busy</html>", ""
        if fault in (None, "slow", "abort", "aborted"):
            return 200, answer, ""
        return 200, damaged(answer, fault), ""

    def answer_of(self, body: dict[str, Any], count: int, *, aborted: bool) -> dict[str, Any]:
        ids, sampling = body["input_ids"], body["sampling_params"]
        output = tokens_after(ids, count)
        stops = [i for i, token in enumerate(output) if token in sampling.get("stop_token_ids", ())]
        output = output[: stops[0] + 1] if stops else output
        finish: dict[str, Any] = {"type": "length", "length": len(output)}
        if aborted:
            finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        elif stops:
            finish = {"type": "stop", "matched": output[-1]}
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(ids),
            "completion_tokens": len(output),
            "weight_version": self.version,
            "weight_versions": [{"version": self.version, "start": 0, "end": len(output)}],
            "num_retractions": 0,
            "output_token_logprobs": [[logprob_of(token), token, None] for token in output],
            "output_token_logprobs_length": len(output),
        }
        if body.get("logprob_start_len") == 0:
            meta["input_token_logprobs"] = [
                [self.probe_logprob if i else None, token, None] for i, token in enumerate(ids)
            ]
        if body.get("return_sampling_mask"):
            meta["output_token_sampling_mask"] = [kept_ids(token) for token in output]
            meta["output_token_sampling_logprobs"] = [logprob_of(token) / 2 for token in output]
            meta["output_token_sampling_mask_length"] = len(output)
        if body.get("return_routed_experts") and self.info["enable_return_routed_experts"]:
            rows = range(body.get("routed_experts_start_len", 0), len(ids) + len(output) - 1)
            meta["routed_experts"] = base64.b64encode(routes_of(rows).tobytes()).decode()
        return {"output_ids": output, "meta_info": meta}

    def _server_info(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, self.info | {"weight_version": self.version}

    def _model_info(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"weight_version": self.version, "model_path": "model", "model_type": self.model_type}

    def _abort_request(self, body: dict[str, Any]) -> tuple[int, Any]:
        for rid, event in self.running.items():
            if body.get("abort_all") or (body.get("rid") and rid.startswith(body["rid"])):
                self.aborted.append(rid)
                event.set()
        return 200, {}

    def _pause_generation(self, body: dict[str, Any]) -> tuple[int, Any]:
        self._continued.clear()
        if body.get("mode", "abort") == "abort":
            self._abort_request({"abort_all": True})
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    def _continue_generation(self, body: dict[str, Any]) -> tuple[int, Any]:
        self._continued.set()
        return 200, {"message": "Generation continued successfully.", "status": "ok"}

    def _flush_cache(self, body: dict[str, Any]) -> tuple[int, Any]:
        return (400, "Flush cache failed.\n") if self.running else (200, "Cache flushed.\n")

    def _begin_weight_update(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.weights = hashlib.sha256()
        return self._end_weight_update(body)

    def _end_weight_update(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"success": True, "message": "Success."}

    def _update_weights_from_tensor(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.weights.update(json.dumps(body["serialized_named_tensors"]).encode())
        self.version = body.get("weight_version") or self.version
        return 200, {"success": True, "message": "Success."}

    def _update_weights_from_disk(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.weights = hashlib.sha256(body["model_path"].encode())
        self.version = body.get("weight_version") or self.version
        return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def _update_weight_version(self, body: dict[str, Any]) -> tuple[int, Any]:
        if body.get("abort_all_requests", True):
            self._abort_request({"abort_all": True})
        self.version = body["new_version"]
        return 200, {"success": True, "message": "Weight version updated", "new_version": self.version}

    def _weights_checker(self, body: dict[str, Any]) -> tuple[int, Any]:
        digest = self.weights.hexdigest()
        ranks = [{"checksums": {"model.norm.weight": digest[:16]}, "per_gpu_checksum": digest}]
        return 200, {"success": True, "message": "Success.", "per_engine_checksum": digest, "ranks": ranks}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--token-seconds", type=float, default=0.0)
    parser.add_argument("--longest", type=int, default=254, help="tokens of prompt and response")
    options = parser.parse_args()
    with FaultySglang(token_seconds=options.token_seconds, info={"max_req_input_len": options.longest - 4}) as server:
        print(server.url, flush=True)
        threading.Event().wait()
