"""Weights, losses and learning rates against verl's own functions: recorded, of VERL_DIR, or of an installed verl."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hosts.verl import cases, sources

from megatron_rc.integrations.symbols import inspect_symbols
from megatron_rc.integrations.verl import HOST, driver
from megatron_rc.integrations.verl.driver import settings_of_verl
from megatron_rc.integrations.verl.settings import prepare

GOLDEN = json.loads((sources.HERE / "golden.json").read_text())
MISSING = sources.missing()
absent = pytest.mark.skipif(bool(MISSING), reason=f"verl's trainer cannot be imported without {' and '.join(MISSING)}")
either = pytest.mark.parametrize("source", ["recorded", pytest.param("verl", marks=[absent, pytest.mark.timeout(900)])])
BOTH = "token-tis and seq_mean_k3"


def real(test: Any) -> Any:
    """A test that takes as long as verl takes to be imported."""
    return absent(pytest.mark.timeout(900)(test))


def answers(source: str, job: str) -> dict[str, Any]:
    return GOLDEN[job] if source == "recorded" else sources.job(job)


def corrected(name: str, batch: cases.Rollout) -> tuple[torch.Tensor, dict[str, float]]:
    """Weights, with 0 at rejected tokens, and metrics of the trainer process."""
    state = prepare(cases.correction(name), None)
    fields = {"old_log_probs": batch.old, "rollout_log_probs": batch.rollout, "response_mask": batch.mask}
    data, metrics = driver.correct_rollout(
        lambda batch, settings: (batch, {}), state, SimpleNamespace(batch=fields), {}
    )
    return data.batch["rollout_is_weights"], metrics


@pytest.mark.host("verl", proof="own code", feature="symbols where they are expected")
def test_the_tree_has_every_symbol_as_it_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    if not os.environ.get("VERL_DIR"):
        pytest.skip("VERL_DIR names no source tree of verl")
    monkeypatch.syspath_prepend(os.environ["VERL_DIR"])
    assert [found.problem for found in inspect_symbols(HOST)] == [None] * len(HOST.symbols)


@pytest.mark.host("verl", proof="own code", feature="loss and gradient of a correction")
@pytest.mark.host("verl", proof="recorded", feature="loss and gradient of a correction")
@either
@pytest.mark.parametrize("name", cases.CASES)
def test_weights_kept_tokens_and_metrics_are_those_of_verl(source: str, name: str) -> None:
    table = {key: each for key, each in answers(source, "table").items() if key.startswith(f"{name}, ")}
    assert len(table) == (2 if source == "recorded" else 5)
    for key, theirs in table.items():
        weights, metrics = corrected(name, cases.rollout(int(key.rpartition(" ")[2])))
        expected = torch.tensor(theirs["weights"])
        torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-7)
        assert ((weights > 0) == (expected > 0)).all()
        assert len(theirs["metrics"]) >= 10
        for metric, value in theirs["metrics"].items():
            assert metrics[metric] == pytest.approx(value, rel=1e-5, abs=1e-6), metric


@pytest.mark.parametrize("name", cases.CASES)
def test_verl_is_asked_to_log_its_own_panels_for_the_same_correction(name: str) -> None:
    wanted = cases.CASES[name].verl
    wanted = {"rollout_is_batch_normalize": False, **wanted} if "rollout_is" in wanted else wanted
    asked = settings_of_verl(cases.correction(name))
    assert {key: str(value) for key, value in asked.items()} == {key: str(value) for key, value in wanted.items()}


@real
@pytest.mark.parametrize("name", cases.CASES)
def test_no_panel_of_verl_is_lost_or_differs(name: str) -> None:
    found = sources.job("panels")[name]
    assert len(found["theirs"]) >= 12 and "rollout_corr/ppl_ratio" in found["theirs"]
    for panel, value in found["theirs"].items():
        assert found["ours"][panel] == pytest.approx(value, rel=1e-5, abs=1e-6), panel


@either
@pytest.mark.parametrize(("denominator", "host"), [("original", "V1 own"), ("kept", "V0 own")])
def test_each_trainer_of_verl_has_one_denominator_and_we_have_both(source: str, denominator: str, host: str) -> None:
    batch = cases.rollout(1)
    weights, _ = corrected(BOTH, batch)
    counted = int((batch.mask if denominator == "original" else weights > 0).sum())
    theirs = answers(source, "updates")[host]
    loss, gradient = cases.loss_by_hand(batch, weights, counted)
    assert theirs["counted"] == counted and theirs["loss"] == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(torch.tensor(theirs["gradient"]).double(), gradient, rtol=1e-5, atol=1e-8)


@real
@pytest.mark.parametrize("denominator", ["original", "kept"])
def test_v0_and_v1_have_the_same_loss_however_it_is_cut_and_whichever_loss_mode_weighs(denominator: str) -> None:
    batch = cases.rollout(1)
    weights, expected = corrected(BOTH, batch)
    counted = int((batch.mask if denominator == "original" else weights > 0).sum())
    loss, gradient = cases.loss_by_hand(batch, weights, counted)
    for version in ("V0", "V1"):
        for mode in ("vanilla", "megatron_rc"):
            for cut in (1, 2, 6):
                answer = sources.job("updates")[f"{version} {denominator} {mode} {cut}"]
                assert answer["counted"] == counted and answer["loss"] == pytest.approx(loss, rel=1e-6)
                torch.testing.assert_close(torch.tensor(answer["gradient"]).double(), gradient, rtol=1e-5, atol=1e-8)
                assert answer["metrics"]["rollout_corr/kl"] == pytest.approx(expected["rollout_corr/kl"])


@real
@pytest.mark.parametrize("name", ["ppo", "ppo with a gate", "reinforce"])
def test_the_bypass_of_verl_is_corrected_in_its_own_loss_function_however_it_is_cut(name: str) -> None:
    batch = cases.rollout(2)
    now = batch._replace(old=batch.current)
    weights = batch.mask.float()
    if name != "ppo":
        weights, _ = corrected({"ppo with a gate": "seq_mean_k3", "reinforce": "token-tis"}[name], now)
    loss, gradient = cases.loss_by_hand(batch, weights, int(batch.mask.sum()), batch.rollout)
    if name == "reinforce":
        gradient = -(weights * batch.advantages).double() / int(batch.mask.sum())
        loss = float((gradient * batch.current).sum())
    metrics = [sources.job("bypass")[f"{name} {cut}"]["metrics"] for cut in (1, 2, 6)]
    for cut in (1, 2, 6):
        answer = sources.job("bypass")[f"{name} {cut}"]
        assert answer["loss"] == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(torch.tensor(answer["gradient"]).double(), gradient, rtol=1e-5, atol=1e-8)
        assert answer["metrics"] == pytest.approx(metrics[0], rel=1e-6)


@real
@pytest.mark.parametrize("corrupt", ["rollout", "old"])
def test_a_nan_makes_the_loss_of_verl_nan_and_leaves_ours_finite(corrupt: str) -> None:
    theirs, ours = (sources.job("corrupt")[f"{corrupt} {whose}"] for whose in ("verl", "ours"))
    assert theirs["loss"] != theirs["loss"]
    batch = cases.rollout(3, rows=24)
    weights, _ = corrected("token-tis", batch)
    weights[4, 0] = 0
    loss, gradient = cases.loss_by_hand(batch, weights, int(batch.mask.sum()))
    assert ours["loss"] == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(torch.tensor(ours["gradient"]).double(), gradient, rtol=1e-5, atol=1e-8)


@pytest.mark.host("verl", proof="own code", feature="its own program trains on CPU, with our metrics and decay")
@real
def test_the_training_worker_of_verl_decays_once_per_update_and_resumes_where_it_stopped() -> None:
    answer = sources.job("scheduler")
    assert answer["first"] + answer["second"] == answer["whole"]
    assert answer["metrics"][3:] == answer["resumed"]
    # two mini-batches per update; verl's own decay is linear to 0 in 100 updates
    halvings = [1, 0.5, 0.5, 0.25, 0.25, 0.125]
    expected = [1e-3 * (1 - step / 100) * scale for step, scale in enumerate(halvings) for _ in range(2)]
    assert answer["whole"] == pytest.approx(expected)
    assert [each["actor/lr_rule/scale"] for each in answer["metrics"]] == halvings
    assert answer["own"] == [1e-3, 1e-3]
    assert set(answer["state"]) - set(answer["own_state"]) == {"megatron_rc_lr_rule"}


@real
def test_the_configuration_of_verl_is_accepted_as_it_comes_and_refused_beside_its_own_correction() -> None:
    refusals = list(sources.job("configurations").values())
    assert refusals[:3] == ["", "", ""]
    own = [f"algorithm.rollout_correction.{name}" for name in ("bypass_mode", "bypass_mode", "rollout_is")]
    assert [refusal.split(" ")[0] for refusal in refusals[3:]] == [*own, "lr_rule"]


@real
def test_the_entry_point_reaches_the_main_program_of_verl_which_refuses_two_corrections(tmp_path: Path) -> None:
    metadata = tmp_path / "plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[verl.plugins]\nours = megatron_rc.integrations.verl.plugin\n")
    environment = sources.environment(MEGATRON_RC_CONFIG="{correction: token-tis}", VERL_USE_EXTERNAL_MODULES="")
    environment["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    override = "algorithm.rollout_correction.rollout_is=token"
    command = [sys.executable, "-W", "ignore", "-m", "verl.trainer.main_ppo", override, f"hydra.run.dir={tmp_path}"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "algorithm.rollout_correction.rollout_is must be null next to the correction of MEGATRON" in done.stderr


RAY = """
import ray
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

ray.init(runtime_env=get_ppo_ray_runtime_env(), num_cpus=1, include_dashboard=False)


@ray.remote
def loss():
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    return get_policy_loss_fn("megatron_rc").__module__


print("ANSWER", ray.get(loss.remote()))
"""


@real
def test_a_ray_process_is_patched_by_what_the_main_process_hands_on() -> None:
    environment = sources.environment(MEGATRON_RC_CONFIG="{correction: token-tis}")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", RAY], env=environment, capture_output=True, text=True)
    module = done.stdout.rpartition("ANSWER ")[2].strip()
    assert module == "megatron_rc.integrations.verl.policy_loss", done.stderr[-4000:]
