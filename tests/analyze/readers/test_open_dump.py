"""A dump is known by its content, and what is not read is said."""

import json
import re
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from host_batches import HOST_DUMPS, HOSTS, JSON_LINES, RECORDS, write_json_lines, write_parquet
from refusals import refuses
from typer.testing import CliRunner

from megatron_rc.analyze import diagnose_dump, readers
from megatron_rc.analyze.pages import html
from megatron_rc.analyze.readers import FORMATS, json_lines, open_dump
from megatron_rc.analyze.readers import rows as row_packing
from megatron_rc.cli import app

NEMO_RL, PRIME_RL = "nemo_rl/train_data_step3.jsonl", "prime_rl/token_exports/step_3/rank_0.jsonl"
NAMES = {"miles_tp": "miles", "nemo_rl": "nemo-rl", "prime_rl": "prime-rl", "prime_rl_traces": "prime-rl-traces"}


def rows(path: Path, format: str | None = None) -> int:
    return sum(chunk.num_sequences for chunk in open_dump(path, format).chunks())


@pytest.mark.parametrize("host", [host for host in HOSTS if not host.startswith(("miles", "prime_rl_"))])
def test_a_file_is_known_whatever_its_name(host: str, tmp_path: Path):
    files = [path for path in sorted((HOST_DUMPS / host).rglob("*")) if path.is_file()]
    source = next(path for path in files if path.parent.name != "rollout_data")
    shutil.copy(source, tmp_path / "renamed.bin")
    assert rows(tmp_path / "renamed.bin") == rows(source)


@pytest.mark.parametrize("host", HOSTS)
def test_the_format_can_be_named_and_another_one_is_refused(host: str):
    name = NAMES.get(host, host)
    assert rows(HOST_DUMPS / host, name) == 6
    for other in FORMATS.values():
        if other.name != name:
            refuses(f"holds no file of the format '{other.name}'", open_dump, HOST_DUMPS / host, other.name)


def test_an_unknown_format_is_refused_with_the_known_ones():
    refuses("unknown format 'slimy'; known: parquet, jsonl, nemo-rl", open_dump, HOST_DUMPS / "slime", "slimy")


def test_a_mixed_folder_says_what_is_read_and_what_is_not(tmp_path: Path):
    shutil.copytree(HOST_DUMPS / "slime", tmp_path / "slime")
    shutil.copytree(HOST_DUMPS / "miles", tmp_path / "miles")
    (tmp_path / "notes\x1b.txt").write_text("x")
    (tmp_path / ".hidden").write_text("x")
    diagnosis = diagnose_dump(tmp_path)
    assert diagnosis.format == "slime train data" and diagnosis.evidence.sequences == 6
    assert sorted(diagnosis.ignored) == [
        "1 file of no known format is not read, such as notes�.txt",
        "2 files of samples before training are not read, such as 3.pt",
        "4 files of miles train data are not read, such as 3_0.pt",
    ]
    assert diagnose_dump(tmp_path, format="miles").format == "miles train data"


def test_pages_of_earlier_analyses_are_no_unknown_files(tmp_path: Path):
    write_parquet(tmp_path / "a.parquet")
    html.write(diagnose_dump(tmp_path), tmp_path / "analysis.html")
    (tmp_path / "other.html").write_text("<!DOCTYPE html><html></html>")
    assert diagnose_dump(tmp_path).ignored == ["1 file of no known format is not read, such as other.html"]


def test_a_folder_of_more_files_than_a_dump_has_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(readers, "MAX_FILES", 3)
    refuses("holds more than 3 files; give the folder of the dump itself", open_dump, HOST_DUMPS / "miles_tp")


def test_files_come_in_the_order_of_their_numbers(tmp_path: Path):
    for step in (10, 9, 100):
        write_parquet(tmp_path / f"step-{step}.parquet", [{**row, "step": step} for row in RECORDS])
    assert [int(chunk.sequences["step"][0]) for chunk in open_dump(tmp_path).chunks()] == [9, 10, 100]


def test_files_of_one_dump_that_lack_a_column_are_read_without_it(tmp_path: Path):
    write_parquet(tmp_path / "a.parquet")
    write_parquet(tmp_path / "b.parquet", [{k: v for k, v in row.items() if k != "entropy"} for row in RECORDS])
    diagnosis = diagnose_dump(tmp_path)
    assert diagnosis.evidence.sequences == 12 and not diagnosis.evidence.has("entropy")


