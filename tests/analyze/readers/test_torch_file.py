"""Torch files are read without torch and run nothing, and a large one takes little work per sample."""

import io
import os
import pickle
import re
import struct
import sys
import time
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from host_batches import HOST_DUMPS, TRUTH
from refusals import refuses

from megatron_rc.analyze.readers import open_dump, torch_file, torch_pickle, verl
from megatron_rc.analyze.readers.dump import CorruptRows, UnreadableFile
from megatron_rc.analyze.readers.torch_file import TorchFile, item_of, value_of
from megatron_rc.analyze.readers.torch_pickle import Tensor


def saved(value: Any, folder: Path) -> TorchFile:
    torch.save(value, folder / "saved.pt")
    return TorchFile(folder / "saved.pt")


def zipped(folder: Path, pickled: bytes, *, compression: int = zipfile.ZIP_STORED, **entries: bytes) -> Path:
    path = folder / "made.pt"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        for name, data in entries.items():
            archive.writestr(f"archive/data/{name.removeprefix('s')}", data)
    return path


class Description(pickle.Pickler):
    """Pickles Global and Persistent objects as torch.save does."""

    def persistent_id(self, value: Any) -> Any:
        return value.pid if isinstance(value, Persistent) else None


class Persistent:
    def __init__(self, storage: Any, size: Any, key: Any = "10") -> None:
        # each tensor of torch.save has a text of its own
        self.pid = ("storage", storage, "".join(key) if isinstance(key, str) else key, "cpu", size)


class Rebuilt:
    """What unpickles as a tensor with these arguments."""

    def __init__(self, *arguments: Any, state: Any = None) -> None:
        self.arguments, self.state = arguments, state

    def __reduce__(self) -> Any:
        reduced = (torch._utils._rebuild_tensor_v2, self.arguments)
        return (*reduced, self.state) if self.state else reduced


def described(value: Any) -> bytes:
    stream = io.BytesIO()
    Description(stream, protocol=2).dump(value)
    return stream.getvalue()


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool,
    ],
)  # fmt: skip
def test_values_of_every_type_are_those_that_torch_saved(dtype: torch.dtype, tmp_path: Path):
    values = (torch.randn(3, 7, generator=torch.Generator().manual_seed(0)) * 40).to(dtype)
    for view in (values, values[1], values[:, 2:5], values.T, values[0, 0], values[:0]):
        read = saved({"x": view}, tmp_path).load()["x"].numpy()
        np.testing.assert_array_equal(read, view.double().numpy())
        assert read.shape == tuple(view.shape)


def test_many_views_of_one_storage_are_read_apart(tmp_path: Path):
    packed = torch.arange(100.0)
    read = saved([packed[i : i + 10] for i in range(0, 100, 10)], tmp_path).load()
    assert [value_of(part)[0] for part in read] == list(range(0, 100, 10))
    assert value_of(item_of(read[3], 4)) == 34.0


@pytest.mark.parametrize("protocol", range(2, 6))
def test_numbers_texts_lists_and_dictionaries_come_back_in_every_protocol_of_torch(protocol: int, tmp_path: Path):
    shared = (1, (2.5, None))
    value = {"a": [shared, shared, 70_000, 300, -1, 2**70, True, "x"], "b": (1, {3: "\n"}), "c": [1.5] * 3}
    value |= {"d": OrderedDict(e=1), "f": [[]] * 2, "g": list(range(-(10**5), 10**5, 999))}
    torch.save(value, tmp_path / "saved.pt", pickle_protocol=protocol)
    assert TorchFile(tmp_path / "saved.pt").load() == value


