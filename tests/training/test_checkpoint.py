"""A checkpoint brings weights and moments back, and no setting of the optimizer that wrote it."""

from pathlib import Path
from typing import Any

from distributed import run_ranks
from tiny_models import DENSE

from megatron_rc.settings.model import ModelSettings, ParallelSettings
from megatron_rc.settings.train import TrainSettings
from megatron_rc.training import checkpoint, groups
from megatron_rc.training.policy import Policy
from megatron_rc.training.progress import Progress

OTHER: dict[str, Any] = {"adam_beta1": 0.5, "adam_beta2": 0.7, "adam_eps": 1e-3, "weight_decay": 0.2}


def loaded(rank: int, folder: str) -> dict[str, Any]:
    place = groups.initialize(ParallelSettings(), 1)

    def policy(**settings: Any) -> Policy:
        made = Policy(ModelSettings(config=DENSE), ParallelSettings(), TrainSettings(**settings), place)
        made.start_phase(lr=made.train.lr, min_lr=0.0, warmup_steps=0, total_steps=10, decay_style="constant")
        return made

    writer = policy(lr=1e-3)
    writer.optimizer.step()  # an optimizer without an update has no state
    writer.phase_updates = 1
    checkpoint.save(Path(folder), writer, Progress("rl", 2), extra={}, keep=1)
    other = policy(lr=1e-4, **OTHER)
    checkpoint.load(Path(folder, "rl-000002"), other)
    return {
        name: {group[name] for group in other.optimizer.param_groups} for name in ("lr", "betas", "eps", "weight_decay")
    }


def test_the_settings_of_the_optimizer_are_those_of_the_job_that_loads_a_checkpoint(tmp_path: Path) -> None:
    (found,) = run_ranks(1, loaded, str(tmp_path))
    assert found["lr"] == {1e-4} and found["betas"] == {(0.5, 0.7)} and found["eps"] == {1e-3}
    # norms and biases have no weight decay
    assert max(found["weight_decay"]) == 0.2
