"""Damaged input gives one sentence, never a traceback, and never a number from a damaged row that looks whole."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from host_batches import HOST_DUMPS, JSON_LINES, OURS, dump_at, write_json_lines, write_parquet
from refusals import refuses

from megatron_rc.analyze import diagnose_dump
from megatron_rc.analyze.readers import open_dump

FILES = {
    "nemo_rl": "train_data_step3.jsonl", "slime": "train_data/3.pt", "miles": "train_data/3_0.pt",
    "miles_tp": "3_0.pt", "prime_rl": "token_exports/step_3/rank_0.jsonl",
    "prime_rl_traces": "traces/stream/00000.jsonl", "verl": "000000.pt",
}  # fmt: skip
"""The file of each host's dump that is damaged."""


@pytest.fixture(params=[*FILES, *OURS])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param in OURS:
        return dump_at(request.param, tmp_path)
    return shutil.copytree(HOST_DUMPS / request.param, tmp_path / request.param) / FILES[request.param]


def outcome(path: Path) -> str:
    """What a reader makes of a path: the number of whole rows, or the sentence of its refusal."""
    try:
        dump = open_dump(path)
        rows = sum(chunk.num_sequences for chunk in dump.chunks())
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        assert str(path) in str(error), "the sentence names the file"
        return str(error)
    assert rows == 6 or dump.corrupt.count or dump.corrupt.files or dump.ignored, "rows are lost without a word"
    assert all("\n" not in sentence for sentence in dump.corrupt.first)
    return str(rows)


def test_a_file_that_is_cut_anywhere_gives_one_sentence(file: Path):
    whole = file.read_bytes()
    for size in sorted({0, 1, 3, 4, 5, *np.linspace(6, len(whole) - 2, 40).astype(int).tolist()}):
        file.write_bytes(whole[:size])
        outcome(file if size % 2 else file.parent)


def test_a_file_with_wrong_bytes_gives_one_sentence(file: Path):
    whole = file.read_bytes()
    source = random.Random(0)
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(source.choice([1, 1, 4, 32])):
            damaged[source.randrange(len(damaged))] = source.randrange(256)
        file.write_bytes(damaged)
        try:
            assert sum(chunk.num_sequences for chunk in open_dump(file).chunks()) <= 6
        except ValueError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl", "x.pt", "x.jsonl.gz", "x.jsonl.zst", "x", "x.npz"])
@pytest.mark.parametrize(
    "content",
    [
        b"", b"\n", b"{}", b"[1]\n", b"null\n", b"\x00" * 64, b"PK\x03\x04", b"PAR1PAR1", b"\x1f\x8b",
        b"\x28\xb5\x2f\xfd",
    ],
    ids=repr,
)  # fmt: skip
def test_files_without_a_dump_are_refused_in_one_sentence(name: str, content: bytes, tmp_path: Path):
    (tmp_path / name).write_bytes(content)
    for path in (tmp_path, tmp_path / name):
        assert "\n" not in refuses(str(tmp_path), diagnose_dump, path)


def test_an_empty_folder_and_a_missing_path_are_refused(tmp_path: Path):
    refuses("is an empty folder", open_dump, tmp_path)
    refuses("does not exist", open_dump, tmp_path / "missing")


def test_the_rows_before_a_cut_are_kept_and_the_cut_one_is_counted(tmp_path: Path):
    for name in ("cut.jsonl", "cut.jsonl.gz"):
        path = write_json_lines(tmp_path / name, JSON_LINES[:-40])
        dump = open_dump(path)
        assert sum(chunk.num_sequences for chunk in dump.chunks()) == 5
        assert (dump.corrupt.count, dump.corrupt.files) == (1, 0)
        assert dump.corrupt.first == [f"{path}, line 6: the line is not a whole JSON object"]


def test_a_broken_file_beside_whole_ones_is_counted_and_named(tmp_path: Path):
    write_parquet(tmp_path / "step-000001.parquet")
    (tmp_path / "step-000002.parquet").write_bytes(write_parquet(tmp_path / "step-000002.parquet").read_bytes()[:-9])
    dump = open_dump(tmp_path)
    assert sum(chunk.num_sequences for chunk in dump.chunks()) == 6
    assert dump.corrupt.files == 1 and "step-000002.parquet is not a whole Parquet file" in dump.corrupt.first[0]
