"""Bytes per token and time of a real SGLang server with and without top log-probs, of one interleaved run.

python benchmarks/real/wire.py http://127.0.0.1:30000 runs/real/smollm2
"""

import json
import statistics
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from megatron_rc.jobs.describe import table
from megatron_rc.tasks.chat import Chat
from real.prompts import rows

TOKENS, PROMPTS, ROUNDS = 48, 16, 7


def asked(url: str, ids: list[int], k: int) -> int:
    """Bytes of the answer to one prompt."""
    sampling = {"max_new_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0}
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": k}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return len(answer.read())


def main(url: str, model: str) -> None:
    prompts = Chat(model).encode([row["prompt"] for row in rows()[:PROMPTS]])
    seconds: dict[int, list[float]] = {0: [], 32: [], 128: []}
    size = dict.fromkeys(seconds, 0)
    for number in range(ROUNDS + 1):
        for k, times in seconds.items():
            started = time.perf_counter()
            with ThreadPoolExecutor(PROMPTS) as pool:
                size[k] = sum(pool.map(lambda ids, k=k: asked(url, ids, k), prompts))
            if number:  # the first round warms up
                times.append(time.perf_counter() - started)
    plain = statistics.median(seconds[0])
    lines = []
    for k, times in seconds.items():
        ratio = statistics.median(times) / plain
        lines.append([str(k), f"{size[k] / (PROMPTS * TOKENS):,.0f}", f"{8 * k}", f"{ratio:.2f}"])
    print(table(["k", "bytes per token on the wire", "bytes per token in a dump, at most", "time"], lines))


if __name__ == "__main__":
    main(*sys.argv[1:3])
