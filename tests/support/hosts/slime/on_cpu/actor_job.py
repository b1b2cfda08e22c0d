"""The training process of slime on CPU: its arguments, model, loss, optimizer and log, without Ray and SGLang.

    python actor_job.py OUT FLAGS

runs three rollouts through MegatronTrainRayActor.train and writes what slime logged to the JSON file OUT. The process
has the stand-ins of megatron_lm/on_cpu, and imports slime and the Megatron-LM that slime pins.
"""

import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[3]))

from hosts.absent import Absent
from hosts.slime import sources

if not any(isinstance(finder, Absent) for finder in sys.meta_path):
    sys.meta_path.append(Absent(sources.UNUSED))

import ray
from slime.backends.megatron_utils import actor, initialize, model
from slime.observability import logging_utils
from slime.observability.timer import Timer
from slime.utils import distributed_utils
from slime.utils.arguments import parse_args
from slime.utils.misc import Box, load_function
from slime.utils.tensor_backper import TensorBackuper

ROLLOUTS, RESPONSES, PROMPT, VOCABULARY = 3, 4, 3, 30


def rollout(number: int) -> dict[str, Any]:
    """Train data of a rollout as slime hands it to one data-parallel rank: two micro-batches of two responses."""
    draw = torch.Generator().manual_seed(number)
    lengths = torch.randint(3, 9, (RESPONSES,), generator=draw).tolist()
    return {
        "tokens": [torch.randint(3, VOCABULARY, (PROMPT + length,), generator=draw) for length in lengths],
        "rewards": torch.randn(RESPONSES, generator=draw).tolist(), "raw_reward": [0.0] * RESPONSES,
        "rollout_log_probs": [torch.randn(length, generator=draw) * 0.3 - 3.4 for length in lengths],
        "response_lengths": lengths, "total_lengths": [PROMPT + length for length in lengths],
        "loss_masks": [torch.ones(length, dtype=torch.int) for length in lengths],
        "rollout_mask_sums": torch.tensor(lengths).float(), "truncated": [0] * RESPONSES,
        "partition": list(range(RESPONSES)), "global_batch_sizes": [RESPONSES],
        "micro_batch_indices": [[0, 1], [2, 3]], "num_microbatches": [2],
    }  # fmt: skip


def started() -> Any:
    """An actor after its init, but for Ray, checkpoints and the update of SGLang's weights."""
    args = parse_args()
    dist.init_process_group("gloo")
    distributed_utils.init_gloo_group()
    args.rank, args.world_size, args.local_rank = 0, 1, 0
    numpy.__version__ = "1." + numpy.__version__  # slime asserts the numpy of its image
    initialize.init(args)
    made = object.__new__(actor.MegatronTrainRayActor)
    made.args, made.role = args, "actor"
    made.model, made.optimizer, made.opt_param_scheduler = model.setup_model_and_optimizer(args, "actor")
    made.model[0].role = "actor"
    made.weights_backuper = TensorBackuper.create(lambda: made.model[0].named_parameters(), single_tag=None)
    made.weights_backuper.backup("actor")
    made._active_model_tag = "actor"
    path = args.rollout_data_postprocess_path
    made.rollout_data_postprocess = None if path is None else load_function(path)
    made.prof = SimpleNamespace(step=lambda rollout_id: None)
    made.weight_updater = SimpleNamespace(pop_metrics=dict)
    return made


def main(out: str) -> None:
    logging.basicConfig(level=logging.INFO)
    logged: list[dict[str, Any]] = []
    logging_utils.log = lambda args, metrics, step_key: logged.append({key: float(v) for key, v in metrics.items()})
    made = started()
    Timer().start("train_wait")
    ray.get = lambda data: data
    for number in range(ROLLOUTS):
        made.train(number, [Box(rollout(number))])
    Path(out).write_text(json.dumps(logged))


if __name__ == "__main__":
    path = sys.argv.pop(1)
    main(path)