class Attack:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/megatron_rc_attacked; echo attacked > attacked",)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Attack(), "'posix'.'system'"),
        ({"samples": [Path("x")]}, "'pathlib'"),
        (np.float64(1), "'numpy"),
        (range(3), "'xrange'"),
        (eval, "'eval'"),
        (torch.nn.Linear(1, 1), "'torch.nn.modules.linear'.'Linear'"),
        (torch.float32, "'torch'.'float32'"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_a_file_that_asks_for_anything_but_data_is_refused_by_the_name_of_it(
    value: Any, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    torch.save({"rollout_id": 1, "rank": 0, "rollout_data": value}, "evil.pt")
    with pytest.raises(ValueError, match=r"evil\.pt: data\.pkl asks for") as refused:
        list(open_dump("evil.pt").chunks())
    assert named in str(refused.value)
    assert not Path("attacked").exists()


@pytest.mark.parametrize(
    "pickled",
    [
        b"cos\nsystem\n(S'echo attacked > attacked'\ntR.",  # the oldest protocol, which needs no frame
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x17echo attacked > attacked\x85R.",  # STACK_GLOBAL
        b"\x80\x02cbuiltins\n__import__\nX\x02\x00\x00\x00os\x85R.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2.__globals__\n.",
        b"\x80\x02\x82\x01.",  # the extension registry
    ],
)
def test_hand_written_pickles_run_nothing(pickled: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnreadableFile, match="data.pkl"):
        TorchFile(zipped(tmp_path, pickled)).load()
    assert not Path("attacked").exists()


@pytest.mark.parametrize(
    "value",
    [
        Rebuilt(Persistent(torch.FloatStorage, 10), 0, (11,), (1,)),
        Rebuilt(Persistent(torch.FloatStorage, 10), 5, (6,), (1,)),
        Rebuilt(Persistent(torch.FloatStorage, 10), -1, (2,), (1,)),
        Rebuilt(Persistent(torch.FloatStorage, 10), 0, (-2,), (1,)),
        Rebuilt(Persistent(torch.FloatStorage, 10), 0, (2,), (-1,)),
        Rebuilt(Persistent(torch.FloatStorage, 10), 0, (10**12,), (0,)),
        Rebuilt(Persistent(torch.FloatStorage, 10), 0, (2, 2), (1,)),
        Rebuilt(Persistent(torch.FloatStorage, -1), 0, (0,), (1,)),
        Rebuilt(Persistent(torch.FloatStorage, 10, key=7), 0, (1,), (1,)),
        Rebuilt(Persistent("FloatStorage", 10), 0, (1,), (1,)),
        Rebuilt("no storage", 0, (1,), (1,)),
        Rebuilt(Persistent(torch.FloatStorage, 10), 0, (1,), (1,), state={"shape": (10**9,)}),
        Rebuilt(Persistent(torch.FloatStorage, 10), 0, (1,), (1,), state=(None, {"offset": 10**9})),
    ],
)
def test_a_tensor_outside_of_its_storage_is_refused(value: Any, tmp_path: Path):
    # the arguments of a later tensor are read in one step
    later = Rebuilt(*value.arguments, False, OrderedDict(), state=value.state)
    first = Rebuilt(Persistent(torch.FloatStorage, 10), 0, (3,), (4,), False, OrderedDict())
    for values in ([value], [first, *([] for _ in range(256)), later]):
        path = zipped(tmp_path, described(values), s10=bytes(40))
        with pytest.raises(UnreadableFile, match="damaged: UnpicklingError: a (tensor|storage) (is|has)"):
            TorchFile(path).load()


@pytest.mark.parametrize("what", ["empty", "text", "a later version of zip", "cut off"])
def test_a_file_that_is_no_whole_zip_is_refused_by_one_sentence(what: str, tmp_path: Path):
    path = zipped(tmp_path, described({}))
    whole = path.read_bytes()
    version = whole.index(b"PK\x01\x02") + 6
    later = whole[:version] + b"\xff\xff" + whole[version + 2 :]
    path.write_bytes({"empty": b"", "text": b"no zip", "a later version of zip": later, "cut off": whole[:-10]}[what])
    with pytest.raises(UnreadableFile, match=rf"^{re.escape(str(path))} is not a whole file of torch.save: \w"):
        TorchFile(path)


def test_a_storage_that_declares_more_than_its_bytes_is_refused(tmp_path: Path):
    path = zipped(tmp_path, described(Rebuilt(Persistent(torch.FloatStorage, 10**9), 0, (10**9,), (1,))), s10=bytes(8))
    tensor = TorchFile(path).load()
    assert isinstance(tensor, Tensor)
    with pytest.raises(UnreadableFile, match="shorter"):
        tensor.numpy()


def test_a_zip_bomb_is_refused_before_a_byte_of_it_is_decompressed(tmp_path: Path):
    value = {"rollout_id": 0, "rank": 0, "rollout_data": Rebuilt(Persistent(torch.FloatStorage, 1), 0, (1,), (1,))}
    path = zipped(tmp_path, described(value), compression=zipfile.ZIP_DEFLATED, s10=bytes(200 << 20))
    assert path.stat().st_size < 1 << 20
    refuses(r"entry 'archive/data.pkl' is compressed; torch.save compresses none", open_dump, path)


def shared_tuples(depth: int) -> Any:
    bomb: Any = ()
    for _ in range(depth):
        bomb = (bomb, bomb)
    return bomb


@pytest.mark.parametrize(
    ("pickled", "sentence"),
    [
        # hashed item by item: 2^26 steps are seconds, and each level more doubles them
        (described({shared_tuples(26): 1}), "a key of a dictionary is neither a number nor a text"),
        (described({"x": {1: {shared_tuples(26)}}}), "asks for"),
        (pickle.dumps({shared_tuples(26)}, 4), "a key of a dictionary is neither a number nor a text"),
        (pickle.dumps([frozenset([(1, 2)])], 4), "a key of a dictionary is neither a number nor a text"),
        # the memo of the unpickler in C is allocated up to its largest index
        (b"\x80\x02Nr\xff\xff\xff\x7f.", "must hold"),
        (b"\x80\x02" + b"N" * 100_000 + b".", "data.pkl has 100003 bytes, at most 100000"),
        (b"\x80\x02" + b"N0" * 30_000 + b".", "it has more than 50000 instructions"),
        (b"\x80\x02\x8b\x00\x08\x00\x00" + b"\x01" * 2048 + b".", "data.pkl is damaged: KeyError: 139"),
        (b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".", "data.pkl is damaged: KeyError: 150"),
        (b"\x80\x02]q\x00ccollections\nOrderedDict\nq\x01((NNtq\x02tR.", "data.pkl is damaged: TypeError"),
        (described(Rebuilt(Persistent(torch.FloatStorage, 1), 0, (1,) * 65, (1,) * 65)), "a shape that is no shape"),
        (b"\x80\x02(K", "data.pkl is damaged: EOFError"),
    ],
    ids=[
        "key", "item of a set", "protocol 4", "frozen set", "memo", "size", "steps", "number", "bytes", "OrderedDict",
        "shape", "cut",
    ],
)  # fmt: skip
def test_a_pickle_that_would_cost_without_end_is_refused_at_once(
    pickled: bytes, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch_pickle, "MAX_INSTRUCTIONS", 50_000)
    monkeypatch.setattr(torch_file, "MAX_PICKLE", 100_000)
    path = zipped(tmp_path, pickled, s10=bytes(4))
    begun = time.process_time()
    with pytest.raises(UnreadableFile, match=rf"{re.escape(str(path))}.*{sentence}"):
        list(verl.read((path,), CorruptRows()))
    assert time.process_time() - begun < 1


def test_lists_that_share_their_items_are_refused_unread(tmp_path: Path):
    bomb: Any = [0.0]
    for _ in range(60):
        bomb = [bomb, bomb]
    sample = {"response_lengths": 1, "total_lengths": 2, "log_probs": bomb, "rollout_log_probs": bomb}
    torch.save(
        {"format_version": 2, "rollout_id": 0, "rank": 0, "samples": [sample], "dp_shards": bomb}, tmp_path / "b.pt"
    )
    refuses("log_probs must be a list of numbers", list, open_dump(tmp_path).chunks())


def test_a_damaged_byte_is_noticed(tmp_path: Path):
    raw = bytearray((HOST_DUMPS / "slime/train_data/3.pt").read_bytes())
    with zipfile.ZipFile(HOST_DUMPS / "slime/train_data/3.pt") as archive:
        entry = archive.getinfo("3/data/4")
    name, extra = struct.unpack("<HH", raw[entry.header_offset + 26 : entry.header_offset + 30])
    raw[entry.header_offset + 30 + name + extra] ^= 1
    (tmp_path / "3.pt").write_bytes(raw)
    dump = open_dump(tmp_path)
    chunks = list(dump.chunks())
    assert sum(chunk.num_sequences for chunk in chunks) == 5
    assert dump.corrupt.count == 1 and "'3/data/4' is damaged: its checksum is wrong" in dump.corrupt.first[0]


def train_data(path: Path, samples: int) -> Path:
    """The train data that slime wrote of six samples, as if these had come again and again, with two tensors more."""
    saved = torch.load(HOST_DUMPS / "slime/train_data/3.pt")
    six = [sample | {name: sample["log_probs"] for name in ("returns", "values")} for sample in saved["samples"]]
    own = ({name: torch.clone(v) if torch.is_tensor(v) else v for name, v in s.items()} for s in six * (samples // 6))
    torch.save(saved | {"samples": list(own)}, path)
    return path


def calls(path: Path) -> int:
    """Calls of functions, in Python and in C, while a dump is read."""
    count = 0

    def counted(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        list(open_dump(path).chunks())
    finally:
        sys.setprofile(None)
    return count


def test_the_work_per_sample_is_little_and_does_not_grow_with_the_file(tmp_path: Path):
    small, middle, large = (calls(train_data(tmp_path / "3.pt", samples)) for samples in (120, 240, 480))
    assert large - middle == pytest.approx(2 * (middle - small), rel=0.01)
    assert (large - middle) / 240 < 1000, "an instruction of its own for each part of a tensor takes 2800 calls"


@pytest.mark.parametrize("share", [20, pytest.param(1, marks=pytest.mark.full)])
def test_26_000_samples_are_within_the_limit(share: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch_pickle, "MAX_INSTRUCTIONS", torch_pickle.MAX_INSTRUCTIONS // share)
    samples = 26_000 // share // 6 * 6
    (chunk,) = open_dump(train_data(tmp_path / "3.pt", samples)).chunks()
    assert chunk.num_sequences == samples
    six = [response["old"] for response in TRUTH]
    assert chunk.log_pi.tolist() == pytest.approx([value for row in six * (samples // 6) for value in row])