@pytest.mark.parametrize("name", ["old_logprobs", "logprobs"])
def test_a_dump_with_other_names_says_which_are_there_and_which_are_needed(name: str, tmp_path: Path):
    needed = "needed: old_logprobs, rollout_logprobs"
    (tmp_path / "own.jsonl").write_text(json.dumps({"reward": 1.0, name: [-1.0]}) + "\n")
    write_parquet(tmp_path / "own.parquet", [{name: row["old_logprobs"]} for row in RECORDS])
    for file, kind in (("own.jsonl", f"JSON lines with the keys {name}, reward"), ("own.parquet", f"columns {name}")):
        refuses(f"holds no dump: .*{kind}; {needed}; known formats: parquet", open_dump, tmp_path / file)
    with pytest.raises(ValueError, match=f"no file of the format 'jsonl': JSON .*{name}, reward; {needed}$"):
        open_dump(tmp_path / "own.jsonl", "jsonl")


def test_a_json_array_and_a_csv_say_what_to_write_instead(tmp_path: Path):
    (tmp_path / "own.json").write_text(json.dumps([{"reward": 1.0}]))
    (tmp_path / "own.csv").write_text("reward,old_logprobs\n1,-0.5\n")
    for name, sentence in (
        ("own.json", "is one JSON array: write one object per line"),
        ("own.csv", "is a CSV, and log-probs are lists"),
    ):
        refuses(sentence, open_dump, tmp_path / name)


def line(**values: Any) -> bytes:
    return (json.dumps({**RECORDS[0], **values}) + "\n").encode()


