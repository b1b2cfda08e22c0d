"""What slime and miles knew of a sample before training is joined with their train data, or a sentence says why not."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from host_batches import HOST_DUMPS, TRUTH, whole
from typer.testing import CliRunner

from megatron_rc.analyze import diagnose_dump
from megatron_rc.analyze.chunk import join
from megatron_rc.analyze.readers import open_dump
from megatron_rc.cli import app

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
