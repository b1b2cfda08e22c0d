"""Checkpoints by megatron.core.dist_checkpointing: a folder is either complete or ignored."""

import json
import shutil
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rc.files import read_json, replace_folder
from megatron_rc.training.policy import Policy
from megatron_rc.training.progress import STATE, Progress, complete


def save(
    folder: Path,
    policy: Policy,
    progress: Progress,
    *,
    extra: dict[str, torch.Tensor],
    keep: int,
    keep_steps: Collection[int] = (),
    write_more: Callable[[Path], None] | None = None,
) -> None:
    """Write ``folder/<phase>-<step>``; delete others but the newest ``keep`` and ``keep_steps``; a collective.

    Args:
        extra: tensors to store with the model, such as queued rollout weights; the same on every rank.
        write_more: called on every rank with the folder of the checkpoint, writes what else it holds.
    """
    target, partial = folder / progress.name, folder / f".partial-{progress.name}"
    if policy.groups.is_writer:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    try:
        if write_more:
            write_more(partial)
        dist_checkpointing.save(_sharded_state(policy, is_loading=False), str(partial))
        if policy.groups.is_writer:
            if extra:
                save_file({k: v.contiguous().cpu() for k, v in extra.items()}, str(partial / "extra.safetensors"))
            state = {"progress": asdict(progress), "phase_updates": policy.phase_updates}
            (partial / STATE).write_text(json.dumps(state))
            replace_folder(partial, target)
    except (Exception, CheckpointException) as error:  # which is no Exception
        shutil.rmtree(partial, ignore_errors=True)  # the disk may be full
        if isinstance(error, CheckpointException):
            raise OSError(f"checkpoint {target} cannot be written: {_reason(error)}") from None
        raise
    if policy.groups.is_writer:
        always = {Progress("rl", step).name for step in keep_steps}
        for old in [path for path in complete(folder) if path.name not in always][:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    dist.barrier()


def load(path: Path, policy: Policy) -> dict[str, torch.Tensor]:
    """Load all states in place and return the ``extra`` tensors of `save`; a collective of all processes.

    Raises ValueError when the checkpoint has tensors of another shape than the model.
    """
    policy.phase_updates = read_json(path / STATE)["phase_updates"]
    try:
        state = dist_checkpointing.load(_sharded_state(policy, is_loading=True), str(path))
    except (CheckpointException, CheckpointingException, KeyError, RuntimeError) as error:
        raise ValueError(f"checkpoint {path} does not fit this model: {_reason(error)}") from None
    for index, chunk in enumerate(policy.chunks):
        chunk.module.load_state_dict(state[f"model{index}"], strict=True)
    policy.load_phase(state.get("optimizer"), state["scheduler"])
    torch.set_rng_state(state["rng"]["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["rng"]["tracker"])
    extra = path / "extra.safetensors"
    return load_file(str(extra)) if extra.exists() else {}


def _sharded_state(policy: Policy, *, is_loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for index, chunk in enumerate(policy.chunks):
        state[f"model{index}"] = chunk.module.sharded_state_dict(prefix=f"model{index}." if index else "")
    if policy.phase_updates:
        # before the first update of its phase an optimizer has no state to load into
        model_state = state["model0"] if len(policy.chunks) == 1 else dict(state)
        state["optimizer"] = policy.optimizer.sharded_state_dict(model_state, is_loading=is_loading)
    state["scheduler"] = policy.scheduler.state_dict()
    generators = {"torch": torch.get_rng_state(), "tracker": tensor_parallel.get_cuda_rng_tracker().get_states()}
    state["rng"] = ShardedObject("rng", generators, (policy.groups.world_size,), (policy.groups.rank,))
    return state


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line if len(line) <= 300 else f"{line[:297]}..."
