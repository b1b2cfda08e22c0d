"""A file of one large rollout is read with the same work per sample as a small one.

Work is counted in calls of functions, which no other process on the machine changes.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from host_batches import HOST_DUMPS, TRUTH

from megatron_rc.analyze.readers import open_dump, torch_pickle


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
