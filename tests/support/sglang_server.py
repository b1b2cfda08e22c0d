"""Real SGLang servers, a test's own or shared by all tests and xdist workers of a session, and what they must say."""

import fcntl
import io
import json
import os
import re
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from process_groups import members, nothing_is_left

from megatron_rc.engine import Sample
from megatron_rc.launch.server import stop

ROOT = Path(__file__).parents[2]
SERVE = ROOT / "launch/sglang_cpu/serve.sh"

MODELS: dict[str, dict[str, Any]] = {
    kind: tiny_models.KINDS[kind] | {"max_position_embeddings": 256, "eos_token_id": 1, "pad_token_id": 0}
    for kind in ("dense", "moe")
}
CLOSE = 2e-5


@dataclass(frozen=True)
class SglangServer:
    url: str
    process: int
    """Leads a process group of its own: the server and all it started."""
    log: str
    model: str

    def call(self, path: str, body: Any = None, timeout: float = 60) -> tuple[int, Any]:
        """(HTTP status, decoded answer) of a POST of ``body``, or of a GET without one."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, _decoded(answer.read().decode())
        except urllib.error.HTTPError as refused:
            return refused.code, _decoded(refused.read().decode())

    def generate(self, input_ids: list[int], sampling: Mapping[str, Any], **fields: Any) -> Any:
        """The answer to one prompt, which the server must accept."""
        body = {"input_ids": input_ids, "sampling_params": dict(sampling), "return_logprob": True, **fields}
        status, answer = self.call("/generate", body)
        assert status == 200, answer
        return answer


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def save_checkpoint(path: Path, kind: str, seed: int = 0) -> Path:
    """A random Qwen3 of ``MODELS[kind]`` in fp32, as transformers writes it; the seed makes the weights."""
    tiny_models.transformers_model(MODELS[kind], seed).float().save_pretrained(path)
    return path


def checkpoint_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights of a transformers model, which fuses the experts that checkpoints and servers name one by one."""
    for name, tensor in model.state_dict().items():
        if name.endswith(".experts.gate_up_proj"):
            for expert, fused in enumerate(tensor):
                for part, half in zip(("gate", "up"), fused.chunk(2), strict=True):
                    yield name.replace("gate_up_proj", f"{expert}.{part}_proj.weight"), half
        elif name.endswith(".experts.down_proj"):
            for expert, down in enumerate(tensor):
                yield name.replace("down_proj", f"{expert}.down_proj.weight"), down
        else:
            yield name, tensor


@contextmanager
def sglang_server(
    model: str | Path, *flags: str, env: Mapping[str, str] | None = None, owner: int | None = None
) -> Iterator[SglangServer]:
    """A CPU server of ``model`` on a free loopback port; it ends with the block, or with process ``owner``."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        server = _start(model, log, flags, env, owner or os.getpid())
        try:
            yield server
        finally:
            _stop(log)


@contextmanager
def shared_server(kind: str, factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    """The session's server of ``save_checkpoint(kind)``, as it started, for one test at a time.

    Whoever comes first, on whichever xdist worker, starts it. It ends with the pytest process, however that ends, and
    `end_shared_servers` looks how. A test may pause it, change its weights or kill it: the next one gets it back as
    new.
    """
    worker = "PYTEST_XDIST_WORKER" in os.environ
    folder = factory.getbasetemp().parent if worker else factory.getbasetemp()
    state = folder / f"sglang-{kind}.json"
    with open(folder / f"sglang-{kind}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = json.loads(state.read_text()) if state.exists() else {}
        if known is None:
            pytest.fail(f"the shared {kind} server did not start for an earlier test")
        server = SglangServer(**known) if known else None
        if server is None or not _restored(server):
            if server is not None:
                _stop(Path(server.log))
            model, log = folder / f"sglang-{kind}-model", folder / f"sglang-{kind}.log"
            save_checkpoint(model, kind)
            # what is left when it does not start: the next test need not wait for that again
            state.write_text("null")
            server = _start(model, log, (), None, os.getppid() if worker else os.getpid())
            state.write_text(json.dumps(asdict(server)))
        yield server


@pytest.fixture
def moe_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    with shared_server("moe", tmp_path_factory) as server:
        yield server


def end_shared_servers(folder: Path) -> list[str]:
    """End the session's servers, whose files lie in ``folder``; what is wrong with how they end."""
    wrong = []
    for state in sorted(folder.glob("sglang-*.json")):
        known = json.loads(state.read_text())
        if known is None:
            continue
        server = SglangServer(**known)
        with redirect_stdout(io.StringIO()):
            stop(Path(server.log))
        if not nothing_is_left(server.process):
            wrong.append(f"processes {members(server.process)} of {state.stem} outlive it")
    return wrong


def _restored(server: SglangServer) -> bool:
    try:
        for path, body in [
            ("/continue_generation", {}),
            ("/abort_request", {"abort_all": True}),
            # refused unless a test left an update open
            ("/end_weight_update", {}),
            ("/update_weights_from_disk", {"model_path": server.model, "weight_version": "default"}),
        ]:
            status, _ = server.call(path, body, timeout=30)
        return status == 200
    except OSError:
        return False


def _start(
    model: str | Path, log: Path, flags: tuple[str, ...], env: Mapping[str, str] | None, owner: int
) -> SglangServer:
    assert (ROOT / ".venv-sglang/installed").exists(), "run `bash launch/sglang_cpu/install.sh` before these tests"
    command = ["bash", str(SERVE), str(model), "--background", "--port", "0", "--log", str(log), "--timeout", "600"]
    command += ["--stop-with", str(owner), *flags]
    done = subprocess.run(command, env={**os.environ, **(env or {})}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"serving at (\S+), process (\d+),", done.stdout)
    assert found, done.stdout
    return SglangServer(found[1], int(found[2]), str(log), str(model))


def _stop(log: Path) -> None:
    done = subprocess.run(["bash", str(SERVE), "stop", "--log", str(log)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


class Truth:
    """The served model in fp32, by transformers."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        self.model = tiny_models.transformers_model(MODELS[kind], seed).float().eval()

    def logits(self, sample: Sample) -> torch.Tensor:
        """[outputs, V] fp64, of the rows that drew the output."""
        ids = sample.prompt_ids + sample.output_ids
        with torch.no_grad():
            return self.model(torch.tensor([ids])).logits[0, len(sample.prompt_ids) - 1 : -1].double()

    def logprobs(self, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
        """[outputs] of the output, over the kept ids where there are some."""
        scaled = self.logits(sample) / temperature
        for row, kept in zip(scaled, sample.support or [], strict=False):
            dropped = torch.ones_like(row, dtype=torch.bool)
            dropped[kept] = False
            row[dropped] = -torch.inf
        return scaled.log_softmax(-1).gather(-1, torch.tensor(sample.output_ids)[:, None])[:, 0]

    def routes(self, sample: Sample) -> torch.Tensor:
        """[tokens - 1, layers, k], the experts in descending order of their router's score."""
        ids = sample.prompt_ids + sample.output_ids
        with torch.no_grad():
            scores = self.model(torch.tensor([ids]), output_router_logits=True).router_logits
        k = self.model.config.num_experts_per_tok
        return torch.stack([layer.topk(k).indices[:-1] for layer in scores], 1).to(torch.int32)
