"""An engine in a process of its own answers as in this one; every way in which it can fail is one sentence."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from process_groups import members, nothing_is_left
from refusals import refuses
from scripted_engine import BROKEN, ENDLESS, KILLED, REFUSED, ScriptedEngine

from megatron_rc.engine import RolloutEngine, Sample, SamplingParams
from megatron_rc.rollout import worker as worker_module
from megatron_rc.rollout.sglang.engine import alone
from megatron_rc.rollout.worker import WorkerEngine

SUPPORT = Path(__file__).parents[1] / "support"


def worker() -> WorkerEngine:
    return WorkerEngine(ScriptedEngine, agree=alone)


@pytest.fixture(scope="module")
def engine() -> Iterator[WorkerEngine]:
    engine = worker()
    yield engine
    engine.close()


def answer(engine: RolloutEngine, prompt: int = 7) -> list[Sample]:
    return engine.generate([[prompt], [8, 9]], SamplingParams(), n=2, seeds=[2**61, 1, 2, 3])


def weights() -> list[tuple[str, torch.Tensor]]:
    base = torch.arange(12.0).reshape(3, 4) / 7
    return [("view", base[:, 1]), ("bf16", (base[0] / 3).bfloat16()), ("trained", torch.nn.Parameter(base[2:]))]


def test_samples_and_weights_pass_unchanged_and_carry_the_version(engine: WorkerEngine) -> None:
    local = ScriptedEngine()
    for one in (engine, local):
        one.update_weights(weights(), 5)
    assert answer(engine) == answer(local)
    assert engine.weight_version == 5
    assert answer(engine)[0].weight_versions == [(5, 0, 11)]


def test_every_finished_response_is_counted(engine: WorkerEngine) -> None:
    counts: list[int] = []
    engine.generate([[1]], SamplingParams(), n=3, seeds=[1, 2, 3], on_finished=counts.append)
    assert counts == [1, 1, 1]


def test_errors_of_the_engine_are_sentences_and_the_next_request_is_answered(engine: WorkerEngine) -> None:
    engine.update_weights(weights(), 6)
    refuses(r"^prompt 0 is refused$", answer, engine, REFUSED)
    refuses(r"^the rollout engine failed with KeyError: [^\n]*no such key[^\n]*$", answer, engine, BROKEN)
    unread = iter([("unknown", torch.ones(1)), *weights()])
    refuses("weight 'unknown' is not a parameter of the model", engine.update_weights, unread, 7)
    assert next(unread, None) is None and engine.weight_version == 6
    assert answer(engine)[0].weight_versions == [(6, 0, 11)]


def test_an_engine_that_cannot_be_built_says_why() -> None:
    refuses(r"^dtype must be bf16$", WorkerEngine, partial(ScriptedEngine, "dtype must be bf16"), agree=alone)


def test_an_interrupt_leaves_the_process_to_its_parent_and_a_kill_is_noticed_at_once() -> None:
    engine = worker()
    try:
        os.kill(engine.pid, signal.SIGINT)
        assert len(answer(engine)) == 4
        started = time.monotonic()
        unread = iter(weights())
        for attempt in (partial(answer, engine, KILLED), partial(engine.update_weights, unread, 1)):
            refuses(r"^the process of the rollout engine was ended by SIGKILL, as ", attempt)
        assert time.monotonic() - started < 30, "nothing waits for a process that has ended"
        assert next(unread, None) is None, "the other trainer processes take part in making the weights"
    finally:
        engine.close()


def test_closing_ends_a_request_of_another_thread() -> None:
    engine, said = worker(), list[str]()
    begun = threading.Event()

    def wait() -> None:
        try:
            engine.generate([[ENDLESS]], SamplingParams(), n=1, seeds=[1], on_finished=lambda _: begun.set())
        except ValueError as error:
            said.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    assert begun.wait(600)
    engine.close()
    thread.join(600)
    assert said == ["the process of the rollout engine was ended by SIGTERM"]


def test_a_process_that_ignores_its_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = WorkerEngine(partial(signal.signal, signal.SIGTERM, signal.SIG_IGN), agree=alone)
    monkeypatch.setattr(worker_module, "_END_S", 0.5)
    engine.close()
    assert nothing_is_left(engine.pid)


def test_the_process_ends_with_its_parent_also_in_the_middle_of_a_request(tmp_path: Path) -> None:
    program = tmp_path / "parent.py"
    program.write_text(
        "import scripted_engine\n"
        "from megatron_rc.engine import SamplingParams\n"
        "from megatron_rc.rollout.worker import WorkerEngine\n"
        "if __name__ == '__main__':\n"
        "    engine = WorkerEngine(scripted_engine.ScriptedEngine, agree=print)\n"
        "    print(engine.pid, flush=True)\n"
        "    engine.generate([[scripted_engine.ENDLESS]], SamplingParams(), n=1, seeds=[1])\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{SUPPORT}:{SUPPORT.parents[1]}"}
    command = [sys.executable, str(program)]
    parent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert int(parent.stdout.readline()) in members(parent.pid)
    parent.kill()
    parent.wait()
    try:
        assert nothing_is_left(parent.pid)
    finally:
        for left in members(parent.pid):
            os.kill(left, signal.SIGKILL)
