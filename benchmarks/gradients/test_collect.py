"""Gradients at a checkpoint of a real run: its rollouts, its weights, and an exact gradient without a gap."""

import multiprocessing as mp
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from jobs import DENSE, TASK, finished_job, settings_file

pytestmark = pytest.mark.full

JOB: dict[str, Any] = {
    "model": {"config": DENSE},
    "task": TASK,
    "warmup": {"steps": 30, "lr": 5e-3, "batch_size": 64},
    "rollout": {"dtype": "fp32", "lag": 2, "prompts_per_step": 4, "samples_per_prompt": 8, "max_new_tokens": 6},
    "train": {"steps": 4, "lr": 3e-3, "save_interval": 4, "save_hf": False, "eval_interval": 100},
}


def at_the_checkpoint(folder: str) -> None:
    from gradients.collect import ESTIMATORS, opened
    from megatron_rc.settings import job as settings

    run, out = Path(folder), dict[str, Any]()
    loaded = settings.load(run / "settings.yaml")
    with opened(loaded, run / "checkpoints/rl-000004", run / "scratch") as bench:
        stale, younger = bench.rollout_batch(0, None), bench.rollout_batch(0, 1)
        out["rollouts of the run"] = bool(torch.equal(stale.tokens, bench.rollout_batch(0, 2).tokens))
        out["versions"] = [sorted(set(b.weight_versions[b.loss_mask].tolist())) for b in (stale, younger)]
        before = [p.detach().clone() for module in bench.policy.modules for p in module.parameters()]
        out["k3"] = [bench.gradient(b, ESTIMATORS["none"])[1]["old/k3"] for b in (bench.exact_batch(0, 0), stale)]
        gradient = bench.exact_gradient(0, [0])
        out["slope"] = bench.slopes(gradient, 1e-3, [0]).tolist()
        unit = gradient / gradient.norm()
        with bench.policy.moved(1e-3 * unit):
            forward = bench.exact_gradient(0, [-2])
        with bench.policy.moved(-1e-3 * unit):
            backward = bench.exact_gradient(0, [-2])
        out["difference"] = [float((forward - backward) @ unit) / 2e-3]
        after = [p.detach() for module in bench.policy.modules for p in module.parameters()]
        out["weights stay"] = all(map(torch.equal, before, after))
        # equal weights on both sides: every correction that drops nothing then estimates the same
        batch = bench.exact_batch(1, 0)
        names = ("none", "none, old: rollout", "sequence IS", "token-tis", "seq-mis")
        out["alike"] = [bench.gradient(batch, ESTIMATORS[name])[0] for name in names]
        groups = [batch.select(range(8 * i, 8 * i + 8)) for i in range(4)]
        found = [bench.gradient(group, ESTIMATORS["none"]) for group in groups]
        out["groups"] = torch.stack([gradient for gradient, _ in found])
        out["equal rewards"] = [metrics["groups/equal_reward"] for _, metrics in found]
    torch.save(out, run / "measured")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("gradients")
    finished_job(settings_file(folder / "job", JOB), "--set", f"output={folder / 'run'}")
    forked.start_server()
    process = mp.get_context(forked.METHOD).Process(target=at_the_checkpoint, args=(str(folder / "run"),))
    process.start()
    process.join()
    assert process.exitcode == 0
    return torch.load(folder / "run/measured", weights_only=False)


def test_rollouts_at_a_checkpoint_are_those_of_the_weights_that_the_run_serves(measured: dict[str, Any]) -> None:
    assert measured["rollouts of the run"] and measured["versions"] == [[2], [3]]
    exact, stale = measured["k3"]
    assert exact < 1e-9 < 1e-5 < stale


def test_the_curvature_is_a_difference_of_exact_gradients_and_leaves_the_weights(measured: dict[str, Any]) -> None:
    assert measured["slope"] == pytest.approx(measured["difference"], rel=1e-3)
    assert measured["weights stay"]


def test_estimators_agree_where_there_is_no_gap(measured: dict[str, Any]) -> None:
    first, *others = measured["alike"]
    assert first.norm() > 1e-2
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-3, atol=1e-5)


def test_a_group_of_equal_rewards_counts_as_a_gradient_of_zero(measured: dict[str, Any]) -> None:
    assert set(measured["equal rewards"]) == {0.0, 1.0}, "groups of both kinds are needed"
    torch.testing.assert_close(measured["alike"][0], measured["groups"].mean(0), rtol=1e-3, atol=1e-5)
