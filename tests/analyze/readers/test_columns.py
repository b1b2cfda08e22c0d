"""Parquet in every layout that Arrow has for a column, and what slime and miles knew of a sample before training."""

import re
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from host_batches import HOST_DUMPS, RECORDS, TRUTH, column, whole, write_parquet
from refusals import refuses
from typer.testing import CliRunner

from megatron_rc.analyze import diagnose_dump
from megatron_rc.analyze.chunk import Chunk, join
from megatron_rc.analyze.readers import open_dump, parquet
from megatron_rc.analyze.readers.dump import CorruptRows
from megatron_rc.cli import app


def read(path: Path) -> tuple[Chunk, CorruptRows]:
    dump = open_dump(path)
    return join(list(dump.chunks())), dump.corrupt


def with_column(folder: Path, name: str, array: pa.Array) -> Path:
    table = pa.Table.from_pylist(RECORDS)
    table = table.drop_columns([name]) if name in table.column_names else table
    pq.write_table(table.append_column(name, array), folder / "step-000003.parquet")
    return folder / "step-000003.parquet"


def changed(row: int, **values: Any) -> list[dict[str, Any]]:
    records = deepcopy(RECORDS)
    records[row].update(values)
    return records


LISTS = {
    "list": pa.list_(pa.float32()),
    "large list": pa.large_list(pa.float64()),
    "list of dictionary": pa.list_(pa.dictionary(pa.int32(), pa.float32())),
}


@pytest.mark.parametrize("kind", LISTS.values(), ids=LISTS)
def test_every_kind_of_list_gives_the_same_values(kind: pa.DataType, tmp_path: Path):
    values = [row["entropy"] for row in RECORDS]
    if pa.types.is_dictionary(kind.value_type):
        flat = pa.array(np.concatenate(values), kind.value_type.value_type).dictionary_encode()
        array = pa.ListArray.from_arrays(np.cumsum([0, *map(len, values)]), flat)
    else:
        array = pa.array(values, kind)
    chunk, _ = read(with_column(tmp_path, "entropy", array))
    np.testing.assert_allclose(chunk.tokens["entropy"], column("entropy"), rtol=1e-6)


def test_lists_of_a_fixed_size_are_read(tmp_path: Path):
    values = pa.array([[-1.0, -2.0], [-3.0, -4.0]], pa.list_(pa.float32(), 2))
    pq.write_table(pa.table({"old_logprobs": values, "rollout_logprobs": values}), tmp_path / "x.parquet")
    chunk, _ = read(tmp_path)
    assert chunk.log_pi.tolist() == [-1, -2, -3, -4] and chunk.lengths.tolist() == [2, 2]


def test_a_text_column_may_be_dictionary_encoded_and_cannot_steer_a_terminal(tmp_path: Path):
    names = ["<script>alert(1)</script>", "b\x1b[2J", "b\x1b[2J", "c\nd", "a", "a"]
    chunk, _ = read(with_column(tmp_path, "server", pa.array(names).dictionary_encode()))
    assert chunk.sequences["server"].tolist() == [names[0], "b�[2J", "b�[2J", "c�d", "a", "a"]


@pytest.mark.parametrize(
    ("name", "array", "expected"),
    [
        ("old_logprobs", pa.array(["x"] * 6), "must be a list of numbers, got string"),
        ("old_logprobs", pa.array([-1.0] * 6), "must be a list of numbers, got double"),
        ("rollout_logprobs", pa.array([["x"]] * 6), "must be a list of numbers, got list"),
        ("entropy", pa.array([[[1.0]]] * 6), "must be a list of numbers, got list"),
        ("entropy", pa.array([{"a": 1}] * 6), "must be a list of numbers, got struct"),
        ("loss_mask", pa.array([["yes"]] * 6), "must be a list of numbers, got list"),
        ("reward", pa.array(["good"] * 6), "must be a number, got string"),
        ("reward", pa.array([[1.0]] * 6), "must be a number, got list"),
        ("step", pa.array([1.5] * 6), "must be an integer, got double"),
        ("step", pa.array(["a"] * 6), "must be an integer, got string"),
        ("server", pa.array([1] * 6), "must be text, got int64"),
        ("weight_versions", pa.array([[1]] * 6), "must be a list of spans"),
        ("weight_versions", pa.array([[{"version": 1}]] * 6), "must be a list of spans"),
        ("prompt_ids", pa.array([1] * 6), "must be a list of integers, got int64"),
    ],
)
def test_a_column_of_a_wrong_type_is_refused_by_name(name: str, array: pa.Array, expected: str, tmp_path: Path):
    path = with_column(tmp_path, name, array)
    refuses(rf"step-000003\.parquet: column '{name}' {expected}", read, path)


def test_a_file_without_rows_is_one_sentence(tmp_path: Path):
    pq.write_table(pa.Table.from_pylist(RECORDS)[:0], tmp_path / "x.parquet")
    refuses(r"no row that can be read: .*x\.parquet has no rows", read, tmp_path)