@pytest.mark.parametrize(
    ("damaged", "sentence"),
    [
        (b"[1, 2]\n", "the line is not a JSON object"),
        (b'{"old_logprobs": \n', "the line is not a whole JSON object"),
        (b"[" * 100_000 + b"\n", "the line is not a whole JSON object"),
        (line(old_logprobs=None), "old_logprobs is missing"),
        (line(old_logprobs="<script>"), "old_logprobs must be a list of numbers"),
        (line(old_logprobs=["-1"]), "old_logprobs must be a list of numbers"),
        (line(old_logprobs=[[-1.0]]), "old_logprobs must be a list of numbers"),
        (line(old_logprobs=[-1.0]), "log mu has 9 values, log pi has 1"),
        (line(old_logprobs=[10**400]), "old_logprobs has a number that is too large"),
        (line(loss_mask=[None]), "loss_mask must be a list of flags"),
        (line(output_ids=[1.5]), "token_id must be a list of integers"),
        (line(entropy=[float("nan")] * 9), "entropy must be a number at every loss token"),
        (line(entropy=[1.0]), "entropy has 1 values, log pi has 9"),
        (line(reward="high"), "reward must be a number"),
        (line(reward=10**400), "reward must be a number"),
        (line(step=1.5), "step must be an integer"),
        (line(step=True), "step must be a number"),
        (line(server=7), "server must be a text of at most 200 characters"),
        (line(weight_versions=[{"version": 1, "start": 0, "end": 10**12}]), "weight_versions must be spans that"),
        (line(weight_versions=[{"version": 1}]), "weight_versions must be a list of spans"),
        (line(weight_versions=[]), "weight_versions end at token 0, rollout_logprobs has 9 values"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_corrupt_line_is_left_out_and_named(damaged: bytes, sentence: str, tmp_path: Path):
    lines = JSON_LINES.splitlines(keepends=True)
    path = write_json_lines(tmp_path / "x.jsonl", b"".join([*lines[:2], damaged, *lines[2:]]))
    dump = open_dump(path)
    assert sum(chunk.num_sequences for chunk in dump.chunks()) == 6
    assert dump.corrupt.count == 1 and dump.corrupt.first[0].startswith(f"{path}, line 3: {sentence}")


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_a_long_line_is_refused_before_it_is_in_memory(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(json_lines, "MAX_LINE", 3 << 20)
    dump = open_dump(write_json_lines(tmp_path / f"x{suffix}", JSON_LINES + b" " * (64 << 20)))
    tracemalloc.start()
    assert sum(chunk.num_sequences for chunk in dump.chunks()) == 6
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()
    assert dump.corrupt.files == 1 and "has a line of more than 3 MiB" in dump.corrupt.first[0]


def changed_lines(source: str, path: Path, edit: Callable[[dict[str, Any]], Any], rows: slice = slice(None)) -> Path:
    """The lines of a host with a change of some, and the folder in which they are."""
    records = [json.loads(text) for text in (HOST_DUMPS / source).read_text().splitlines()]
    for record in records[rows]:
        edit(record)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path.parent


def test_a_rewards_list_that_dynamic_sampling_filtered_belongs_to_the_rows(tmp_path: Path):
    path = changed_lines(NEMO_RL, tmp_path / "train_data_step12.jsonl", lambda row: row.update(filtered_rewards=[9.0]))
    (chunk,) = open_dump(path).chunks()
    assert set(chunk.sequences["reward"]) == {9.0} and set(chunk.sequences["step"]) == {12}


def test_a_sample_that_nemo_rl_masks_out_has_no_loss_token(tmp_path: Path):
    path = changed_lines(NEMO_RL, tmp_path / "x.jsonl", lambda row: row.update(sample_loss_mask=[0.0]), slice(1, 2))
    assert diagnose_dump(path).evidence.sequences == 5


def test_nulls_in_place_of_log_probs_that_are_not_finite_are_damage(tmp_path: Path):
    def damage(row: dict[str, Any]) -> None:
        row["trainer_logprobs"][row["loss_mask"].index(True)] = None

    path = changed_lines(PRIME_RL, tmp_path / "x.jsonl", damage, slice(1))
    assert diagnose_dump(path).evidence.damaged == {"nan": 1}


def test_prime_rl_without_ids_and_weights_trains_every_token_of_the_mask(tmp_path: Path):
    path = changed_lines(PRIME_RL, tmp_path / "x.jsonl", lambda row: (row.pop("token_ids"), row.pop("rl_weights")))
    (chunk,) = open_dump(path).chunks()
    assert chunk.lengths.tolist() == [9, 11, 10] and "token_id" not in chunk.tokens


TRACES = HOST_DUMPS / "prime_rl_traces" / "traces"


def with_trace(folder: Path, nodes: list[dict[str, Any]], *branches: list[float | None]) -> Path:
    """The traces of the host and, where it has nodes, one more with what the trainer says of each branch."""
    shutil.copytree(TRACES, folder / "traces")
    said = [{"index": i, "trainer_logprobs": values} for i, values in enumerate(branches)]
    episode, annotation = {"traces": [{"id": "new", "nodes": nodes}]}, {"trace_id": "new", "branches": said}
    for name, record in (("stream/00000.jsonl", episode), ("annotations/orch/00000.jsonl", annotation)):
        path = folder / "traces" / name
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as opened:
            opened.write(json.dumps(record) + "\n" if nodes else "")
    return folder


@pytest.mark.parametrize(
    ("node", "sentence"),
    [
        ({"parent": 0}, "the parent of node 0 must come before it"),
        ({"parent": "x"}, "the parent of node 0 must come before it"),
        ({"mask": [True]}, "token_ids, mask and trainer_logprobs have 2, 1 and 2 values"),
        ({"token_ids": [1], "mask": [True]}, "token_ids, mask and trainer_logprobs have 1, 1 and 2 values"),
        ({"logprobs": [-1.0, -2.0]}, "logprobs has 2 values, mask says 1 sampled tokens"),
        ({"token_ids": ["<script>"]}, "token_ids must be a list of numbers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_damaged_trace_is_left_out_and_named(node: dict[str, Any], sentence: str, tmp_path: Path):
    nodes = [{"parent": None, "token_ids": [1, 2], "mask": [False, True], "logprobs": [-1.0], **node}]
    # a node that is its own parent has no leaf, so another one hangs on it
    nodes += [{"parent": 0, "token_ids": [], "mask": [], "logprobs": []}]
    dump = open_dump(with_trace(tmp_path, nodes, [None, -1.0]))
    assert sum(chunk.num_sequences for chunk in dump.chunks()) == 6
    assert dump.corrupt.count == 1 and f"line 7: {sentence}" in dump.corrupt.first[0]


def test_a_later_annotation_replaces_an_earlier_one(tmp_path: Path):
    record = json.loads((TRACES / "stream/00000.jsonl").read_text().splitlines()[0])
    size = sum(len(node["token_ids"]) for node in record["traces"][0]["nodes"])
    update = {"trace_id": "trace0", "branches": [{"index": 0, "trainer_logprobs": [-0.5] * size}]}
    path = with_trace(tmp_path, [])
    # producers are read in the order of their names
    (path / "traces/annotations/trainer/00001.jsonl").write_text(json.dumps(update) + "\n")
    (chunk,) = open_dump(path).chunks()
    assert set(chunk.log_pi[: chunk.lengths[0]]) == {-0.5} and "entropy" not in chunk.tokens


def test_a_sequence_that_the_trainer_cut_keeps_the_tokens_before_the_cut(tmp_path: Path):
    node = {"token_ids": [1, 2, 3, 4], "mask": [False, True, True, True], "logprobs": [-1.0, -2.0, -3.0]}
    dump = open_dump(with_trace(tmp_path, [node], [None, -1.5, -2.5]))
    (chunk,) = dump.chunks()
    last = chunk.select_sequences(chunk.sequence_of[chunk.cu_seqlens[:-1]] == 6)
    assert dump.corrupt.count == 0
    assert last.log_mu.tolist() == [-1, -2] and last.log_pi.tolist() == [-1.5, -2.5]
    assert last.tokens["token_id"].tolist() == [2, 3]


def test_advantages_of_another_length_are_damage(tmp_path: Path):
    update = {"trace_id": "trace0", "info": {"ship": {"step": "x"}}, "branches": [{"index": 0, "advantages": [1.0]}]}
    with_trace(tmp_path, [])
    (tmp_path / "traces/annotations/orchestrator/00001.jsonl").write_text(json.dumps(update) + "\n")
    dump = open_dump(tmp_path)
    (chunk,) = dump.chunks()
    assert chunk.num_sequences == 5 and set(chunk.sequences["step"]) == {3}
    assert dump.corrupt.count == 1 and "line 1: advantages has 1 values, token_ids has 14" in dump.corrupt.first[0]


def test_branches_share_their_first_messages(tmp_path: Path):
    prompt = {"parent": None, "token_ids": [1, 2], "mask": [False, False], "logprobs": []}
    leaves = [{"parent": 0, "token_ids": [3 + i], "mask": [True], "logprobs": [-1.0 - i]} for i in range(2)]
    (chunk,) = open_dump(with_trace(tmp_path, [prompt, *leaves], [None, None, -1.5], [None, None, -2.5])).chunks()
    last = chunk.select_sequences(chunk.sequence_of[chunk.cu_seqlens[:-1]] >= 6)
    assert last.log_mu.tolist() == [-1, -2] and last.log_pi.tolist() == [-1.5, -2.5]
    assert last.tokens["token_id"].tolist() == [3, 4]


def test_a_trace_stream_without_annotations_says_what_is_missing(tmp_path: Path):
    shutil.copy(TRACES / "stream/00000.jsonl", tmp_path / "x.jsonl")
    sentence = "no annotation of the trainer is there; give the folder traces as a whole or token_exports"
    refuses(sentence, list, open_dump(tmp_path).chunks())


@pytest.mark.parametrize("host", [host for host in HOSTS if host != "miles"])
def test_memory_is_bounded_by_chunks_not_by_files(host: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(row_packing, "CHUNK_TOKENS", 15)
    sizes = [chunk.log_pi.size for chunk in open_dump(HOST_DUMPS / host).chunks()]
    assert len(sizes) > 2 and max(sizes) < 15 + 11, "a chunk ends with the response that fills it"


def test_the_command_takes_a_format_and_says_what_it_left_out(tmp_path: Path):
    shutil.copytree(HOST_DUMPS / "slime", tmp_path / "slime")
    shutil.copytree(HOST_DUMPS / "miles", tmp_path / "miles")
    shutil.rmtree(tmp_path / "miles/rollout_data")
    cut = tmp_path / "slime/train_data/4.pt"
    cut.write_bytes((tmp_path / "slime/train_data/3.pt").read_bytes()[:-30])
    run = CliRunner().invoke(app, ["analyze", str(tmp_path), "--no-html"], env={"COLUMNS": "400"})
    assert run.exit_code == 0, run.output
    assert "Left out: 1 damaged files." in run.output
    assert "4 files of miles train data are not read" in run.output
    named = CliRunner().invoke(app, ["analyze", str(tmp_path), "--no-html", "--format", "miles", "--json"])
    numbers = json.loads(named.output)
    assert numbers["format"] == "miles train data" and numbers["unreadable_files"] == 0
    samples, other = numbers["ignored"]
    assert "eval_3.pt" in samples and other == "2 files of slime train data are not read, such as 3.pt"


def test_every_format_has_its_row_in_the_docs():
    text = (HOST_DUMPS.parents[3] / "docs/formats.md").read_text()
    assert re.findall(r"^\| `(\w[\w-]*)` \|", text, re.MULTILINE) == [*FORMATS]
