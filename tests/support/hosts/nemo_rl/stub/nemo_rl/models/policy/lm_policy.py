"""A policy whose workers are objects of this process; `seen` has the data and the loss of every update."""

import importlib

from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY


class Policy:
    def __init__(
        self, cluster, config, tokenizer, name_prefix="lm_policy", workers_per_node=None, init_optimizer=True,
        weights_path=None, optimizer_path=None, init_reference_model=True, processor=None,
        worker_extension_cls_fqn=None, skip_weight_load=False,
    ):  # fmt: skip
        self.config, self.seen, self.workers = config, [], []
        if worker_extension_cls_fqn is not None:
            self.python = ACTOR_ENVIRONMENT_REGISTRY[worker_extension_cls_fqn]
            module, name = worker_extension_cls_fqn.rsplit(".", 1)
            cls = getattr(importlib.import_module(module), name).of
            self.workers = [cls(config, tokenizer, worker_sharding_annotations=None)]

    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None, timer=None, check_dim_skip_keys=None):
        self.seen.append({"data": dict(data), "loss_fn": loss_fn, "eval_mode": eval_mode, "timer": timer})
        if data.get("fails"):
            raise RuntimeError("a worker died")
        rates = [worker.scheduler.optimizer.param_groups[0]["lr"] for worker in self.workers]
        for worker in self.workers:
            worker.scheduler.step(increment=1)
        return {"loss": 0.0, "all_mb_metrics": {"lr": rates, "loss": [0.25, 0.5]}}

    def run_all_workers_single_data(self, method_name, *args, **kwargs):
        return [getattr(worker, method_name)(*args, **kwargs) for worker in self.workers]