@pytest.mark.parametrize("name", ["old_logprobs", "reward"])
def test_a_column_that_is_there_twice_is_refused(name: str, tmp_path: Path):
    table = pa.Table.from_pylist(RECORDS)
    pq.write_table(table.append_column(name, table[name]), tmp_path / "x.parquet")
    refuses(rf"column '{name}' is there 2 times", read, tmp_path)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"old_logprobs": None}, "old_logprobs is missing; a training job computes them with correction.old: rec"),
        ({"rollout_logprobs": None}, "rollout_logprobs is missing"),
        ({"old_logprobs": [-1.0]}, r"old_logprobs has 1 values, rollout_logprobs has \d+"),
        ({"output_ids": [1]}, r"output_ids has 1 values, rollout_logprobs has \d+"),
        ({"loss_mask": [None] * 9}, "loss_mask"),
        ({"weight_versions": []}, "weight_versions must be spans that follow each other up to the last token"),
        ({"weight_versions": [{"version": 1, "start": 2, "end": 9}]}, "weight_versions must be spans"),
        ({"weight_versions": [{"version": 1, "start": 5, "end": -4}]}, "weight_versions must be spans"),
        ({"weight_versions": [{"version": None, "start": None, "end": None}]}, "weight_versions must be spans"),
        ({"finish_reason": "x" * 201}, "finish_reason must be a text of at most 200 characters"),
        ({"entropy": [float("nan")] * 9}, "entropy"),
        ({"entropy": [None] * 9}, "entropy"),
    ],
    ids=str,
)
def test_a_corrupt_row_is_left_out_and_named(values: dict[str, Any], sentence: str, tmp_path: Path):
    chunk, corrupt = read(write_parquet(tmp_path / "x.parquet", changed(2, **values)))
    assert chunk.num_sequences == 5 and corrupt.count == 1
    assert pytest.approx(chunk.log_pi.sum()) == sum(sum(r["old_logprobs"]) for i, r in enumerate(RECORDS) if i != 2)
    assert re.search(rf"x\.parquet, row 2: {sentence}", corrupt.first[0])


def test_a_gap_in_a_column_of_sequences_drops_the_column_and_no_row(tmp_path: Path):
    for gap in (None, float("nan"), float("inf")):
        chunk, corrupt = read(write_parquet(tmp_path / "x.parquet", changed(2, reward=gap)))
        assert chunk.num_sequences == 6 and not corrupt.count and "reward" not in chunk.sequences
    assert "reward" not in read(with_column(tmp_path, "reward", pa.nulls(6)))[0].sequences


def test_a_missing_value_of_a_token_outside_of_the_loss_does_no_harm(tmp_path: Path):
    row = next(i for i, record in enumerate(RECORDS) if not all(record["loss_mask"]))
    entropy = [v if m else None for v, m in zip(RECORDS[row]["entropy"], RECORDS[row]["loss_mask"], strict=True)]
    chunk, corrupt = read(write_parquet(tmp_path / "x.parquet", changed(row, entropy=entropy)))
    assert chunk.num_sequences == 6 and not corrupt.count and "entropy" in chunk.tokens


def test_damaged_log_probs_reach_the_evidence(tmp_path: Path):
    values = [float("nan"), None, float("inf"), *RECORDS[0]["old_logprobs"][3:]]
    chunk, corrupt = read(write_parquet(tmp_path / "x.parquet", changed(0, old_logprobs=values)))
    assert not corrupt.count
    assert np.isnan(chunk.log_pi[:2]).all() and np.isposinf(chunk.log_pi[2])


def test_a_row_group_beyond_the_bounds_is_refused_before_it_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # 4M zeros take a few kB on disk: run lengths declare any number of values
    zeros = [np.zeros(4_000_000, dtype=np.float32)]
    pq.write_table(pa.table({"old_logprobs": zeros, "rollout_logprobs": zeros}), tmp_path / "x.parquet")
    assert (tmp_path / "x.parquet").stat().st_size < 100_000
    monkeypatch.setattr(parquet, "MAX_GROUP_VALUES", 3_000_000)
    allocated = pa.total_allocated_bytes()
    refuses(r"row group 0 declares \d+ bytes and 4000000 values; at most", read, tmp_path)
    assert pa.total_allocated_bytes() - allocated < 1 << 20


def test_rows_keep_their_numbers_over_row_groups_and_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parquet, "CHUNK_TOKENS", 12)
    dump = open_dump(write_parquet(tmp_path / "x.parquet", changed(5, old_logprobs=[0.0]), row_group_size=2))
    chunks = list(dump.chunks())
    assert len(chunks) > 2 and sum(chunk.num_sequences for chunk in chunks) == 5
    assert ", row 5: " in dump.corrupt.first[0]


JOINED = {"group", "cached_tokens", "syncs"}
CACHED, PROMPTS = np.array([0, 8, 3, 1, 12, 0]), np.array([5, 11, 4, 4, 13, 3])
"""Tokens from the cache and tokens of all prompts of a response; the second and the fifth were two requests each."""


@pytest.fixture(params=["slime", "miles"])
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return shutil.copytree(HOST_DUMPS / request.param, tmp_path / request.param)


