"""What the process holds that ranks and jobs are forked from: slow imports, and the names of the test modules."""

# ruff: noqa: E402 - the emulation of CUDA comes before Megatron-Core, as in a job

import queue

import named  # noqa: F401

from megatron_rc.jobs.run import quiet_imports
from megatron_rc.training import emulation

quiet_imports()
emulation.emulate_cuda_on_cpu()

from megatron.core.dist_checkpointing.strategies import filesystem_async

import megatron_rc.cli
import megatron_rc.rollout.embedded.engine
import megatron_rc.rollout.recorded
import megatron_rc.training.loop  # noqa: F401
from megatron_rc.models.families import FAMILIES

for family in FAMILIES.values():
    family.config_class()
    family.model_class()

# Megatron starts a process of 3 s for the queue of a first checkpoint, that only its asynchronous writer needs;
# jobs that tests start as a user does, `jobs.typed_job`, have that process
filesystem_async._results_queue = queue.Queue()
