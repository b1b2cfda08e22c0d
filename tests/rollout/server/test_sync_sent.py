"""What a weight update sends, and who is out when servers misbehave: by name, while the others go on."""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from faulty_sglang import PROBE, FaultySglang, servers_in_processes
from faulty_weights import probe_logprobs, weights_of
from refusals import refuses
from safetensors.torch import load_file
from sglang_clients import CONFIG, PATH, Job, holds
from sglang_clients import start as start

from megatron_rc import schema
from megatron_rc.rollout.sglang import send_group
from megatron_rc.rollout.sglang.weights import weight_sync
from megatron_rc.settings.sglang import SGLangSettings

ROOT = Path(__file__).parents[3]
CONTROL = ("/pause_generation", "/flush_cache", "/weights_checker", "/update_weight_version", PROBE)
PATH_GROUP = "/update_weights_from_distributed"


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
@pytest.mark.parametrize("transport", PATH)
def test_later_updates_must_hold_what_the_first_one_held(start, tmp_path, transport, changes, sentence):
    job, one = start(transport, tmp_path, count=1, updated=True)
    refuses(sentence, job.update, 2, version=2, **changes)
    assert one.version == "unproved-2" and one.paused and job.out[0] is not None
    job.update(3, version=3)
    assert holds(one, 3) and one.version == "3" and job.out == [None]


def test_servers_of_before_the_bracket_and_the_checksum_are_updated_without_them(start, tmp_path):
    job, one, two = start("tensor", tmp_path)
    for server in (one, two):
        server.session = True  # an old server asks for no session
        for path in ("/begin_weight_update", "/end_weight_update", "/weights_checker"):
            server.fail(path, 404)
    job.update(1, version=1)
    assert job.out == [None, None] and holds(one, 1) and one.calls["/end_weight_update"] == 0
    two.fail(PATH["tensor"], "damage")
    refuses("nats from the servers' median", job.update, 2, version=2)


def test_a_server_of_tensor_parallelism_gets_a_payload_a_rank_of_a_smaller_bucket(start, tmp_path):
    _, one = start("tensor", tmp_path, count=1, info={"tp_size": 2}, updated=True)
    assert holds(one, 1) and all(len(body["serialized_named_tensors"]) == 2 for body in one.bodies[PATH["tensor"]])


@pytest.mark.parametrize(("dtype", "sent"), [("bfloat16", torch.bfloat16), ("float32", torch.float32)])
def test_tensors_are_rounded_to_the_servers_dtype_before_they_are_sent(start, tmp_path, dtype, sent):
    _, _ = start("disk", tmp_path, count=1, info={"dtype": dtype}, updated=True)
    folder = next(tmp_path.glob("weights-1-*"))
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            assert tensor.dtype == sent and torch.equal(tensor, weights_of(1)[name].to(sent))


def test_servers_of_different_dtypes_are_refused_by_name(start, tmp_path):
    job, one, two = start("disk", tmp_path)
    job.pool.servers[1].info["dtype"] = "bfloat16"
    refuses(f"same --dtype, got {one.url}: float32, {two.url}: bfloat16", job.update, 1, version=1)


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
from faulty_sglang import FaultySglang
from sglang_clients import Job
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with FaultySglang() as server:
    job = Job([server.url], "disk", Path(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))
    try:
        job.update(1, version=1)
    except ValueError as error:
        print(error, server.version, server.paused, len(list(Path(sys.argv[1]).iterdir())), job.taken)
