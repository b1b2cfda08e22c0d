"""Traps in a real SGLang server on the CPU: one start, one dump after the other."""

import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from diagnosis.traps.dumps import with_columns
from diagnosis.traps.faults import misconverted
from diagnosis.traps.lab import LENGTH, NEWEST, SERVERS, Lab
from diagnosis.traps.language import END, VOCABULARY
from diagnosis.traps.models import VERSIONS, Weights, build
from diagnosis.traps.planted import Trap
from megatron_rc.analyze.chunk import Chunk, join
from megatron_rc.engine import Sample
from megatron_rc.rollout.sglang.http import Background, Server

ASKED = 64
"""Prompts per dump, which gives about 19,000 tokens."""
TIMEOUT = 600.0
"""Seconds for one answer."""
CACHED_PROMPT = 128
"""Tokens of the prompts whose keys and values outlive a weight update."""
FLAGS = (
    *("--dtype", "bfloat16", "--timeout", "900", "--port", "0"),
    *("--preferred-sampling-params", '{"temperature": 0.9}'),
)
"""A temperature of the server's own counts for requests that name none, as in the trap of a hidden temperature."""
SERVE = Path(__file__).parents[3] / "launch/sglang_cpu/serve.sh"
ENVIRONMENT = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}
"""The server logs before the temperature: the same where a request asks for 1, and what hides a temperature else."""
TRAPS = {
    "server: healthy": Trap("real server", "RC501", "numerics"),
    "server: hidden temperature 0.9": Trap("real server", "RC103", "BUG"),
    "server: top-p 0.95, full logs": Trap("real server", "RC103", "BUG"),
    "server: top-p 0.95, renormalised logs": Trap("real server", "RC102", "BUG"),
    "server: stale server": Trap("real server", "RC303", "BUG"),
    "server: stale prefix cache": Trap("real server", "RC301", "BUG"),
    "server: retracted requests": Trap("real server", "RC501", "numerics"),
    "server: wrong conversion": Trap("real server", "RC501", "numerics"),
}
"""Those of ``dumps``, which makes them all together."""


def dumps(lab: Lab) -> Iterator[tuple[str, Chunk]]:
    """Start a server, and yield the name and dump of each trap."""
    prompts = lab.prompts[:ASKED]
    with serving(lab) as session:
        healthy = session.sample(prompts)
        yield "server: healthy", lab.dump(healthy)
        # these requests name no temperature, so the server's own one counts
        yield "server: hidden temperature 0.9", lab.dump(session.sample(prompts, temperature=None))
        full, renormalised = session.truncated(prompts, 0.95)
        yield "server: top-p 0.95, full logs", lab.dump(full)
        yield "server: top-p 0.95, renormalised logs", lab.dump(renormalised)
        yield "server: retracted requests", session.retracted()
        session.serve("wrong")
        yield "server: wrong conversion", lab.dump(session.sample(prompts))
        session.serve("0")
        old = session.sample(prompts)
        mixed = [o if i % SERVERS.size == 2 else h for i, (h, o) in enumerate(zip(healthy, old, strict=True))]
        yield "server: stale server", lab.dump(mixed)
        yield "server: stale prefix cache", session.stale_cache()


@contextmanager
def serving(lab: Lab) -> "Iterator[Session]":
    model, log = checkpoint(lab, str(VERSIONS - 1)), lab.folder / "server.log"
    options = ["--background", "--log", str(log), "--stop-with", str(os.getpid()), *FLAGS]
    command = ["bash", str(SERVE), str(model), *options]
    said = subprocess.run(command, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=True)
    try:
        with closing(Background()) as background:
            yield Session(lab, Server(re.findall(r"serving at (\S+),", said.stdout)[-1], background))
    finally:
        subprocess.run(["bash", str(SERVE), "stop", "--log", str(log)], check=True)


def checkpoint(lab: Lab, name: str) -> Path:
    """The folder of a version, or of the newest one wrongly converted."""
    path = lab.folder / "checkpoints" / name
    if not (path / "config.json").exists():
        versions: list[Weights] = lab.dense.versions
        weights = misconverted(versions[NEWEST]) if name == "wrong" else versions[int(name)]
        build(lab.dense.config, weights).save_pretrained(path)
    return path


