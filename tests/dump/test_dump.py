"""The dump: round trip, atomic files, its documentation, and replay from it."""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from refusals import refuses

from megatron_rc.batch import TokenBatch
from megatron_rc.dump.schema import NUMBERS, OPTIONAL, SAMPLING_KEY, SCHEMA, read_dump
from megatron_rc.dump.writer import COMPUTED, DumpWriter, sample_of
from megatron_rc.engine import RolloutEngine, Sample, SamplingParams
from megatron_rc.rollout.recorded import RecordedEngine

SAMPLING = SamplingParams(max_new_tokens=4, temperature=0.7, top_p=0.9, stop_token_ids=(9,))
ROUTES = {"routes", "routes_shape", "top_ids", "top_rollout_logprobs"}
"""Null unless they are asked for."""
PLACED = ("train_rank", "pack_position", "trainer_version")
SERVED = ("server", "syncs", "cached_tokens")
DOCUMENT = Path(__file__).parents[2] / "docs" / "dump.md"


def example_samples(shift: int = 0) -> list[Sample]:
    """Three unequal samples; the second is a two-turn one, the third was truncated across a weight update."""
    served: dict[str, Any] = {"server": "http://a:1", "syncs": 3, "cached_tokens": 2, "retractions": 1}
    third = float(torch.tensor(1 / 3, dtype=torch.float32))
    return [
        Sample([1, 2, 3 + shift], [4, 9], [-third, -0.25], "stop", [(7, 0, 2)], [[4, 5], [9]]),
        Sample([5], [6, 7, 9], [-1.5, 0.0, -2.0], "stop", [(7, 0, 3)], [[6], [7], [1, 9]], [True, False, True]),
        Sample(
            [2, 2], [1, 1, 1, 1], [-1.0, -2.0, -3.0, -4.0], "length", [(7, 0, 1), (8, 1, 4)], [[1, 2]] * 4, **served
        ),
    ]


def written(folder: Path, step: int = 1, seeds: Sequence[int] = (1, 2, 3), shift: int = 0) -> tuple[Path, list[Sample]]:
    """The file of `example_samples`, and those."""
    samples = example_samples(shift)
    return DumpWriter(folder).write(step, example_batch(samples), samples=samples, seeds=list(seeds)), samples


def example_batch(samples: list[Sample]) -> TokenBatch:
    batch = TokenBatch.from_samples(samples, SAMPLING, rewards=[1.0, 0.0, 0.5], groups=[0, 1, 1])
    batch.advantages = torch.tensor([0.5, -0.25, 0.125])
    return batch


def test_every_column_reads_back_as_it_was_given(tmp_path: Path) -> None:
    samples = example_samples()
    batch = example_batch(samples)
    rows = torch.arange(batch.num_tokens, dtype=torch.float32)
    numbers = [name for name in COMPUTED if SCHEMA.field(name).type == NUMBERS]
    computed = {name: rows + i for i, name in enumerate(numbers)}
    computed["top_old_logprobs"] = torch.stack([-rows, rows], 1)
    computed |= {"old_logprobs": -rows, "weights": rows / 64, "mask": rows.long() % 2 == 0}
    DumpWriter(tmp_path).write(
        12, batch, samples=samples, seeds=[11, 22, 33], computed=computed, trainer_version=8,
        placed={"train_rank": [1, 0, None], "pack_position": [2, 1, None]},
    )  # fmt: skip
    [records] = read_dump(tmp_path)
    # packed rows that predict the outputs, counted by hand: sequences of 5, 4 and 6 tokens
    expected_rows = [[2.0, 3.0], [5.0, 6.0, 7.0], [10.0, 11.0, 12.0, 13.0]]
    assert [r["old_logprobs"] for r in records] == [[-row for row in rows] for rows in expected_rows]
    assert [r["weights"] for r in records] == [[row / 64 for row in rows] for rows in expected_rows]
    assert [r["mask"] for r in records] == [[row % 2 == 0 for row in rows] for rows in expected_rows]
    for i, name in enumerate(numbers):
        if name not in ("old_logprobs", "weights"):
            assert [r[name] for r in records] == [[row + i for row in rows] for rows in expected_rows], name
    top = [[[-row, row] for row in rows] for rows in expected_rows]
    assert [r["top_old_logprobs"] for r in records] == top
    expected = {
        "turn": [[0, 0], [0, 0, 1], [0] * 4], "prompt_length": [3, 1, 2], "train_rank": [1, 0, None],
        "pack_position": [2, 1, None], "trainer_version": [8, 8, 8], "server": [None, None, "http://a:1"],
        "loss_mask": [[True, True], [True, False, True], [True] * 4], "step": [12, 12, 12], "sequence": [0, 1, 2],
        "seed": [11, 22, 33], "group": [0, 1, 1], "reward": [1.0, 0.0, 0.5], "advantage": [0.5, -0.25, 0.125],
    }  # fmt: skip
    assert {name: [r[name] for r in records] for name in expected} == expected
    assert [(r["syncs"], r["cached_tokens"], r["retractions"]) for r in records][1:] == [(None, None, 0), (3, 2, 1)]
    assert {(r["temperature"], r["top_p"], r["top_k"]) for r in records} == {(0.7, 0.9, -1)}
    assert records[2]["weight_versions"] == [{"version": 7, "start": 0, "end": 1}, {"version": 8, "start": 1, "end": 4}]
    assert [sample_of(r) for r in records] == samples