"""
    # a module imported under the limit would leave half a .pyc behind for every later process
    env = {"PYTHONPATH": f"{ROOT / 'tests/support'}:{ROOT}", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=600)
    assert "sync_dir=" in done.stdout and "GiB free: " in done.stdout, done.stdout + done.stderr
    assert done.stdout.endswith("unproved-1 True 0 6\n")


def test_an_unknown_transport_and_a_missing_folder_are_refused_by_name():
    with pytest.raises(ValueError, match="weight_sync: .* 'disk', 'tensor', 'distributed', got 'pigeon'"):
        schema.from_dict(SGLangSettings, {"weight_sync": "pigeon"})
    refuses("weight_sync=disk needs rollout.sglang.sync_dir", weight_sync, SGLangSettings(weight_sync="disk"), CONFIG)


@pytest.mark.parametrize(
    ("transport", "field"), [("distributed", "dp_size"), ("distributed", "pp_size"), ("tensor", "dp_size")]
)
def test_servers_that_a_transport_cannot_reach_whole_are_refused(start, tmp_path, transport, field):
    job, one = start(transport, tmp_path, count=1, info={field: 2})
    refuses(f"weight_sync={transport} does not support {field}=2; use weight_sync=disk", job.update, 1, version=1)
    assert one.paused and not one.calls["/begin_weight_update"]


def test_attention_that_alone_is_data_parallel_is_one_model(start, tmp_path):
    _, one = start("tensor", tmp_path, count=1, info={"dp_size": 2, "enable_dp_attention": True}, updated=True)
    assert holds(one, 1)


@pytest.mark.parametrize("fault", [500, "die", "hang"])
@pytest.mark.parametrize(
    ("transport", "path"), [*PATH.items(), *(("tensor", path) for path in (*CONTROL, "/end_weight_update"))]
)
def test_wherever_a_server_fails_it_is_out_and_paused_and_the_other_goes_on(start, tmp_path, transport, path, fault):
    job, good, bad = start(transport, tmp_path, updated=True)
    bad.fail(path, fault)
    if fault == "hang":
        # half a second for this server, so that the others need not be fast
        ask = job.pool.servers[1].ask
        job.pool.servers[1].ask = lambda path, body, timeout_s: ask(path, body, 0.5)
    job.update(2, version=2)
    assert job.out[0] is None and holds(good, 2) and good.version == "2" and not good.paused
    assert job.out[1] is not None and "version 2" in job.out[1]
    if fault != "die":
        assert bad.paused or path == "/pause_generation"
        assert bad.version != "2", "a trainer process that reads versions must see it, too"


@pytest.mark.parametrize("transport", PATH)
def test_a_server_that_was_out_comes_back_with_the_next_update_also_as_a_new_process(start, tmp_path, transport):
    job, good, bad = start(transport, tmp_path, updated=True)
    bad.fail(PATH[transport], "die")
    job.update(2, version=2)
    assert job.out[1] is not None
    job.update(3, version=3)
    assert "refuses connections" in str(job.out[1])
    with FaultySglang(port=bad.port) as again:
        job.update(4, version=4)
        assert job.out == [None, None] and holds(again, 4) and holds(good, 4) and again.version == "4"


@pytest.mark.parametrize("transport", PATH)
def test_when_no_server_is_left_each_is_named_with_its_reason_and_all_weights_were_taken(start, tmp_path, transport):
    job, one, two = start(transport, tmp_path)
    one.fail("/pause_generation", 500)
    two.fail("/flush_cache", 400)
    said = refuses("no SGLang server", job.update, 1, version=1)
    assert f"{one.url}: pausing failed" in said and f"{two.url}: flushing failed" in said
    assert job.taken == len(weights_of(1))


@pytest.mark.parametrize("transport", PATH)
def test_a_damaged_weight_is_found_by_the_checksum_of_the_majority(start, tmp_path, transport):
    job, *servers = start(transport, tmp_path, count=3)
    servers[1].fail(PATH[transport], "damage")
    job.update(1, version=1)
    assert job.out[0] is None and job.out[2] is None
    assert "differ" in str(job.out[1]) and "model.norm.weight" in str(job.out[1])


def test_of_two_servers_with_different_weights_neither_is_trusted(start, tmp_path):
    job, one, two = start("tensor", tmp_path)
    two.fail(PATH["tensor"], "damage")
    refuses("differ", job.update, 1, version=1)
    assert one.paused and two.paused


def test_weights_that_a_single_server_did_not_take_are_found_though_it_says_they_arrived(start, tmp_path):
    job, one = start("disk", tmp_path, count=1, updated=True)
    one.fail(PATH["disk"], "ignore")
    refuses("kept their old values", job.update, 2, version=2)


def test_a_version_that_reads_back_differently_takes_the_server_out(start, tmp_path):
    job, _, bad = start("tensor", tmp_path)
    # the first call names the weights unproved
    bad.fail("/update_weight_version", "ignore", after=1)
    job.update(1, version=1)
    assert job.out == [None, "update to version 1: naming failed: it was named 1 and reads back 'unproved-1'"]


def test_a_probe_that_differs_from_the_trainers_takes_the_server_out_and_pauses_it_again(start, tmp_path):
    job, one, two = start("tensor", tmp_path)
    job.sync.probe = probe = Mock(side_effect=lambda prompt: probe_logprobs(weights_of(1), prompt))
    job.update(1, version=1)
    assert probe.call_count == 1 and job.out == [None, None]
    job.sync.probe = lambda prompt: [value + 0.01 for value in probe_logprobs(weights_of(2), prompt)]
    refuses("nats from the trainer's", job.update, 2, version=2)
    assert one.paused and two.paused and one.version == two.version == "unproved-2"


def test_a_probe_may_differ_in_proportion_to_its_log_probs(start, tmp_path):
    job, _ = start("tensor", tmp_path, count=1)
    for version, share, passes in ((1, 5e-6, True), (2, 2e-5, False)):
        job.sync.probe = lambda prompt, v=version, s=share: [p * (1 + s) for p in probe_logprobs(weights_of(v), prompt)]
        with nullcontext() if passes else pytest.raises(ValueError, match="nats from the trainer's"):
            job.update(version, version=version)


def test_a_session_left_open_by_a_trainer_that_died_is_closed_first(start, tmp_path):
    job, one = start("tensor", tmp_path, count=1)
    one.session = True
    job.update(1, version=1)
    assert holds(one, 1) and not one.session


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
    refuses("weight_sync=distributed needs servers on CPUs", job.update, 1, version=1)
    assert job.taken == len(weights_of(1))


def test_a_broadcast_that_fails_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_group.dist, "broadcast", Mock(side_effect=RuntimeError("connection reset")))
    assert send_group._broadcast(torch.zeros(1), Mock(), [], 1.0) == "the broadcast failed: connection reset"