def change(copy: Path, edit: Callable[[list[dict[str, Any]]], Any]) -> None:
    file = copy / "rollout_data/3.pt"
    saved = torch.load(file)
    edit(saved["samples"])
    torch.save(saved, file)


def test_the_samples_before_training_give_their_columns(copy: Path):
    chunk = whole(copy)
    prompt = np.array([row["prompt_length"] for row in TRUTH])
    np.testing.assert_allclose(chunk.sequences["cached_tokens"], CACHED * prompt / PROMPTS)
    assert chunk.sequences["cached_tokens"][2] == CACHED[2], "with one request, the number of the server"
    assert chunk.sequences["group"].tolist() == [row["group"] for row in TRUTH]
    assert chunk.sequences["reward"].tolist() == [row["reward"] for row in TRUTH]
    assert set(chunk.sequences["syncs"]) == set(chunk.tokens["version"]) == {3}


def test_the_rule_of_a_stale_cache_runs_with_them_and_says_without_them_which_column_is_missing(copy: Path):
    assert "RC301" not in diagnose_dump(copy).judgement.not_run
    shutil.rmtree(copy / "rollout_data")
    missing = diagnose_dump(copy).judgement.not_run["RC301"]
    assert missing == (["cached_tokens"] if copy.name == "miles" else ["cached_tokens", "syncs"])


def test_a_host_whose_server_counts_no_cached_tokens_has_no_such_column(copy: Path):
    change(copy, lambda samples: [sample.pop("prefix_cache_info") for sample in samples[:1]])
    assert "cached_tokens" not in whole(copy).sequences
    nothing = {"cached_tokens": 0, "total_prompt_tokens": 0}
    change(copy, lambda samples: [sample.update(prefix_cache_info=nothing) for sample in samples])
    diagnosis = diagnose_dump(copy)
    assert diagnosis.judgement.not_run["RC301"] == ["cached_tokens"] and diagnosis.evidence.has("group")


def test_the_folder_of_train_data_alone_finds_its_neighbour(copy: Path):
    assert whole(copy / "train_data").sequences.keys() >= JOINED
    first = next((copy / "train_data").iterdir())
    if copy.name == "slime":
        assert whole(first).sequences.keys() >= JOINED


def test_samples_of_an_evaluation_are_not_taken_for_those_of_the_rollout(copy: Path):
    (copy / "rollout_data/3.pt").rename(copy / "rollout_data/eval_3.pt")
    dump = open_dump(copy)
    assert dump.ignored == ["1 file of samples before training is not read, such as eval_3.pt"]
    assert not JOINED & join(list(dump.chunks())).sequences.keys() - {"syncs"}


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda samples: samples[4]["tokens"].append(1), "is not the rollout of"),
        (lambda samples: samples[4]["tokens"].__setitem__(0, 1), "is not the rollout of"),
        (lambda samples: samples.clear(), "is not the rollout of"),
        (lambda samples: samples.append(None), "must hold the samples of a rollout, a list of dictionaries"),
        (lambda samples: samples[0].update(metadata=Path("x")), "data.pkl asks for 'pathlib"),
    ],
)
def test_other_samples_are_named_and_the_train_data_is_read_without_them(
    edit: Callable[[list[dict[str, Any]]], Any], sentence: str, copy: Path
):
    change(copy, edit)
    dump = open_dump(copy)
    chunk = join(list(dump.chunks()))
    assert chunk.num_sequences == 6 and not JOINED & chunk.sequences.keys() - {"syncs"}
    (said,) = dump.corrupt.first
    assert dump.corrupt.files == 1 and "rollout_data/3.pt" in said and sentence in said


@pytest.mark.parametrize(
    ("part", "sentence"),
    [({"format_version": 1}, "train data of format_version 2"), ({"samples": [{}]}, "no sample has 'log_probs'")],
)
def test_train_data_of_slime_that_cannot_be_analyzed_is_refused(part: dict[str, Any], sentence: str, tmp_path: Path):
    torch.save(torch.load(HOST_DUMPS / "slime/train_data/3.pt") | part, tmp_path / "3.pt")
    with pytest.raises(ValueError, match=sentence):
        list(open_dump(tmp_path).chunks())


def test_without_the_entropy_of_the_host_the_first_line_of_the_report_says_what_cannot_be_excluded(copy: Path):
    def report() -> str:
        return CliRunner().invoke(app, ["analyze", str(copy), "--no-html"], env={"COLUMNS": "200"}).output

    sentence = "Without the column entropy, a hidden temperature or top-p cannot be excluded."
    assert sentence not in report()
    for file in (copy / "train_data").iterdir():
        saved = torch.load(file)
        for part in [saved.get("rollout_data"), *saved.get("samples", [])]:
            (part or {}).pop("entropy", None)
        torch.save(saved, file)
    assert report().splitlines()[0] == sentence


def test_values_of_numpy_are_skipped_because_routes_are_of_it(copy: Path):
    routes = np.arange(12, dtype=np.int32).reshape(2, 3, 2)
    of_numpy = {"rollout_routed_experts": routes, "metadata": {"score": np.float64(1)}}
    change(copy, lambda samples: [sample.update(of_numpy) for sample in samples])
    assert whole(copy).sequences.keys() >= JOINED
