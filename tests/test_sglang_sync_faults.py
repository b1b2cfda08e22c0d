"""A weight update on servers that misbehave: whoever fails is out of rotation by name, the others go on."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_sync_server import CONFIG, FaultySyncServer, probe_logprobs, servers_in_processes, weights_of
from safetensors.torch import load_file

from megatron_rc.rollout.sglang_pool import Pool
from megatron_rc.rollout.sglang_sync import WeightSync, update_servers, weight_sync

WAYS = ("disk", "tensor")
"""In which servers in threads of one process can be updated."""
PATH = {"disk": "/update_weights_from_disk", "tensor": "/update_weights_from_tensor"}


class Job:
    """A trainer's side: a pool, a sync, and the seeds of weights sent."""

    def __init__(self, urls: list[str], way: Any, folder: Path, **options: Any) -> None:
        self.pool = Pool(urls, concurrency=4, timeout_s=10)
        self.sync: WeightSync = weight_sync(
            way, CONFIG, bucket_bytes=600, sync_dir=folder, **{"timeout_s": 5.0, **options}
        )
        self.taken = 0

    def stream(self, seed: int, without: str = "", instead: dict[str, torch.Tensor] | None = None) -> Iterator[Any]:
        for name, tensor in (weights_of(seed) | (instead or {})).items():
            self.taken += 1
            if name != without:
                yield name, tensor

    def update(self, seed: int, version: int, **changes: Any) -> None:
        update_servers(self.pool, self.sync, self.stream(seed, **changes), version)

    @property
    def out(self) -> list[str | None]:
        return [server.out for server in self.pool.servers]


@pytest.fixture
def start() -> Iterator[Any]:
    with ExitStack() as stack:

        def started(way: str, folder: Path, count: int = 2, info: dict[str, Any] | None = None, **options: Any) -> Any:
            servers = [FaultySyncServer(info).start() for _ in range(count)]
            for server in servers:
                stack.callback(server.die)
            job = Job([server.url for server in servers], way, folder, **options)
            stack.callback(job.pool.close)
            stack.callback(job.sync.close)
            return job, *servers

        yield started


def holds(server: FaultySyncServer, seed: int) -> bool:
    return all(torch.equal(server.weights[name], tensor) for name, tensor in weights_of(seed).items())


@pytest.mark.parametrize("way", WAYS)
def test_every_server_holds_the_weights_and_the_version(start, tmp_path, way):
    job, one, two = start(way, tmp_path)
    for seed in (1, 2):
        job.update(seed, version=seed)
        for server in (one, two):
            assert holds(server, seed) and server.version == str(seed)
            assert not server.paused and not server.session
    assert job.out == [None, None]
    if way == "tensor":
        assert one.calls[PATH[way]] >= 4, "600 bytes hold neither all tensors nor the first"


CONTROL = ("/pause_generation", "/flush_cache", "/weights_checker", "/update_weight_version", "/generate")


@pytest.mark.parametrize("fault", [500, "die", "hang"])
@pytest.mark.parametrize(
    ("way", "path"), [*PATH.items(), *(("tensor", path) for path in (*CONTROL, "/end_weight_update"))]
)
def test_a_server_that_fails_anywhere_is_out_and_stays_paused_while_the_other_goes_on(
    start, tmp_path, way, path, fault
):
    job, good, bad = start(way, tmp_path, timeout_s=1.0)
    job.update(1, version=1)
    bad.faults[path] = (bad.calls[path], fault)
    job.update(2, version=2)
    assert job.out[0] is None and holds(good, 2) and good.version == "2" and not good.paused
    assert job.out[1] is not None and "version 2" in job.out[1]
    if fault != "die":
        assert bad.paused or path == "/pause_generation"
        assert bad.version != "2", "a trainer process that reads versions must see it, too"


