"""hidden_states of GPTModels of other releases of megatron-core, with and without multi-token prediction."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from core_wheels import WHEELS, printed_by, unpacked_wheels


@pytest.fixture(scope="module")
def unpacked() -> Iterator[dict[str, Path]]:
    with unpacked_wheels() as folders:
        yield folders


@pytest.mark.full
@pytest.mark.parametrize("version", WHEELS or ["none"])
def test_other_releases_have_the_log_probs_and_gradients_of_logits(unpacked: dict[str, Path], version: str) -> None:
    found = json.loads(printed_by("hidden_states_job.py", unpacked[version]).splitlines()[-1])
    assert found.pop("version") == version
    if version.startswith("0.17."):
        assert found.pop("refused").startswith("mtp_num_layers must be None with a megatron-core whose GPTModel takes")
    assert found.keys() >= {"dense", "tied"} and len(found) == 2 + (not version.startswith("0.17."))
    for case in found.values():
        assert case["width"] == 32 and case["of"] >= 14
        assert case["logprobs"] <= 1e-6 and case["gradients"] <= 1e-6
