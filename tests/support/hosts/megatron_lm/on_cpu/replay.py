"""Rollouts of an earlier run of train_rl.py in the place of its inference engine: `--spec replay layer`.

RECORDED names the folder of that run, where megatron/rl has written them (its LANGRL_LOG_DIR).
"""

import json
import os
from pathlib import Path
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.rl import rl_utils
from megatron.rl.types import RolloutGroup, TokenRollout
from packed_layer import layer


def recorded(*args: Any) -> tuple[list[RolloutGroup], dict[str, Any]]:
    """The rollouts of this iteration; the requests behind them are not known any more."""
    iteration = rl_utils.get_args().curr_iteration
    (path,) = Path(os.environ["RECORDED"]).glob(f"rollouts_rank0_iteration{iteration}_*.json")
    groups = [[TokenRollout(**rollout) for rollout in group] for group in json.loads(path.read_text())]
    for rollout in (rollout for group in groups for rollout in group):
        rollout.completion_ids = []
    return [RolloutGroup(rollouts=group) for group in groups], {}


rl_utils.get_environment_rollouts = recorded
_own_forward = GPTModel.forward
# megatron/rl always passes fp32_output, which only the module around a bf16 model takes
GPTModel.forward = lambda self, *args, fp32_output=None, **inputs: _own_forward(self, *args, **inputs)

__all__ = ["layer"]
