"""Workers and configuration of verl, patched; `sources.job` runs a function of this file next to the real verl."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import verl
from hosts.verl.stand_in import patched
from hydra import compose, initialize_config_dir
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.metric import reduce_metrics
from verl.utils.profiler import DistProfiler
from verl.utils.py_functional import rename_dict
from verl.workers.config import McoreOptimizerConfig
from verl.workers.engine.megatron.transformer_impl import MegatronEngine
from verl.workers.engine_workers import TrainingWorker

from megatron_rc.integrations.verl.refusals import refuse
from megatron_rc.integrations.verl.settings import prepared, read


class Engine:
    """An engine of verl with the real scheduler of Megatron and no model."""

    is_value_model = False

    def __init__(self) -> None:
        self.optimizer = SimpleNamespace(param_groups=[{"lr": 0.0, "weight_decay": 0.0}])
        self.optimizer_config = McoreOptimizerConfig(lr=1e-3, total_training_steps=100, lr_warmup_steps=0)
        self.lr_scheduler = MegatronEngine._build_lr_scheduler(self)
        self.used: list[float] = []

    def get_data_parallel_group(self) -> Any:
        return torch.distributed.group.WORLD

    def get_data_parallel_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return 0

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    @contextmanager
    def train_mode(self, **kwargs: Any) -> Iterator[None]:
        yield

    def train_batch(self, data: Any, loss_function: Any) -> dict[str, Any]:
        self.used.append(self.optimizer.param_groups[0]["lr"])
        return {"metrics": {"grad_norm": 1.0}, "loss": [0.0], "model_output": {}}

    def lr_scheduler_step(self) -> float:
        self.lr_scheduler.step(1)
        return self.optimizer.param_groups[0]["lr"]


def worker() -> Any:
    """A TrainingWorker of an actor on `Engine`."""
    made = object.__new__(TrainingWorker)
    made.config = SimpleNamespace(model_type="language_model")
    made.engine_config = SimpleNamespace(
        forward_only=False, use_dynamic_bsz=False, max_token_len_per_gpu=1, micro_batch_size_per_gpu=1,
        use_fused_kernels=False,
    )  # fmt: skip
    made.model_config, made.device_name, made.loss_fn = {}, "cpu", lambda: None
    made.engine, made.flops_counter = Engine(), None
    made.profiler = DistProfiler(rank=0, config=None, tool_config=None)
    return made


def train(made: Any, lengths: list[int]) -> dict[str, Any]:
    """Metrics of one update by two mini-batches, as the trainer process reduces them."""
    masks = torch.nested.as_nested_tensor([torch.ones(length).long() for length in lengths], layout=torch.jagged)
    data = TensorDict({"response_mask": masks}, [len(lengths)])
    tu.assign_non_tensor(data, mini_batch_size=len(lengths) // 2, epochs=1, seed=1)
    return reduce_metrics(rename_dict(made.train_mini_batch(data)["metrics"], "actor/"))


def scheduler() -> dict[str, Any]:
    """Learning rates of six updates in one go, and of three, a checkpoint, and three more."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/x", rank=0, world_size=1)
    settings = json.dumps({"lr_rule": {"rule": "length_decay", "decay_period": 2}})
    lengths = [[4, 8], [4, 8], [6, 8], [4, 4], [4, 12], [8, 8]]
    with patched(settings):
        whole = worker()
        metrics = [train(whole, each) for each in lengths]
        first = worker()
        for each in lengths[:3]:
            train(first, each)
        saved = first.engine.lr_scheduler.state_dict()
    with patched(settings):
        second = worker()
        second.engine.lr_scheduler.load_state_dict(saved)
        resumed = [train(second, each) for each in lengths[3:]]
    own = worker()
    train(own, lengths[0])
    return {
        "whole": whole.engine.used, "first": first.engine.used, "second": second.engine.used, "own": own.engine.used,
        "metrics": [_numbers(each) for each in metrics], "resumed": [_numbers(each) for each in resumed],
        "own_state": sorted(own.engine.lr_scheduler.state_dict()), "state": sorted(saved),
    }  # fmt: skip


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if "lr" in name}


def configurations() -> dict[str, str]:
    """Overrides of verl's own configuration -> the refusal, "" for none."""
    answers = {}
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer/config"), version_base=None):
        for settings, overrides in CONFIGURATIONS:
            composed = compose("ppo_trainer", overrides=overrides)
            try:
                refuse(prepared(read(settings)), composed)
                refusal = ""
            except ValueError as error:
                refusal = str(error)
            answers[" ".join([settings, *overrides])] = refusal
    return answers


LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode=megatron_rc"
BYPASSED = "algorithm.rollout_correction.bypass_mode=True"
CONFIGURATIONS = [
    ("{correction: token-tis}", []),
    ("{correction: token-tis}", [LOSS]),
    ("{correction: {old: rollout}}", [LOSS, BYPASSED]),
    ("{correction: {old: rollout}}", [LOSS]),
    ("{correction: token-tis}", [BYPASSED]),
    ("{correction: token-tis}", ["algorithm.rollout_correction.rollout_is=token"]),
    ("{lr_rule: length_decay}", []),
]


def answers() -> dict[str, Any]:
    """Answers by name of the function."""
    return {function.__name__: function() for function in (scheduler, configurations)}
