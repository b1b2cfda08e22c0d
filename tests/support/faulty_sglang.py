"""A small HTTP server on loopback that speaks SGLang's protocol, loads weights for real, and fails on demand."""

import argparse
import asyncio
import json
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp
from faulty_answers import answer_to, damaged
from faulty_weights import BLOCKING, WeightEndpoints, probe_logprobs

INFO: dict[str, Any] = {
    "version": "0.5.23", "dtype": "float32", "device": "cpu", "tp_size": 1, "enable_return_routed_experts": True,
    "enable_deterministic_inference": False, "sampling_mask_max_tokens": 4096, "max_req_input_len": 250,
    "preferred_sampling_params": None,
}  # fmt: skip
PROBE = "the probe of a weight update"
"""Stands for the path of /generate requests that are not those of a job."""


class Fault(NamedTuple):
    path: str
    what: int | str | Callable[[int, dict[str, Any]], int | str | None]
    """A status to answer; or "die", the server ends; "reset", the connection does; "hang", no answer comes; "ignore",
    success is answered and nothing done; "damage", it is done and one weight changed. For /generate also "slow", an
    abort ends it; "abort", it is aborted half-way; "drop", "truncated", "html", how the answer is sent; or a damage
    of ``damaged``. A function decides for each call by its number and its body; None: nothing."""
    after: int = 0
    """Calls of this path that go well first."""


class _Drop(Exception):
    """Close the connection."""


