"""The log of a host whose own loss calls the hook that `enable` has set.

``SLIME_DIR=<source tree> python tests/support/hosts/slime/excerpt.py slime`` (``MILES_DIR``, ``miles``) prints it.
"""

import logging
import sys
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

sys.path.append(str(Path(__file__).parents[2]))

from hosts.slime import sources
from hosts.slime.cases import Case, batch_of, hosts_own
from hosts.slime.host import hooks

from megatron_rc.integrations import slime

YAML = {"correction": "token-tis", "lr_rule": {"rule": "length_decay", "decay_period": 2}}


def first_steps(rank: int, host: str) -> list[dict[str, float]]:
    """What the host's policy_loss_function reports in the first steps of three rollouts, in a process of its own."""
    parallel_state.initialize_model_parallel()
    module = sources.modules(host)
    module.set_up()
    # the module that calls enable; it needs Megatron's own training loop
    name = f"{host}.backends.megatron_utils.initialize"
    sys.modules[name] = ModuleType(name)
    args = hosts_own(Case(), host, megatron_rc=YAML)
    slime.enable(args)
    model, batch = [torch.nn.Linear(1, 1)], batch_of(Case())
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=1.0)
    scheduler = OptimizerParamScheduler(optimizer, 0.0, 1e-6, 0.0, 0, 10_000, "constant", 0.0, 0.0, 0, "constant")
    logs = []
    for rollout_id in range(3):
        hooks.before_train_step(args, rollout_id, 0, model, optimizer, scheduler)
        given = {key: value for key, value in batch.items() if key != "logits"}
        _, log = module.policy_loss(args, given, batch["logits"].clone(), module.reducer(batch, args))
        scheduler.step(increment=4)
        samples = len(batch["response_lengths"])
        # the host divides the sum over samples by their number
        logs.append({key: float(value) / samples for key, value in log.items()})
    return logs


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for step, log in enumerate(first_steps(0, sys.argv[1])):
        print(f"step {step}: " + str({f"train/{name}": round(value, 4) for name, value in log.items()}))