class Session(NamedTuple):
    """One server, and the lab whose checkpoints it can load."""

    lab: Lab
    server: Server

    def serve(self, name: str, *, flush: bool = True) -> None:
        """Serve other weights; without ``flush`` the prefix cache survives, which is the fault of its trap."""
        body = {"model_path": str(checkpoint(self.lab, name)), "flush_cache": flush, "weight_version": name}
        self.server.post("/update_weights_from_disk", body, TIMEOUT)

    def sample(self, prompts: Sequence[Sequence[int]], *, n: int = 2, **sampling: Any) -> list[Sample]:
        """``n`` responses per prompt, with the log-probs that the server logs; None leaves a parameter to it."""
        return [sample for sample, _ in self._answers(prompts, n, **sampling)]

    def truncated(self, prompts: Sequence[Sequence[int]], top_p: float) -> tuple[list[Sample], list[Sample]]:
        """Responses under top-p with full log-probs, and the same with the renormalised ones."""
        extra = {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
        # kept ids come back only under a finite top-k: this one keeps all
        answers = self._answers(prompts, 2, extra, top_p=top_p, top_k=VOCABULARY)
        renormalised = [replace(s, logprobs=meta["output_token_sampling_logprobs"]) for s, meta in answers]
        return [sample for sample, _ in answers], renormalised

    def retracted(self) -> Chunk:
        """Responses that the server put back into its queue and computed again."""
        stop = threading.Event()

        def retract() -> None:
            while not stop.wait(1.0):
                self.server.post("/pause_generation", {"mode": "retract"}, TIMEOUT)
                time.sleep(0.2)
                self.server.post("/continue_generation", {}, TIMEOUT)

        thread = threading.Thread(target=retract)
        thread.start()
        try:
            answers = self._answers(self.lab.prompts[:ASKED], 2)
        finally:
            stop.set()
            thread.join()
        counts = [meta.get("num_retractions", 0) for _, meta in answers]
        return with_columns(self.lab.dump([sample for sample, _ in answers]), retractions=counts)

    def stale_cache(self) -> Chunk:
        """Weights change while the prefix cache keeps the prompts of the first ones; half of the prompts are new."""
        prompts = self.lab.language.prompts(2_000_000 + self.lab.seed, 22 * (VERSIONS + 1), CACHED_PROMPT)
        kept, parts = prompts[:22], []
        self.serve("0")
        self.sample(kept, n=1)
        for version in range(VERSIONS):
            self.serve(str(version), flush=False)
            new = prompts[22 * (version + 1) :][:22]
            answers = self._answers([*kept, *new], 1)
            model = build(self.lab.dense.config, self.lab.dense.versions[version])
            dump = self.lab.dump([sample for sample, _ in answers], model=model)
            cached = [meta["cached_tokens"] for _, meta in answers]
            parts.append(with_columns(dump, cached_tokens=cached, syncs=[version] * len(answers)))
        return join(parts)

    def _answers(
        self, prompts: Sequence[Sequence[int]], n: int, extra: dict[str, Any] | None = None, **sampling: Any
    ) -> list[tuple[Sample, dict[str, Any]]]:
        """``n`` responses per prompt, each with what the server says of it."""
        parameters = {"max_new_tokens": LENGTH, "temperature": 1.0, "stop_token_ids": [END], **sampling}
        parameters = {name: value for name, value in parameters.items() if value is not None}
        ids = [list(prompt) for prompt in prompts for _ in range(n)]
        body = {"input_ids": ids, "sampling_params": parameters, "return_logprob": True, **(extra or {})}
        found = []
        for prompt, answer in zip(ids, self.server.post("/generate", body, TIMEOUT), strict=True):
            meta = answer["meta_info"]
            logged = [entry[0] for entry in meta["output_token_logprobs"]]
            found.append((Sample(prompt, answer["output_ids"], logged, meta["finish_reason"]["type"]), meta))
        return found
