"""A run at learning rate 0: the same weights are sent again and again, and the gap must not grow."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from megatron_rc.analyze import chunk
from megatron_rc.doctor.registry import Finding, Registry, Undecided, error, good, warning
from megatron_rc.doctor.server.facts import ServerFacts, TrainerFacts
from megatron_rc.doctor.server.probes import BROKEN_K3
from megatron_rc.doctor.server.scores import FINE_K3, Logprobs, fresh_gap, k3
from megatron_rc.rollout.sglang import control
from megatron_rc.rollout.sglang.engine import SGLangEngine, alone
from megatron_rc.rollout.sglang.http import Background, Server
from megatron_rc.settings.sglang import PORTABLE_TRANSPORT, TRANSPORTS, SGLangSettings

if TYPE_CHECKING:
    from megatron_rc.doctor.server.trainer_scores import TrainerModel

SYNCS: Registry[Course] = Registry("syncs")

GROWS = 4.0
"""Standard errors by which the rise of k3 over the run must differ from 0: 3e-5 by chance, in a few thousand probes."""
COMPARES = "The gap after syncs of weights that do not change"
RESTART = (
    "Restart the server and repeat: a gap that starts over at a restart is state of the engine (buffers, CUDA graphs, "
    "the prefix cache), one that stays is the conversion on the way to it."
)

CONVERSION = (
    "Compare the server's tensors with the checkpoint (POST /weights_checker), and look for a tensor that the update "
    "converts, quantises or leaves out."
)


@dataclass(frozen=True)
class Course:
    """The gap before the first sync and after each one."""

    transport: str
    """rollout.sglang.weight_sync of the syncs."""
    log_ratios: Sequence[Logprobs]
    """[1 + syncs] of [N] log pi - log mu of fresh responses, nats."""
    usual: float = FINE_K3
    """nats per token; k3 that the precision of the server explains."""

    @property
    def gaps(self) -> list[float]:
        """[1 + syncs] k3, nats per token."""
        return [k3(values) for values in self.log_ratios]

    def rise(self) -> tuple[float, float]:
        """Rise of k3 from the first sync to the last by a straight line, and its standard error."""
        terms = [chunk.k3(values) for values in self.log_ratios[1:]]
        means = np.array([float(values.mean()) for values in terms])
        errors = np.array([float(values.std()) / math.sqrt(values.size) for values in terms])
        places = np.linspace(-0.5, 0.5, means.size)
        weights = places / float(places @ places) if means.size > 1 else np.zeros(1)
        return float(weights @ means), float(np.linalg.norm(weights * errors))


def examine_syncs(
    served: ServerFacts,
    trainer: TrainerFacts,
    model: TrainerModel,
    syncs: int,
    timeout_s: float,
    usual: float = FINE_K3,
) -> list[Finding]:
    """The finding after ``syncs`` updates of a server with the weights of ``model``, which the server then keeps."""
    try:
        course = replace(measure(served, trainer, model, syncs, timeout_s), usual=usual)
    except Undecided as missing:
        return [Finding("same-weights", "note", str(missing), missing.fix, COMPARES, decided=False)]
    return SYNCS.run(course)


def measure(served: ServerFacts, trainer: TrainerFacts, model: TrainerModel, syncs: int, timeout_s: float) -> Course:
    """Sync the weights of ``model`` to a server ``syncs`` times, and score fresh responses before and after each.

    The server keeps the name that its weights had. Errors are those of ``scores.measure``.
    """

    def gap() -> Logprobs:
        return fresh_gap(served, model.rescore, model.vocab_size, timeout_s)

    log_ratios = [gap()]
    with tempfile.TemporaryDirectory() as folder:
        settings = _settings(served, trainer, folder)
        with closing(SGLangEngine(settings, model.config, agree=alone, writer=True)) as engine:
            for version in range(syncs):
                engine.update_weights(model.weights(), version)
                log_ratios.append(gap())
    with closing(Background()) as background:
        control.set_version(Server(served.url, background), served.model["weight_version"], timeout_s)
    return Course(settings.weight_sync, log_ratios)


def _settings(served: ServerFacts, trainer: TrainerFacts, folder: str) -> SGLangSettings:
    """Those of the job for this server alone; the trainer of doctor is on the CPU, where NCCL cannot broadcast."""
    settings = trainer.job.rollout.sglang if trainer.job else SGLangSettings(weight_sync=PORTABLE_TRANSPORT)
    kind = TRANSPORTS[settings.weight_sync]
    if kind.needs_devices:
        settings = replace(settings, weight_sync=PORTABLE_TRANSPORT)
    elif kind.needs_folder:
        settings = replace(settings, sync_dir=settings.sync_dir or folder)
    return replace(settings, urls=(served.url,))


@SYNCS.check
def same_weights(course: Course) -> Finding:
    """The gap after syncs of weights that do not change."""
    before, *after = course.gaps
    listed = " ".join(f"{gap:.1e}" for gap in after)
    said = (
        f"k3 of fresh responses {before:.1e} before the first sync ({course.transport}) and {listed} after "
        f"{len(after)} of the same weights"
    )
    if not np.isfinite(after).all() or max(after) > BROKEN_K3:
        if not math.isfinite(after[0]) or after[0] > BROKEN_K3:
            return error(f"the first sync brings weights that are not the trainer's; {said}", CONVERSION)
        return error(f"the gap grows although the weights do not change; {said}", RESTART)
    rise, deviation = course.rise()
    if rise > GROWS * deviation and rise > FINE_K3:
        return warning(f"the gap grows by {rise:.1e} over the run although the weights do not change; {said}", RESTART)
    if max(after) > course.usual:
        return warning(f"the gap is flat, and larger than {course.usual:.1g}; {said}", CONVERSION)
    return good(f"{said}: flat, and below {course.usual:.1g}")
