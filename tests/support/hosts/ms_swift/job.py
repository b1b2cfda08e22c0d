"""The loss of ms-swift's own MegatronGRPOTrainer, before and under a patch; prints its answers as JSON.

    MS_SWIFT_PYTHON tests/support/hosts/ms_swift/job.py       # a Python with ms-swift 4.6 and megatron-core

The package mcore_bridge wants a GPU, and makes models alone, so an empty one stands in for it.
"""

import importlib
import json
import sys
import types
from types import SimpleNamespace
from typing import Any

import torch
from hosts.absent import Absent

BATCH, LENGTH = 4, 7


class Classes(types.ModuleType):
    """A module that has a class for every name: what it lacks may be a base class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def batch(corrupt: bool = False) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    rollout = -2 * torch.rand(BATCH, LENGTH, generator=made)
    old = rollout + torch.randn(BATCH, LENGTH, generator=made)
    # within the clip, so that tokens beyond the bounds have a gradient
    current = old + 0.05 * torch.randn(BATCH, LENGTH, generator=made)
    # the geometric mean of this sequence is beyond 2
    rollout[2] -= 1.5
    mask = torch.arange(LENGTH) < torch.tensor([[7], [5], [3], [6]])
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])[:, None].expand(BATCH, LENGTH)
    if corrupt:
        rollout[0, 1] = torch.nan
    policies = {"old": old.clamp(max=0), "rollout": rollout, "current": current.clamp(max=0)}
    return {**policies, "mask": mask, "advantages": advantages}


def trainer(module: Any, mode: str | None, loss_type: str = "grpo") -> Any:
    """A trainer as its own constructor leaves it, as far as the loss reads it."""
    args = SimpleNamespace(overlong_filter=False, delta=None, loss_type=loss_type, report_to=(), async_generate=False)
    args.rollout_importance_sampling_mode = mode
    made = object.__new__(module.MegatronGRPOTrainer)
    made.__dict__.update(
        args=args, micro_batch_size=BATCH, rollout_importance_sampling_mode=mode, loss_type=loss_type, beta=0.0,
        rollout_importance_sampling_threshold=2.0, log_rollout_offpolicy_metrics=mode is not None, kl_in_reward=False,
        disable_rollout_importance_sampling=False, importance_sampling_level="token", epsilon_low=0.2,
        epsilon_high=0.28, compute_entropy=False, log_entropy=False, _has_teacher=False, _step=2,
        off_policy_sequence_mask_delta=None,
        max_completion_length=LENGTH, unwrapped_models=[SimpleNamespace(training=True)], steps_per_generation=4,
        _metrics={"train": module.defaultdict(list)}, _all_reduce_metric=lambda metric: metric,
    )  # fmt: skip
    return made


def loss_of(module: Any, made: Any, corrupt: bool = False, arrived: bool = True) -> dict[str, Any]:
    given = batch(corrupt)
    current = given["current"].clone().requires_grad_()
    grpo = SimpleNamespace(
        advantages=given["advantages"], completion_mask=given["mask"], truncated_mask=torch.zeros(BATCH, dtype=bool),
        ref_per_token_logps=None, old_per_token_logps=given["old"], num_items_in_batch=given["mask"].sum(),
        rollout_per_token_logps=given["rollout"] if arrived else None,
    )  # fmt: skip
    loss, metrics = module.MegatronGRPOTrainer.loss_func(made, current, {"grpo_batch": grpo})
    loss.backward()
    shown = {name.removeprefix("rollout_correction/"): float(value) for name, value in metrics.items()}
    return {"loss": loss.item(), "gradient": current.grad.flatten().tolist(), "metrics": shown}


def answers() -> dict[str, Any]:
    sys.meta_path.insert(0, Absent({"mcore_bridge"}, Classes))
    module = importlib.import_module("swift.megatron.trainers.grpo_trainer")
    mixin = importlib.import_module("swift.megatron.trainers.rollout_mixin").MegatronRolloutMixin
    # it starts a server; what the trainer's own method adds to it runs
    mixin._init_rollout_engine = lambda self: setattr(self, "vllm_version_ge_0_10_2", True)
    module.MegatronGRPOTrainer._resolve_use_gym_env = lambda self: False
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    from megatron_rc import RolloutCorrection, patch

    own = {mode: loss_of(module, trainer(module, mode)) for mode in (None, *MODES)}
    out: dict[str, Any] = {"own": {str(mode): answer for mode, answer in own.items()}, "patched": {}, "refused": {}}
    for name, correction in CORRECTIONS.items():
        with patch("ms-swift", correction=RolloutCorrection.from_dict(correction)) as patched:
            made = trainer(module, None)
            made._init_rollout_engine()
            out["patched"][name] = loss_of(module, made)
            out["patched"][f"{name}, corrupt"] = loss_of(module, made, corrupt=True)
            report = patched.report()
            try:
                loss_of(module, made, arrived=False)
            except ValueError as error:
                out["refused"][f"{name} without"] = str(error)
    for mode, loss_type in (("token_mask", "grpo"), (None, "real")):
        with patch("ms-swift", correction="token-tis"):
            made = trainer(module, mode, loss_type)
            try:
                made._init_rollout_engine()
            except ValueError as error:
                out["refused"][f"{mode} {loss_type}"] = str(error)
    again = loss_of(module, trainer(module, "token_truncate"))
    return out | {"report": report, "undone": again == own["token_truncate"]}


MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
_GATE = {"statistic": "ratio", "level": "sequence", "reduce": "mean", "upper": 2.0}
CORRECTIONS: dict[str, Any] = {
    "none": "none",
    "token_truncate": "token-tis",
    "token_mask": "token-mis",
    "sequence_truncate": {"weight": {"level": "geometric", "mode": "truncate", "upper": 2.0}},
    "sequence_mask": {"weight": {"level": "token", "mode": "truncate", "upper": 4.8e8}, "reject": [_GATE]},
    "seq-tis": "seq-tis",
}
"""The host's mode, and the correction that it is; "none", and one that the host lacks."""

if __name__ == "__main__":
    print("ANSWER", json.dumps(answers()))
