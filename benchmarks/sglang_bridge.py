"""What the SGLang engine costs on top of its HTTP library: wall time of the same requests, and host memory.

    python benchmarks/sglang_bridge.py [--requests 2048] [--tokens 256] [--rounds 5]

Both ways keep 256 requests in flight at a small server in another process and decode every answer; the bare library
stops there, the engine also checks each token and makes samples. Rounds alternate in one process, so that a busy
machine slows both; CPU time is that of this process, without the server. Memory is the growth of the peak of a process
of its own, from the connected engine on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from checkout import ROOT
from faulty_answers import EXPERTS, LAYERS, TOP_K, VOCABULARY
from sglang_engines import MODEL, sglang_engine

from megatron_rc.engine import SamplingParams
from megatron_rc.rollout.sglang.engine import SGLangEngine
from megatron_rc.rollout.sglang.request import Request, RouteShape

STREAMS = 256


@contextmanager
def server(token_seconds: float) -> Iterator[str]:
    script = str(ROOT / "tests/support/faulty_sglang.py")
    command = [sys.executable, script, "--token-seconds", str(token_seconds), "--longest", "1000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def prompts_of(count: int) -> list[list[int]]:
    return [[i // 37 % 37, i % 37] * 64 for i in range(count)]


def bodies_of(prompts: list[list[int]], params: SamplingParams, routes: RouteShape | None) -> Iterator[Any]:
    """What the engine asks about ``prompts``, one request each."""
    for prompt in prompts:
        yield Request(uuid.uuid4().hex, prompt, (), params, VOCABULARY, None, routes, -1).body()


async def bare(url: str, bodies: Iterator[Any]) -> int:
    """The same requests without the engine; returns the number of tokens."""
    tokens = 0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def stream() -> None:
            nonlocal tokens
            for body in bodies:
                async with session.post(url + "/generate", json=body) as answer:
                    decoded = await answer.json()
                tokens += len(decoded["output_ids"])

        await asyncio.gather(*(stream() for _ in range(STREAMS)))
    return tokens


def bridged(engine: SGLangEngine, prompts: list[list[int]], params: SamplingParams) -> int:
    samples = engine.generate(prompts, params, n=1, seeds=range(len(prompts)))
    assert all(sample.discarded is None for sample in samples)
    return sum(len(sample.output_ids) for sample in samples)


def peak_growth_mb(work: Callable[[], object]) -> float:
    """How far the largest memory of this process rises above the present one during ``work``."""

    def peak_kb() -> int:
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = peak_kb()
    work()
    return (peak_kb() - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--token-seconds", type=float, default=0.0, help="how long the server takes for a token")
    parser.add_argument("--routes", action="store_true", help="also ask for routes")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    prompts, params = prompts_of(options.requests), SamplingParams(max_new_tokens=options.tokens)
    model = MODEL | {"max_position_embeddings": 1 << 20}
    routes = RouteShape(LAYERS, TOP_K, EXPERTS) if options.routes else None
    if options.memory:
        with sglang_engine(options.memory, model=model, concurrency=STREAMS, return_routes=options.routes) as engine:
            print(peak_growth_mb(lambda: bridged(engine, prompts, params)))
        return
    with server(options.token_seconds) as url:
        seconds: dict[str, list[float]] = {"bare": [], "bridge": []}
        cpu_seconds: dict[str, list[float]] = {"bare": [], "bridge": []}
        with sglang_engine(url, model=model, concurrency=STREAMS, return_routes=options.routes) as engine:
            for turn in range(2 * options.rounds):
                way = ("bare", "bridge", "bridge", "bare")[turn % 4]
                started, cpu_started = time.perf_counter(), time.process_time()
                if way == "bare":
                    tokens = asyncio.run(bare(url, bodies_of(prompts, params, routes)))
                else:
                    tokens = bridged(engine, prompts, params)
                seconds[way].append(time.perf_counter() - started)
                cpu_seconds[way].append(time.process_time() - cpu_started)
                assert tokens == options.requests * options.tokens
        memory = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--memory", url], check=True, capture_output=True, text=True
        )
    result = {
        "streams": STREAMS,
        "requests": options.requests,
        "tokens": options.tokens,
        "routes": options.routes,
        "bare_s": round(median(seconds["bare"]), 3),
        "bridge_s": round(median(seconds["bridge"]), 3),
        "ratio": round(median(seconds["bridge"]) / median(seconds["bare"]), 3),
        "bare_cpu_s": round(median(cpu_seconds["bare"]), 3),
        "bridge_cpu_s": round(median(cpu_seconds["bridge"]), 3),
        "memory_mb": round(float(memory.stdout), 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
