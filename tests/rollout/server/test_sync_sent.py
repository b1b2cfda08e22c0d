"""What a weight update sends: whole, once rounded, in bounded pieces, and the same tensors every time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from faulty_weights import weights_of
from safetensors.torch import load_file
from sglang_clients import CONFIG, PATH, holds
from sglang_clients import start as start

from megatron_rc import schema
from megatron_rc.rollout.sglang.weights import weight_sync
from megatron_rc.settings.sglang import SGLangSettings

ROOT = Path(__file__).parents[3]


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
    job, one = start(transport, tmp_path, count=1)
    job.update(1, version=1)
    with pytest.raises(ValueError, match=sentence):
        job.update(2, version=2, **changes)
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
    with pytest.raises(ValueError, match="nats from the servers' median"):
        job.update(2, version=2)


def test_a_server_of_tensor_parallelism_gets_a_payload_a_rank_of_a_smaller_bucket(start, tmp_path):
    job, one = start("tensor", tmp_path, count=1, info={"tp_size": 2})
    job.update(1, version=1)
    bodies = one.bodies[PATH["tensor"]]
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
    with pytest.raises(ValueError, match="weight_sync=disk needs rollout.sglang.sync_dir"):
        weight_sync(SGLangSettings(weight_sync="disk"), CONFIG)


@pytest.mark.parametrize(
    ("transport", "field"), [("distributed", "dp_size"), ("distributed", "pp_size"), ("tensor", "dp_size")]
)
def test_servers_that_a_transport_cannot_reach_whole_are_refused(start, tmp_path, transport, field):
    job, one = start(transport, tmp_path, count=1, info={field: 2})
    with pytest.raises(ValueError, match=f"weight_sync={transport} does not support {field}=2; use weight_sync=disk"):
        job.update(1, version=1)
    assert one.paused and not one.calls["/begin_weight_update"]


def test_attention_that_alone_is_data_parallel_is_one_model(start, tmp_path):
    job, one = start("tensor", tmp_path, count=1, info={"dp_size": 2, "enable_dp_attention": True})
    job.update(1, version=1)
    assert holds(one, 1)
