"""Traps in a real SGLang server on the CPU: one start, one dump after the other."""

import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

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
    with Session(lab).running() as session:
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


class Session:
    """One server and the checkpoints that it can be told to serve."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab

    @contextmanager
    def running(self) -> "Iterator[Session]":
        model, log = self._checkpoint(str(VERSIONS - 1)), self.lab.folder / "server.log"
        options = ["--background", "--log", str(log), "--stop-with", str(os.getpid()), *FLAGS]
        command = ["bash", str(SERVE), str(model), *options]
        said = subprocess.run(command, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=True)
        try:
            with closing(Background()) as background:
                self._server = Server(re.findall(r"serving at (\S+),", said.stdout)[-1], background)
                yield self
        finally:
            subprocess.run(["bash", str(SERVE), "stop", "--log", str(log)], check=True)

    def serve(self, name: str, *, flush: bool = True) -> None:
        """Serve other weights; without ``flush`` the prefix cache survives, which is the fault of its trap."""
        body = {"model_path": str(self._checkpoint(name)), "flush_cache": flush, "weight_version": name}
        self._server.post("/update_weights_from_disk", body, TIMEOUT)

    def sample(self, prompts: Sequence[Sequence[int]], *, n: int = 2, **sampling: Any) -> list[Sample]:
        """``n`` responses per prompt, with the log-probs that the server logs; None leaves a parameter to it."""
        return [_sample(*pair) for pair in self._answers(_repeated(prompts, n), **sampling)]

    def truncated(self, prompts: Sequence[Sequence[int]], top_p: float) -> tuple[list[Sample], list[Sample]]:
        """Responses under top-p with full log-probs, and the same with the renormalised ones."""
        pairs = self._answers(
            _repeated(prompts, 2),
            top_p=top_p,
            # kept ids come back only under a finite top-k: this one keeps all
            top_k=VOCABULARY,
            extra={"return_sampling_mask": True, "sampling_logprobs_mode": "selected"},
        )
        full = [_sample(*pair) for pair in pairs]
        renormalised = [
            Sample(s.prompt_ids, s.output_ids, answer["meta_info"]["output_token_sampling_logprobs"], s.finish_reason)
            for s, (_, answer) in zip(full, pairs, strict=True)
        ]
        return full, renormalised

    def retracted(self) -> Chunk:
        """Responses that the server put back into its queue and computed again."""
        stop = threading.Event()

        def retract() -> None:
            while not stop.wait(1.0):
                self._server.post("/pause_generation", {"mode": "retract"}, TIMEOUT)
                time.sleep(0.2)
                self._server.post("/continue_generation", {}, TIMEOUT)

        thread = threading.Thread(target=retract)
        thread.start()
        try:
            pairs = self._answers(_repeated(self.lab.prompts[:ASKED], 2))
        finally:
            stop.set()
            thread.join()
        counts = np.array([answer["meta_info"].get("num_retractions", 0) for _, answer in pairs])
        return with_columns(self.lab.dump([_sample(*pair) for pair in pairs]), retractions=counts)

    def stale_cache(self) -> Chunk:
        """Weights change while the prefix cache keeps the prompts of the first ones; half of the prompts are new."""
        prompts = self.lab.language.prompts(2_000_000 + self.lab.seed, 22 * (VERSIONS + 1), CACHED_PROMPT)
        kept, parts = prompts[:22], []
        self.serve("0")
        self.sample(kept, n=1)
        for version in range(VERSIONS):
            self.serve(str(version), flush=False)
            new = prompts[22 * (version + 1) :][:22]
            pairs = self._answers([*kept, *new])
            samples = [_sample(*pair) for pair in pairs]
            model = build(self.lab.dense.config, self.lab.dense.versions[version])
            cached = [answer["meta_info"]["cached_tokens"] for _, answer in pairs]
            dump = self.lab.dump(samples, model=model)
            parts.append(with_columns(dump, cached_tokens=cached, syncs=[version] * len(samples)))
        return join(parts)

    def _answers(
        self, prompts: Sequence[Sequence[int]], extra: dict[str, Any] | None = None, **sampling: Any
    ) -> list[tuple[list[int], dict[str, Any]]]:
        parameters = {"max_new_tokens": LENGTH, "temperature": 1.0, "stop_token_ids": [END], **sampling}
        parameters = {name: value for name, value in parameters.items() if value is not None}
        body = {"input_ids": list(prompts), "sampling_params": parameters, "return_logprob": True, **(extra or {})}
        answers = self._server.post("/generate", body, TIMEOUT)
        return [(list(prompt), answer) for prompt, answer in zip(prompts, answers, strict=True)]

    def _checkpoint(self, name: str) -> Path:
        """The folder of a version, or of the newest one wrongly converted."""
        path = self.lab.folder / "checkpoints" / name
        if not (path / "config.json").exists():
            versions: list[Weights] = self.lab.dense.versions
            weights = misconverted(versions[NEWEST]) if name == "wrong" else versions[int(name)]
            build(self.lab.dense.config, weights).save_pretrained(path)
        return path


def _repeated(prompts: Sequence[Sequence[int]], n: int) -> list[list[int]]:
    return [list(prompt) for prompt in prompts for _ in range(n)]


def _sample(prompt: list[int], answer: dict[str, Any]) -> Sample:
    meta = answer["meta_info"]
    logged = [entry[0] for entry in meta["output_token_logprobs"]]
    return Sample(prompt, answer["output_ids"], logged, meta["finish_reason"]["type"])
