"""HTTP libraries by what it costs to ask an SGLang server: those that are installed, on the same requests.

    python benchmarks/sglang_http.py [--requests 2048] [--tokens 256] [--rounds 5]

Each keeps 256 requests in flight at a small server in another process, and decodes every answer. Rounds go through the
libraries in turn, so that a busy machine slows all; CPU time is that of this process, without the server. Memory is
the growth of the peak of a process of its own. The bridge uses the fastest one that an event loop can wait for.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from sglang_bridge import STREAMS, bare, bodies_of, peak_growth_mb, prompts_of, server

from megatron_rc.engine import SamplingParams


def with_aiohttp(url: str, bodies: Iterator[Any]) -> int:
    return asyncio.run(bare(url, bodies))


def with_httpx(url: str, bodies: Iterator[Any], library: str = "httpx") -> int:
    httpx = __import__(library)

    async def ask_all() -> int:
        tokens = 0
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as client:

            async def stream() -> None:
                nonlocal tokens
                for body in bodies:
                    answer = await client.post(url + "/generate", json=body)
                    tokens += len(answer.json()["output_ids"])

            await asyncio.gather(*(stream() for _ in range(STREAMS)))
        return tokens

    return asyncio.run(ask_all())


def with_httpx2(url: str, bodies: Iterator[Any]) -> int:
    return with_httpx(url, bodies, "httpx2")


def with_threads(url: str, bodies: Iterator[Any]) -> int:
    """http.client of the standard library, a thread a stream."""
    counts, lock = list[int](), threading.Lock()

    def stream() -> None:
        connection, tokens = http.client.HTTPConnection(urlsplit(url).netloc), 0
        while True:
            with lock:
                body = next(bodies, None)
            if body is None:
                break
            connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
            tokens += len(json.loads(connection.getresponse().read())["output_ids"])
        connection.close()
        counts.append(tokens)

    threads = [threading.Thread(target=stream) for _ in range(STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts)


WAYS: dict[str, Callable[[str, Iterator[Any]], int]] = {
    "aiohttp": with_aiohttp,
    "httpx": with_httpx,
    "httpx2": with_httpx2,
    "threads": with_threads,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", nargs=2, metavar=("WAY", "URL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    prompts, params = prompts_of(options.requests), SamplingParams(max_new_tokens=options.tokens)

    def ask(way: str, url: str) -> None:
        assert WAYS[way](url, bodies_of(prompts, params, None)) == options.requests * options.tokens

    if options.memory:
        print(peak_growth_mb(lambda: ask(*options.memory)))
        return
    found = [way for way in WAYS if way == "threads" or find_spec(way)]
    seconds: dict[str, list[float]] = {way: [] for way in found}
    cpu_seconds: dict[str, list[float]] = {way: [] for way in found}
    with server(0.0) as url:
        for turn in range(options.rounds):
            for way in found[:: -1 if turn % 2 else 1]:
                started, cpu_started = time.perf_counter(), time.process_time()
                ask(way, url)
                seconds[way].append(time.perf_counter() - started)
                cpu_seconds[way].append(time.process_time() - cpu_started)
        for way in found:
            command = [sys.executable, __file__, *sys.argv[1:], "--memory", way, url]
            memory = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            result = {
                "library": way if way == "threads" else f"{way} {version(way)}",
                "requests_per_s": round(options.requests / median(seconds[way])),
                "cpu_ms_per_request": round(median(cpu_seconds[way]) / options.requests * 1000, 3),
                "memory_mb": round(float(memory), 1),
            }
            print(json.dumps(result))


if __name__ == "__main__":
    main()