class FaultySglang(WeightEndpoints):
    """One server in a thread of its own; a block of ``with`` starts and stops it."""

    def __init__(
        self, *faults: Fault, info: dict[str, Any] | None = None, token_seconds: float = 0.0,
        workers: Sequence[str] | None = None, port: int = 0, process: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.faults = list(faults)
        self.info = INFO | (info or {})
        self.token_seconds, self.workers, self.port = token_seconds, workers, port
        self.version = "default"
        self.bodies: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        """Bodies of all requests, by path."""
        self.prompt_logprobs = lambda ids: probe_logprobs(self.weights, ids)
        """Log-probs of all ids of a prompt but the first."""
        self.aborted: list[str] = []
        self.running: dict[str, asyncio.Event] = {}
        self.most_running = 0
        self._process = process
        self._continued = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faulty-sglang", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def asked(self) -> list[dict[str, Any]]:
        """Bodies of a job's /generate requests."""
        return self.bodies["/generate"]

    @property
    def calls(self) -> Counter[str]:
        return Counter({path: len(bodies) for path, bodies in self.bodies.items()})

    @property
    def paused(self) -> bool:
        return not self._continued.is_set()

    def fail(self, path: str, what: Any, after: int = 0) -> None:
        """Add a Fault that counts its calls from now on."""
        self.faults.append(Fault(path, what, self.calls[path] + after))

    def __enter__(self) -> "FaultySglang":
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

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _die(self) -> None:
        if self._process:
            os._exit(1)
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
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *headers = head.decode().split("\r\n")
                sizes = [line.split(":")[1] for line in headers if line.lower().startswith("content-length")]
                data = await reader.readexactly(int(sizes[0])) if sizes else b""
                path = first.split()[1]
                status, answer, sent = await self._answer(path, json.loads(data) if data else {})
                content = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
                kind = "text/plain" if path == "/flush_cache" else "application/json"
                lines = f"HTTP/1.1 {status} X", f"content-type: {kind}", f"content-length: {len(content)}", "", ""
                writer.write("\r\n".join(lines).encode() + content[: sent * len(content) // 2])
                await writer.drain()
                if sent < 2:
                    raise _Drop
        except (_Drop, asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.transport.abort()

    def _fault(self, path: str, number: int, body: dict[str, Any]) -> int | str | None:
        for fault in self.faults:
            if fault.path == path and number >= fault.after:
                what = fault.what(number, body) if callable(fault.what) else fault.what
                if what is not None:
                    return what
        return None

    async def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any, int]:
        """Status, JSON, and how many halves of it are sent."""
        key = PROBE if path == "/generate" and "rid" not in body else path
        self.bodies[key].append(body)
        what = self._fault(key, len(self.bodies[key]) - 1, body)
        if what == "die":
            await self._die()
        if what in ("die", "reset"):
            raise _Drop
        if what == "hang":
            await asyncio.Event().wait()
        if isinstance(what, int):
            return what, {"error": {"message": f"told to answer {what}, input [[1, 2, 3]]"}}, 2
        if what == "ignore":
            return 200, {"success": True}, 2
        if path == "/generate":
            if not isinstance(body["input_ids"][0], list):
                return await self._generate(body, what)
            answers = [await self._generate(body | {"input_ids": ids}, what) for ids in body["input_ids"]]
            return max(status for status, _, _ in answers), [answer for _, answer, _ in answers], 2
        handler = getattr(self, "do" + path.replace("/", "_"), None)
        if handler is None:
            return 404, {"detail": "Not Found"}, 2
        answer = await asyncio.to_thread(handler, body) if path in BLOCKING else handler(body)
        if what == "damage":
            self.weights["model.norm.weight"][0] += 1
        return (*answer, 2) if isinstance(answer, tuple) else (200, answer, 2)

    async def _generate(self, body: dict[str, Any], what: str | None) -> tuple[int, Any, int]:
        await self._continued.wait()
        rid, budget = body.get("rid", ""), body["sampling_params"]["max_new_tokens"]
        aborted = self.running[rid] = asyncio.Event()
        self.most_running = max(self.most_running, len(self.running))
        done, start = budget, self._loop.time()
        try:
            if wait := 1e6 if what == "slow" else self.token_seconds * budget:
                await asyncio.wait_for(aborted.wait(), wait)
                done = budget // 2 if what == "slow" else int((self._loop.time() - start) / self.token_seconds)
        except TimeoutError:
            pass
        finally:
            del self.running[rid]
        if what == "abort":
            done = budget // 2
        answer = answer_to(body, min(done, budget), self.version, aborted=what in ("abort", "slow") or aborted.is_set())
        if rid == "":
            values = [None, *self.prompt_logprobs(body["input_ids"])]
            entries = zip(values, body["input_ids"], strict=True)
            answer["meta_info"]["input_token_logprobs"] = [[value, token, None] for value, token in entries]
        if not self.info["enable_return_routed_experts"]:
            answer["meta_info"].pop("routed_experts", None)
        if what in ("drop", "truncated"):
            text = json.dumps(answer)
            return (200, text, 1) if what == "drop" else (200, text[: len(text) // 2], 2)
        if what == "html":
            return 200, "<html>busy</html>", 2
        return 200, answer if what in (None, "slow", "abort") else damaged(answer, what), 2

    def do_state(self, body: Any) -> Any:
        sums = {name: float(tensor.double().sum()) for name, tensor in self.weights.items()}
        return {"sums": sums, "paused": self.paused, "calls": self.calls}

    def do_fault(self, body: Any) -> Any:
        """Replace the faults, for servers in processes of their own."""
        self.faults.clear()
        for fault in body.get("faults", ()):
            self.fail(*fault)
        return {}

    def do_workers(self, body: Any) -> Any:
        if self.workers is None:
            return 404, {"detail": "Not Found"}
        return {"workers": [{"url": url, "is_healthy": True, "worker_type": "regular"} for url in self.workers]}

    def do_server_info(self, body: Any) -> Any:
        return self.info

    def do_model_info(self, body: Any) -> Any:
        return {"weight_version": self.version, "model_path": "model", "model_type": "qwen3_moe"}

    def do_abort_request(self, body: Any) -> Any:
        for rid, event in self.running.items():
            if body.get("abort_all") or (body.get("rid") and rid.startswith(body["rid"])):
                self.aborted.append(rid)
                event.set()
        return {}

    def do_pause_generation(self, body: Any) -> Any:
        self._continued.clear()
        return self.do_abort_request({"abort_all": body["mode"] == "abort"})

    def do_continue_generation(self, body: Any) -> Any:
        self._continued.set()
        return {"status": "ok"}

    def do_flush_cache(self, body: Any) -> Any:
        return (400, "Flush cache failed.\n") if self.running else "Cache flushed.\n"

    def do_update_weight_version(self, body: Any) -> Any:
        self.do_abort_request({"abort_all": body.get("abort_all_requests", True)})
        self.version = body["new_version"]
        return {"success": True}


def _serve(connection: Any) -> None:
    torch.set_num_threads(1)
    with FaultySglang(process=True) as server:
        connection.send(server.url)
        connection.recv()


@contextmanager
def servers_in_processes(count: int) -> Iterator[list[str]]:
    """Urls of servers in processes of their own: a torch.distributed group has one member per process."""
    # forked from one process that has imported torch, instead of importing it in each
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["faulty_sglang"])
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--token-seconds", type=float, default=0.0)
    parser.add_argument("--longest", type=int, default=254, help="tokens of prompt and response")
    options = parser.parse_args()
    with FaultySglang(token_seconds=options.token_seconds, info={"max_req_input_len": options.longest - 4}) as server:
        print(server.url, flush=True)
        threading.Event().wait()
