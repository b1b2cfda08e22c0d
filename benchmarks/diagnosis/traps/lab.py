"""Responses of the embedded engine in bf16, and what the trainer says about them in fp32."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diagnosis.traps.dumps import with_columns
from diagnosis.traps.faults import Draw, drawing
from diagnosis.traps.language import END, Language
from diagnosis.traps.models import Trained, Weights, build, trained
from diagnosis.traps.scoring import dump_of, score, shifted_experts
from megatron_rc.analyze.chunk import Chunk
from megatron_rc.engine import Sample, SamplingParams
from megatron_rc.rollout.embedded.engine import EmbeddedEngine
from megatron_rc.rollout.embedded.model import weight_slots

PROMPTS, RESPONSES, PROMPT_LENGTH, LENGTH = 112, 2, 24, 160
"""About 30,000 tokens: most responses end at ``LENGTH``, some by themselves."""
STEPS = 4
SERVERS = np.array(["a", "b", "c", "d"])
NEWEST = -1
"""Index of the newest version, the trainer's."""


class Lab:
    """Makes dumps of one seed; the seed decides prompts and draws, never the models."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.language = Language()
        self.prompts = self.language.prompts(1_000_000 + seed, PROMPTS, PROMPT_LENGTH)

    @functools.cached_property
    def dense(self) -> Trained:
        return trained("dense", self.folder)

    @functools.cached_property
    def moe(self) -> Trained:
        return trained("moe", self.folder)

    @functools.cached_property
    def trainer(self) -> Any:
        """The dense model with the newest weights, fp32."""
        return build(self.dense.config, self.dense.versions[NEWEST])

    @functools.cached_property
    def healthy(self) -> list[Sample]:
        return self.sample()

    @functools.cached_property
    def healthy_dump(self) -> Chunk:
        return self.dump(self.healthy)

    def sample(
        self,
        *,
        model: Trained | None = None,
        weights: Weights | None = None,
        prompts: Sequence[Sequence[int]] | None = None,
        draw: Draw | None = None,
        routes: bool = False,
        n: int = RESPONSES,
        **sampling: Any,
    ) -> list[Sample]:
        """``n`` responses per prompt.

        Args:
            weights: those of the sampler; None: the newest.
            draw: how a faulty engine draws its tokens.
            sampling: of SamplingParams.
        """
        model = model or self.dense
        engine = EmbeddedEngine(model.config, dtype="bf16", device="cpu", return_routes=routes)
        engine.update_weights(weight_slots(build(model.config, weights or model.versions[NEWEST])).items(), 0)
        params = SamplingParams(max_new_tokens=LENGTH, stop_token_ids=(END,), **sampling)
        first = 100_000 * (self.seed + 1)
        prompts = prompts or self.prompts
        with drawing(draw):
            return engine.generate(prompts, params, n=n, seeds=range(first, first + n * len(prompts)))

    def dump(self, samples: Sequence[Sample], *, model: Any = None, **scoring: Any) -> Chunk:
        """The dump of some samples; ``scoring``: of ``score``."""
        scores = score(model or self.trainer, samples, **scoring)
        order = np.arange(len(samples))
        step = order * STEPS // order.size
        made = dump_of(
            samples,
            scores,
            **{"step": step, "syncs": step, "group": order // RESPONSES, "server": SERVERS[order % SERVERS.size]},
            finish_reason=np.array([s.finish_reason for s in samples]),
            cached_tokens=np.zeros_like(order),
        )
        routes = scores.routes
        return made if routes is None else with_columns(made, routes_shifted=shifted_experts(routes, samples))