@pytest.mark.parametrize("way", WAYS)
def test_a_server_that_was_out_comes_back_with_the_next_update_also_as_a_new_process(start, tmp_path, way):
    job, good, bad = start(way, tmp_path, timeout_s=2.0)
    job.update(1, version=1)
    bad.faults[PATH[way]] = (bad.calls[PATH[way]], "die")
    job.update(2, version=2)
    assert job.out[1] is not None
    job.update(3, version=3)
    assert "refuses connections" in str(job.out[1])
    again = FaultySyncServer()
    again.port = bad.port
    again.start()
    try:
        job.update(4, version=4)
        assert job.out == [None, None] and holds(again, 4) and holds(good, 4) and again.version == "4"
    finally:
        again.die()


@pytest.mark.parametrize("way", WAYS)
def test_when_no_server_is_left_each_is_named_with_its_reason_and_all_weights_were_taken(start, tmp_path, way):
    job, one, two = start(way, tmp_path)
    one.faults["/pause_generation"] = (0, 500)
    two.faults["/flush_cache"] = (0, 400)
    with pytest.raises(ValueError, match="no SGLang server") as raised:
        job.update(1, version=1)
    assert f"{one.url}: pausing failed" in str(raised.value) and f"{two.url}: flushing failed" in str(raised.value)
    assert job.taken == len(weights_of(1))


def test_servers_that_die_first_do_not_keep_the_writer_from_taking_all_weights(start, tmp_path):
    job, one, two = start("tensor", tmp_path, timeout_s=2.0)
    for server in (one, two):
        server.faults[PATH["tensor"]] = (1, "die")
    with pytest.raises(ValueError, match="no SGLang server"):
        job.update(1, version=1)
    assert job.taken == len(weights_of(1))


@pytest.mark.parametrize("way", WAYS)
def test_a_damaged_weight_is_found_by_the_checksum_of_the_majority(start, tmp_path, way):
    job, *servers = start(way, tmp_path, count=3)
    servers[1].faults[PATH[way]] = (0, "damage")
    job.update(1, version=1)
    assert job.out[0] is None and job.out[2] is None
    assert "differ" in str(job.out[1]) and "model.norm.weight" in str(job.out[1])


def test_of_two_servers_with_different_weights_neither_is_trusted(start, tmp_path):
    job, one, two = start("tensor", tmp_path)
    two.faults[PATH["tensor"]] = (0, "damage")
    with pytest.raises(ValueError, match="differ"):
        job.update(1, version=1)
    assert one.paused and two.paused


def test_weights_that_a_single_server_did_not_take_are_found_though_it_says_they_arrived(start, tmp_path):
    job, one = start("disk", tmp_path, count=1)
    job.update(1, version=1)
    one.faults[PATH["disk"]] = (1, "ignore")
    with pytest.raises(ValueError, match="kept their old values"):
        job.update(2, version=2)


def test_equal_weights_may_be_sent_again(start, tmp_path):
    job, one = start("tensor", tmp_path, count=1)
    job.update(1, version=1)
    job.update(1, version=2)
    assert one.version == "2" and not one.paused


def test_a_first_update_that_leaves_a_tensor_of_the_server_unfilled_is_refused(start, tmp_path):
    job, one = start("disk", tmp_path, count=1)
    with pytest.raises(ValueError, match="did not fill, such as model.layers.0.input_layernorm.weight"):
        job.update(1, version=1, without="model.layers.0.input_layernorm.weight")
    assert one.paused and one.version == "unproved-1"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"without": "model.layers.0.self_attn.v_proj.weight"}, "lacks 1 of the 6 tensors .*v_proj"),
        ({"instead": {"model.other.weight": torch.zeros(3)}}, "holds model.other.weight, which the first one did not"),
        ({"instead": {"model.norm.weight": torch.zeros(9)}}, r"model.norm.weight of shape \[9\], the first one \[8\]"),
    ],
    ids=["missing", "unknown", "other shape"],
)
@pytest.mark.parametrize("way", WAYS)
def test_later_updates_must_hold_what_the_first_one_held(start, tmp_path, way, changes, sentence):
    job, one = start(way, tmp_path, count=1)
    job.update(1, version=1)
    with pytest.raises(ValueError, match=sentence):
        job.update(2, version=2, **changes)
    assert one.version == "unproved-2" and one.paused and job.out[0] is not None
    job.update(3, version=3)
    assert holds(one, 3) and one.version == "3" and job.out == [None]


