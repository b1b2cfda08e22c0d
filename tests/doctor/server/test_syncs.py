"""The run at learning rate 0: the verdict on a course of gaps, and a real server whose syncs change nothing."""

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
from megatron_rc.doctor.server import scores
from megatron_rc.doctor.server.examine import examine_servers
from megatron_rc.doctor.server.facts import TrainerFacts
from megatron_rc.doctor.server.syncs import SYNCS, Course, examine_syncs


def after(first: float, *others: float) -> list[float]:
    """The first gap, and 20 syncs with gaps that grow evenly from the second to the last."""
    return [first, *np.linspace(others[0], others[-1], 20)]


@pytest.mark.parametrize(
    ("noises", "status", "sentence"),
    [
        ([0.01] * 21, "good", "20 of the same weights"),
        (after(0.01, 0.01, 0.4), "error", "grows although the weights do not change"),
        (after(0.01, 0.01, 0.12), "warning", ""),
        (after(0.01, 0.01, 0.03), "good", ""),  # too small to matter
        (after(0.01, 0.4), "error", "first sync brings weights that are not the trainer's"),
        ([0.1] * 21, "warning", ""),
        ([0.01, float("nan")], "error", ""),
    ],
    ids=["flat", "grows", "grows a little", "grows by nothing", "begins with the first sync", "large", "no number"],
)
def test_a_course_of_gaps_is_judged_by_its_growth_and_by_its_first_sync(
    noises: Sequence[float], status: str, sentence: str
) -> None:
    random = np.random.default_rng(5)
    found = SYNCS["same-weights"].run(Course("tensor", [random.normal(0, noise, 1024) for noise in noises]))
    assert found.status == status and sentence in found.found
    assert status != "good" or found.found.count("e-0") >= 21, "the course is printed"
    assert "grows" not in sentence or "Restart the server" in found.fix


def test_noise_around_a_level_is_not_growth() -> None:
    rises = [
        Course("tensor", [random.normal(0, 0.1, 1024) for _ in range(9)]).rise()
        for random in map(np.random.default_rng, range(200))
    ]
    z = np.array([rise / error for rise, error in rises])
    assert abs(z.mean()) < 0.25 and 0.8 < z.std() < 1.25


def test_a_server_that_cannot_be_probed_gets_no_weights() -> None:
    model: Any = SimpleNamespace(vocab_size=37, rescore=None)
    (found,) = examine_syncs(replace(recorded("good_moe"), is_paused=True), TrainerFacts(), model, 3, 1)
    assert (found.check, found.status, found.decided) == ("same-weights", "note", False) and "paused" in found.found


def test_syncs_need_the_probes_and_all_of_them_a_server() -> None:
    with pytest.raises(ValueError, match="--syncs is a part of --probe"):
        examine_servers(["http://127.0.0.1:1"], None, None, 1, syncs=2)
    with pytest.raises(ValueError, match="give the servers to look at with --sglang URL"):
        examine_servers([], None, None, 1)


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