def test_columns_of_a_stage_that_was_not_reached_are_null(tmp_path: Path) -> None:
    sampling = SamplingParams(max_new_tokens=2)
    samples = [Sample([1], [2], [-0.5], "length", [(0, 0, 1)])]
    DumpWriter(tmp_path).write(0, TokenBatch.from_samples(samples, sampling), samples=samples, seeds=[1])
    [[record]] = read_dump(tmp_path)
    nulls = {name for name, value in record.items() if value is None}
    assert nulls == {"group", "advantage", "reward", "support", *COMPUTED, *PLACED, *SERVED} | ROUTES


def test_a_dump_without_the_optional_columns_reads_and_replays(tmp_path: Path) -> None:
    file, samples = written(tmp_path)
    pq.write_table(pq.read_table(file).drop_columns(sorted(OPTIONAL)), file)
    [records] = read_dump(tmp_path)
    assert set(records[0]) == set(SCHEMA.names) and all(records[2][name] is None for name in OPTIONAL)
    replayed = RecordedEngine(tmp_path).generate([samples[2].prompt_ids], SAMPLING, n=1, seeds=[3])
    forgotten = {"server": None, "syncs": None, "cached_tokens": None, "retractions": 0}
    assert replayed == [dataclasses.replace(samples[2], **forgotten)]


def test_routes_are_written_where_they_are_asked_for(tmp_path: Path) -> None:
    samples = example_samples()
    for sample in samples[:2]:
        rows = len(sample.prompt_ids) + len(sample.output_ids) - 1
        sample.routes = torch.arange(rows * 6, dtype=torch.int32).view(rows, 3, 2)
    batch = example_batch(samples)
    for step, wanted in enumerate([True, False]):
        DumpWriter(tmp_path).write(step, batch, samples=samples, seeds=[1, 2, 3], routes=wanted)
    written, without = ([sample_of(r).routes for r in records] for records in read_dump(tmp_path))
    for sample, ids in zip(samples[:2], written[:2], strict=True):
        assert ids is not None and ids.dtype == torch.int32 and torch.equal(ids, sample.routes)
    assert written[2] is None and without == [None] * 3


def test_sampling_settings_stand_in_the_schema_metadata(tmp_path: Path) -> None:
    file, _ = written(tmp_path)
    expected = dataclasses.asdict(SAMPLING) | {"stop_token_ids": [9]}
    assert json.loads(pq.read_schema(file).metadata[SAMPLING_KEY]) == expected