def test_a_version_that_reads_back_differently_takes_the_server_out(start, tmp_path):
    job, _, bad = start("tensor", tmp_path)
    # the first call names the weights unproved
    bad.faults["/update_weight_version"] = (1, "ignore")
    job.update(1, version=1)
    assert job.out == [None, "update to version 1: naming failed: it was named 1 and reads back 'unproved-1'"]


def test_a_probe_that_differs_from_the_trainers_takes_the_server_out_and_pauses_it_again(start, tmp_path):
    job, one, two = start("tensor", tmp_path)
    asked = []

    def probe(prompt: list[int]) -> list[float]:
        asked.append(prompt)
        return probe_logprobs(weights_of(1), prompt)

    job.sync.probe = probe
    job.update(1, version=1)
    assert len(asked) == 1 and job.out == [None, None]
    job.sync.probe = lambda prompt: [value + 0.01 for value in probe_logprobs(weights_of(2), prompt)]
    with pytest.raises(ValueError, match="nats from the trainer's"):
        job.update(2, version=2)
    assert one.paused and two.paused and one.version == two.version == "unproved-2"


def test_servers_of_before_the_bracket_and_the_checksum_are_updated_without_them(start, tmp_path):
    job, one, two = start("tensor", tmp_path)
    for server in (one, two):
        server.session = True  # an old server asks for no session
        server.faults |= dict.fromkeys(["/begin_weight_update", "/end_weight_update", "/weights_checker"], (0, 404))
    job.update(1, version=1)
    assert job.out == [None, None] and holds(one, 1) and one.calls["/end_weight_update"] == 0
    two.faults[PATH["tensor"]] = (two.calls[PATH["tensor"]], "damage")
    with pytest.raises(ValueError, match="nats from the servers' median"):
        job.update(2, version=2)


def test_a_session_left_open_by_a_trainer_that_died_is_closed_first(start, tmp_path):
    job, one = start("tensor", tmp_path, count=1)
    one.session = True
    job.update(1, version=1)
    assert holds(one, 1) and not one.session


def test_a_server_of_tensor_parallelism_gets_a_payload_a_rank_of_a_smaller_bucket(start, tmp_path):
    job, one = start("tensor", tmp_path, count=1, info={"tp_size": 2})
    job.update(1, version=1)
    bodies = [body for path, body in one.bodies if path == PATH["tensor"]]
    assert holds(one, 1) and all(len(body["serialized_named_tensors"]) == 2 for body in bodies)


@pytest.mark.parametrize(("dtype", "sent"), [("bfloat16", torch.bfloat16), ("float32", torch.float32)])
def test_tensors_are_rounded_to_the_servers_dtype_before_they_are_sent(start, tmp_path, dtype, sent):
    job, _ = start("disk", tmp_path, count=1, info={"dtype": dtype})
    job.update(1, version=1)
    folder = next(tmp_path.glob("weights-1-*"))
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            assert tensor.dtype == sent and torch.equal(tensor, weights_of(1)[name].to(sent))


def test_servers_of_different_dtypes_are_refused_by_name(start, tmp_path):
    job, one, two = start("disk", tmp_path)
    job.pool.servers[1].info["dtype"] = "bfloat16"
    with pytest.raises(ValueError, match=f"same --dtype, got {one.url}: float32, {two.url}: bfloat16"):
        job.update(1, version=1)


def test_one_version_stays_on_disk_in_bounded_files_that_the_index_lists(start, tmp_path):
    job, _ = start("disk", tmp_path, count=1)
    for version in (1, 2, 3):
        job.update(version, version=version)
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("weights-3-")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {file.name: load_file(file) for file in folder.glob("*.safetensors")}
    assert {name: file for file, held in files.items() for name in held} == index
    assert set(index) == set(weights_of(1)) and len(files) >= 3
    for held in files.values():
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= 600


