"""What most ranks import, in the order that a job imports it: the emulation of CUDA comes before Megatron-Core."""

from __future__ import annotations

from megatron_rc.jobs.run import quiet_imports
from megatron_rc.training import emulation

quiet_imports()
emulation.emulate_cuda_on_cpu()

import megatron_rc.rollout.embedded.engine  # noqa: E402
import megatron_rc.training.loop  # noqa: E402, F401