def test_a_crash_while_writing_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    real_write = pq.write_table

    def half_a_file(table: pa.Table, file: object, **options: object) -> None:
        real_write(table.slice(0, 1), file, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(pq, "write_table", half_a_file)
    for step in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            written(tmp_path, step, (4, 5, 6))
    assert [[r["seed"] for r in step] for step in read_dump(tmp_path)] == [[1, 2, 3]]


def test_writing_a_step_again_replaces_it_and_steps_read_in_order(tmp_path: Path) -> None:
    for step, seeds in ((1_000_000, [7, 8, 9]), (999_999, [4, 5, 6]), (3, [1, 2, 3]), (999_999, [14, 15, 16])):
        written(tmp_path, step, seeds)
    steps = list(read_dump(tmp_path))
    assert [records[0]["step"] for records in steps] == [3, 999_999, 1_000_000]
    assert [r["seed"] for r in steps[1]] == [14, 15, 16]


def test_a_wrong_schema_names_the_file_and_the_column(tmp_path: Path) -> None:
    file, _ = written(tmp_path)
    table = pq.read_table(file)
    pq.write_table(table.drop_columns(["reward"]), file)
    refuses(r"step-000001\.parquet: column 'reward' is missing", list, read_dump(tmp_path))
    place = table.schema.get_field_index("seed")
    pq.write_table(table.set_column(place, "seed", table["seed"].cast(pa.float64())), file)
    refuses(r"step-000001\.parquet: column 'seed' must be of type int64, got double", list, read_dump(tmp_path))
    file.write_bytes(b"PAR1 cut short")
    refuses(r"step-000001\.parquet is not a whole Parquet file", list, read_dump(tmp_path))
    refuses("nothing_here holds no dump", list, read_dump(tmp_path / "nothing_here"))


def test_documented_columns_are_the_columns_of_the_schema() -> None:
    documented = re.findall(r"^\| `(\w+)` \| `([^|]+)` \|", DOCUMENT.read_text(), flags=re.MULTILINE)
    assert documented == [(field.name, str(field.type)) for field in SCHEMA]


def test_snippets_in_docs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    written(tmp_path / "runs/run/dump", 4)
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    assert len(snippets) == 2
    # pandas is not among the requirements
    exec(snippets[0].replace("frame = table.to_pandas()", ""), {})
    exec(snippets[1], {})
    assert capsys.readouterr().out.endswith("4 0.5\n")


def recorded_run(folder: Path) -> dict[int, list[Sample]]:
    return {step: written(folder, step, range(100 * step, 100 * step + 3), step - 1)[1] for step in (1, 2)}


def test_replay_returns_the_recorded_samples_by_seed(tmp_path: Path) -> None:
    steps = recorded_run(tmp_path)
    engine = RecordedEngine(tmp_path)
    assert isinstance(engine, RolloutEngine)
    engine.update_weights(iter([("w", torch.zeros(1))]), 5)
    assert engine.weight_version == 5
    finished: list[int] = []
    for step in (2, 1):
        samples = steps[step]
        prompts = [samples[2].prompt_ids, samples[0].prompt_ids]
        seeds = [100 * step + 2, 100 * step]
        replayed = engine.generate(prompts, SAMPLING, n=1, seeds=seeds, on_finished=finished.append)
        assert replayed == [samples[2], samples[0]]
    assert finished == [2, 2]


def test_replay_reads_the_whole_export_so_that_gathers_stay_in_step(tmp_path: Path) -> None:
    recorded_run(tmp_path)
    read = []
    RecordedEngine(tmp_path).update_weights(((name, read.append(name)) for name in "abc"), 1)  # type: ignore[misc,func-returns-value]
    assert read == ["a", "b", "c"]


def test_replay_refuses_another_prompt_seed_or_sampling(tmp_path: Path) -> None:
    samples = recorded_run(tmp_path)[1]
    engine = RecordedEngine(tmp_path)
    prompts = [s.prompt_ids for s in samples]
    with pytest.raises(ValueError, match=r"step 1: prompt 1 of this call differs .* seed 101 from token 0 on"):
        engine.generate([prompts[0], [8], [8]], SAMPLING, n=1, seeds=[100, 101, 102])
    with pytest.raises(ValueError, match=r"prompt 0 .* from token 3 on \(4 tokens, recorded 3\)"):
        engine.generate([[*prompts[0], 1]], SAMPLING, n=1, seeds=[100])
    with pytest.raises(ValueError, match=r"holds no response with seed 999 \(prompt 2"):
        engine.generate(prompts, SAMPLING, n=1, seeds=[100, 101, 999])
    with pytest.raises(ValueError, match=r"step 1: temperature is 1.0, but the dump was sampled with 0.7"):
        engine.generate(prompts, SamplingParams(top_p=0.9), n=1, seeds=[100, 101, 102])
    with pytest.raises(ValueError, match=r"seeds must hold one seed per response \(3 x 2\), got 3"):
        engine.generate(prompts, SAMPLING, n=2, seeds=[100, 101, 102])


def test_replay_refuses_a_dump_whose_seeds_are_not_unique(tmp_path: Path) -> None:
    for step in (1, 2):
        written(tmp_path, step, (1, 2, step + 2))
    refuses(r"step-000002\.parquet: seed 1 is also recorded in .*step-000001\.parquet", RecordedEngine, tmp_path)
