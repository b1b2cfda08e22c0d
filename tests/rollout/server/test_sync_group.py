"""A weight update by broadcast: the group of trainer and servers is joined once and outlives its members."""

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from faulty_sglang import servers_in_processes
from faulty_weights import weights_of
from sync_jobs import Job
from sync_jobs import start as start

from megatron_rc.rollout.sglang import send_group

PATH_GROUP = "/update_weights_from_distributed"


def tell(url: str, path: str, body: Any = None) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url + path, json.dumps(body or {}).encode()), timeout=10) as a:
        return json.loads(a.read())


def holds_at(url: str, seed: int) -> bool:
    expected = {name: float(tensor.double().sum()) for name, tensor in weights_of(seed).items()}
    return bool(tell(url, "/state")["sums"] == expected)


@pytest.fixture
def group_job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    with servers_in_processes(2) as urls:
        job = Job(urls, "distributed", tmp_path, timeout_s=getattr(request, "param", 20.0))
        try:
            yield job, urls
        finally:
            job.sync.close()
            job.pool.close()


def test_a_group_of_two_servers_is_joined_once_and_survives_failures_of_one(group_job):
    job, (good, bad) = group_job
    job.update(1, version=1)
    job.update(2, version=2)
    assert job.out == [None, None] and holds_at(good, 2) and holds_at(bad, 2)
    state = tell(good, "/state")
    assert state["calls"]["/init_weights_update_group"] == 1 and state["calls"][PATH_GROUP] == 6, "three buckets each"
    # one that left the group is taken into a new one, and nobody is out
    tell(bad, "/forget_groups")
    job.update(1, version=22)
    assert job.out == [None, None] and holds_at(good, 1) and holds_at(bad, 1)
    # a clean refusal in the middle of an update: the bucket is sent once more, to both, and then without that server
    tell(bad, "/fault", {"faults": [(PATH_GROUP, 500, 1)]})
    job.update(3, version=3)
    assert job.out[0] is None and "told to answer 500" in str(job.out[1])
    assert holds_at(good, 3) and tell(bad, "/state")["paused"]
    # back again
    tell(bad, "/fault", {})
    job.update(4, version=4)
    assert job.out == [None, None] and holds_at(good, 4) and holds_at(bad, 4)
    # and a death inside the broadcast
    tell(bad, "/fault", {"faults": [(PATH_GROUP, "die", 1)]})
    job.update(5, version=5)
    assert job.out[0] is None and job.out[1] is not None and holds_at(good, 5)
    assert tell(good, "/model_info")["weight_version"] == "5"
    job.update(6, version=6)
    assert job.out[0] is None and holds_at(good, 6)


@pytest.mark.parametrize("group_job", [3.0], indirect=True)
def test_a_server_that_hangs_in_the_group_is_given_up_after_the_timeout(group_job):
    job, (good, bad) = group_job
    job.update(1, version=1)
    tell(bad, "/fault", {"faults": [(PATH_GROUP, "hang", 1)]})
    began = time.monotonic()
    job.update(2, version=2)
    assert job.out[0] is None and job.out[1] is not None and holds_at(good, 2)
    assert time.monotonic() - began < 60, "four calls with a limit of 3 s each, on a machine that may be busy"


def test_cuda_servers_and_a_trainer_without_cuda_cannot_form_a_group(start, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this trainer has CUDA")
    job, _ = start("distributed", tmp_path, count=1, info={"device": "cuda"})
    with pytest.raises(ValueError, match="weight_sync=distributed needs servers on CPUs"):
        job.update(1, version=1)
    assert job.taken == len(weights_of(1))


def test_a_broadcast_that_fails_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_group.dist, "broadcast", Mock(side_effect=RuntimeError("connection reset")))
    assert send_group._broadcast(torch.zeros(1), Mock(), [], 1.0) == "the broadcast failed: connection reset"
