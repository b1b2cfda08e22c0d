"""The real slime and miles: their modules imported from a source tree, with what they import and do not use stubbed."""

import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from hosts.absent import Absent

VARIABLES = {"slime": "SLIME_DIR", "miles": "MILES_DIR"}
UNUSED = ("ray", "httpx", "torch_memory_saver", "wandb", "sglang", "sglang_router", "pybase64")


def folder(host: str) -> Path | None:
    """The source tree of a host, as its variable names it."""
    return Path(os.environ[VARIABLES[host]]) if os.environ.get(VARIABLES[host]) else None


def tree(host: str) -> Path:
    """The source tree of a host; skips the test where none is named."""
    import pytest  # which the environments of the hosts may not have

    found = folder(host)
    if found is None:
        pytest.skip(f"{VARIABLES[host]} names no source tree of {host}")
    return found


def modules(host: str) -> Namespace:
    """policy_loss_function, reducer(batch, args), tis and set_up() of the real host; for a process of its own."""
    # what is not installed here is looked for last
    if not any(isinstance(finder, Absent) for finder in sys.meta_path):
        sys.meta_path.append(Absent(UNUSED))
    sys.path.insert(0, str(folder(host)))
    if host == "slime":
        from slime.backends.megatron_utils import cp_utils, loss

        def reducer(batch: dict[str, Any], args: Namespace) -> Any:
            keys = ("total_lengths", "response_lengths", "loss_masks", "rollout_mask_sums")
            return cp_utils.get_sum_of_sample_mean(*(batch[key] for key in keys), args.calculate_per_token_loss)

        return Namespace(policy_loss=loss.policy_loss_function, reducer=reducer, set_up=lambda: None)

    from megatron.core import parallel_state
    from miles.backends.training_utils import cp_utils, parallel
    from miles.backends.training_utils.loss_hub import losses
    from miles.utils.ft_utils.process_group_utils import GroupInfo

    def info(group: Any) -> Any:
        return GroupInfo(rank=group.rank(), size=group.size(), group=group)

    def set_up() -> None:
        groups = {
            "intra_dp": info(parallel_state.get_data_parallel_group()),
            "intra_dp_cp": info(parallel_state.get_data_parallel_group(with_context_parallel=True)),
            "cp": info(parallel_state.get_context_parallel_group()),
            "tp": info(parallel_state.get_tensor_model_parallel_group()),
            **dict.fromkeys(("pp", "ep", "etp", "indep_dp"), GroupInfo(rank=0, size=1, group=None)),
        }
        parallel.set_parallel_state(parallel.ParallelState(**groups))

    def miles_reducer(batch: dict[str, Any], args: Namespace) -> Any:
        lengths = (batch[key] for key in ("total_lengths", "response_lengths", "loss_masks"))
        rest = (args.calculate_per_token_loss, args.qkv_format, batch["max_seq_lens"])
        return cp_utils.get_sum_of_sample_mean(*lengths, *rest, denominators=batch["rollout_mask_sums"])

    return Namespace(policy_loss=losses.policy_loss_function, reducer=miles_reducer, set_up=set_up)