def test_a_full_disk_is_one_sentence_and_leaves_no_folder(tmp_path):
    # a limit on the size of files stands in for a disk that is full: the write itself fails
    program = """
import resource, signal, sys
from faulty_sync_server import CONFIG, FaultySyncServer
from test_sglang_sync_faults import Job
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
server = FaultySyncServer().start()
job = Job([server.url], "disk", Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))
try:
    job.update(1, version=1)
except ValueError as error:
    print(error, server.version, server.paused, len(list(Path(sys.argv[1]).iterdir())), job.taken)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        env={"PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parent.parent}", "OMP_NUM_THREADS": "1"},
        timeout=60,
    )
    assert "sync_dir=" in done.stdout and "GiB free: " in done.stdout, done.stdout + done.stderr
    assert done.stdout.endswith("unproved-1 True 0 6\n")


def tell(url: str, path: str, body: Any = None) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url + path, json.dumps(body or {}).encode()), timeout=10) as a:
        return json.loads(a.read())


@pytest.fixture
def group_job(tmp_path: Path) -> Iterator[Any]:
    with servers_in_processes(2) as urls:
        job = Job(urls, "distributed", tmp_path, timeout_s=4.0)
        try:
            yield job, urls
        finally:
            job.sync.close()
            job.pool.close()


PATH_GROUP = "/update_weights_from_distributed"


def holds_at(url: str, seed: int) -> bool:
    expected = {name: float(tensor.double().sum()) for name, tensor in weights_of(seed).items()}
    return bool(tell(url, "/state")["sums"] == expected)


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
    tell(bad, "/fault", {PATH_GROUP: (1, 500)})
    job.update(3, version=3)
    assert job.out[0] is None and "told to answer 500" in str(job.out[1])
    assert holds_at(good, 3) and tell(bad, "/state")["paused"]
    # back again
    tell(bad, "/fault", {})
    job.update(4, version=4)
    assert job.out == [None, None] and holds_at(good, 4) and holds_at(bad, 4)
    # and a death inside the broadcast
    tell(bad, "/fault", {PATH_GROUP: (1, "die")})
    job.update(5, version=5)
    assert job.out[0] is None and job.out[1] is not None and holds_at(good, 5)
    assert tell(good, "/model_info")["weight_version"] == "5"
    job.update(6, version=6)
    assert job.out[0] is None and holds_at(good, 6)


def test_a_server_that_hangs_in_the_group_is_given_up_after_the_timeout(group_job):
    job, (good, bad) = group_job
    job.update(1, version=1)
    tell(bad, "/fault", {PATH_GROUP: (1, "hang")})
    began = time.monotonic()
    job.update(2, version=2)
    assert job.out[0] is None and job.out[1] is not None and holds_at(good, 2)
    assert time.monotonic() - began < 4 * 4.0


def test_cuda_servers_and_a_trainer_without_cuda_cannot_form_a_group(start, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this trainer has CUDA")
    job, _ = start("distributed", tmp_path, count=1, info={"device": "cuda"})
    with pytest.raises(ValueError, match="weight_sync=distributed needs servers on CPUs"):
        job.update(1, version=1)
    assert job.taken == len(weights_of(1))


@pytest.mark.parametrize("field", ["dp_size", "pp_size"])
def test_servers_that_a_way_cannot_reach_whole_are_refused(start, tmp_path, field):
    job, _ = start("distributed", tmp_path, count=1, info={field: 2})
    with pytest.raises(ValueError, match=f"{field}=2, which the server supports by weight_sync=disk"):
        job.update(1, version=1)


def test_an_unknown_way_and_a_missing_folder_are_refused_by_name():
    with pytest.raises(ValueError, match="weight_sync must be disk, tensor or distributed, got 'pigeon'"):
        weight_sync("pigeon", CONFIG)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weight_sync=disk needs rollout.sglang.sync_dir"):
        weight_sync("disk", CONFIG)
