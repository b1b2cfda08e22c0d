"""The run at learning rate 0: the verdict on a course of gaps, and a real server whose syncs change nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from doctor_facts import server as recorded
from sglang_server import shared_server
from typer.testing import CliRunner

from megatron_rc.cli import app
from megatron_rc.doctor.registry import Finding
from megatron_rc.doctor.server import scores
from megatron_rc.doctor.server.examine import examine_servers
from megatron_rc.doctor.server.facts import TrainerFacts
from megatron_rc.doctor.server.syncs import SYNCS, Course, examine_syncs


def verdict(noises: Sequence[float]) -> Finding:
    """The finding about a course with log-ratios of these standard deviations."""
    random = np.random.default_rng(5)
    return SYNCS["same-weights"].run(Course("tensor", [random.normal(0, noise, 1024) for noise in noises]))


def test_a_flat_gap_is_fine_and_the_course_is_printed() -> None:
    found = verdict([0.01] * 21)
    assert found.status == "good" and found.found.count("e-05") == 21 and "20 of the same weights" in found.found


def test_a_gap_that_grows_at_a_learning_rate_of_0_is_state_of_the_engine() -> None:
    found = verdict([0.01, *np.linspace(0.01, 0.4, 20)])
    assert found.status == "error" and "grows although the weights do not change" in found.found
    assert "Restart the server" in found.fix
    assert verdict([0.01, *np.linspace(0.01, 0.12, 20)]).status == "warning"
    assert verdict([0.01, *np.linspace(0.01, 0.03, 20)]).status == "good", "too small to matter"


def test_a_gap_that_begins_with_the_first_sync_is_the_way_of_the_weights() -> None:
    found = verdict([0.01, *[0.4] * 20])
    assert found.status == "error" and "first sync brings weights that are not the trainer's" in found.found
    assert verdict([0.1] * 21).status == "warning"
    assert verdict([0.01, float("nan")]).status == "error"


def test_noise_around_a_level_is_not_growth() -> None:
    rises = [
        Course("tensor", [random.normal(0, 0.1, 1024) for _ in range(9)]).rise()
        for random in map(np.random.default_rng, range(200))
    ]
    z = np.array([rise / error for rise, error in rises])
    assert abs(z.mean()) < 0.25 and 0.8 < z.std() < 1.25


def test_a_server_that_cannot_be_probed_gets_no_weights() -> None:
    facts = replace(recorded("good_moe"), is_paused=True)
    model: Any = SimpleNamespace(vocab_size=37, rescore=None)
    (found,) = examine_syncs(facts, TrainerFacts(), model, 3, 1)
    assert (found.check, found.status, found.decided) == ("same-weights", "note", False) and "paused" in found.found


def test_syncs_need_the_probes() -> None:
    with pytest.raises(ValueError, match="--syncs is a part of --probe"):
        examine_servers(["http://127.0.0.1:1"], None, None, 1, syncs=2)


@pytest.mark.parametrize("transport", ["tensor", pytest.param("disk", marks=pytest.mark.full)])
def test_syncs_of_the_same_weights_change_nothing_on_a_real_server(
    transport: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "RESPONSE_TOKENS", 16)
    with shared_server("dense", tmp_path_factory) as server:
        job = tmp_path / "job.yaml"
        job.write_text(
            f"model: {{hf_path: {server.model}}}\n"
            f"rollout: {{engine: sglang, sglang: {{urls: [{server.url}], weight_sync: {transport}}}}}\n"
        )
        before = server.call("/weights_checker", {"action": "checksum"})[1], server.call("/model_info")[1]
        said = CliRunner().invoke(app, ["doctor", "--config", str(job), "--probe", "--syncs", "2", "--json"])
        after = server.call("/weights_checker", {"action": "checksum"})[1], server.call("/model_info")[1]
    (findings,) = json.loads(said.stdout).values()
    found = next(f for f in findings if f["check"] == "same-weights")
    assert found["status"] == "good" and f"({transport})" in found["found"], found
    assert after[0] == before[0] and after[1]["weight_version"] == before[1]["weight_version"]
