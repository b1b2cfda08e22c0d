"""Gradients and rows at a checkpoint of a run: of exact rollouts, and of the run's own under every correction."""

import dataclasses
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from gradients.moments import Moments, Products, jackknife_error
from gradients.rows import MEASURED, Row
from megatron_rc.batch import TokenBatch
from megatron_rc.correction.settings import PRESETS, RolloutCorrection, Weight
from megatron_rc.jobs import run
from megatron_rc.rollout.embedded.engine import EmbeddedEngine
from megatron_rc.rollout.perturb import perturbed
from megatron_rc.settings.job import JobSettings
from megatron_rc.training.loop import Job
from megatron_rc.training.step.reinforce import StepSettings, StepState, reinforce_step
from megatron_rc.training.step.sampling import Sampler
from megatron_rc.training.step.seeds import seed_of

ESTIMATORS: dict[str, RolloutCorrection] = {
    "none": PRESETS["none"].correction,
    "none, old: rollout": RolloutCorrection(old="rollout"),
    # without a bound that acts: unbiased, and what its variance costs
    "sequence IS": RolloutCorrection(Weight(level="sequence", upper=math.inf)),
    **{name: preset.correction for name, preset in PRESETS.items() if name != "none"},
}
GAPS: dict[str, dict[str, Any]] = {
    **{f"fixed noise {scale}": {"amplify": scale} for scale in (0.2, 0.4)},
    **{name: {"quantize": name} for name in ("int8", "int4-128")},
}
"""What `perturbed` does to the trainer's own weights before they sample."""
FIRST_PROMPT = 10**7
"""Number of the first prompt in the training stream, beyond those of any run."""
ADAM_STEP = 0.43
"""Root mean square of the entries of a step of Adam over the learning rate, between versions 19 and 20 of the run;
noise alone would give sqrt((1 - b) / (1 + b)) = 0.23 with b = 0.9."""
DIRECTIONS = 2
"""Gradients of single batches along which the curvature is measured."""


class Bench:
    """The state of a run at one of its checkpoints, and gradients there."""

    def __init__(self, job: Job, path: Path) -> None:
        job.restore(path)
        self.job, self.policy, self.path = job, job.policy, path
        self.version = job.progress.weight_version
        self.loss = dataclasses.replace(job.settings.loss, aggregation="seq-mean-token-sum")
        self.engine = EmbeddedEngine(self.policy.hf_config, dtype="fp32", device=self.policy.device)
        self.sampler = dataclasses.replace(job.sampler, engine=self.engine)

    @cached_property
    def kept(self) -> dict[int, dict[str, Tensor]]:
        """The weights that a run with rollout.lag keeps, by version and Hugging Face name."""
        extra, held = self.path / "extra.safetensors", {}
        for key, tensor in load_file(str(extra)).items() if extra.exists() else ():
            if key.startswith("queue/"):
                _, version, name = key.split("/", 2)
                held.setdefault(int(version), {})[name] = tensor
        return held

    def exact_batch(self, number: int, draw: int) -> TokenBatch:
        """Answers of the trainer's own weights to the prompts of that number."""
        self.engine.update_weights(self.policy.export(), self.version)
        return self._batch(self.sampler, number, draw)

    def rollout_batch(self, number: int, gap: int | str | None) -> TokenBatch:
        """Answers as the run samples them, of the weights ``gap`` updates before, or of the trainer's, perturbed."""
        if gap is None:
            return self._batch(self.job.sampler, number, draw=-1)
        if isinstance(gap, int):
            self.engine.update_weights(self.kept[self.version - gap].items(), self.version - gap)
        else:
            self.engine.update_weights(perturbed(self.policy.export(), noise="fixed", **GAPS[gap]), self.version)
        return self._batch(self.sampler, number, draw=-1)

    def gradient(self, batch: TokenBatch, correction: RolloutCorrection) -> tuple[Tensor, dict[str, float]]:
        """([P] the estimate of grad J, metrics) that one step of the run would follow.

        g = (1 / S) sum_i A_i sum_t w_t grad log pi(y_t), over all S responses: with answers of pi and no weights it is
        unbiased. A run with token-mean divides by the tokens of its batch instead, a positive factor.
        """
        train = self.job.settings.train
        of_method = next((preset.loss for preset in PRESETS.values() if preset.correction == correction), {})
        loss = dataclasses.replace(self.loss, **of_method)
        settings = StepSettings(correction=correction, loss=loss, train=train, max_nonfinite_share=0.0, take_step=False)
        result = reinforce_step(self.policy, batch, settings, StepState(version=self.version))
        # the loss is a mean over the responses of groups with unequal rewards; all others have advantage 0
        share = 1 - result.metrics["groups/equal_reward"]
        gradient = self.policy.gradient()
        return (-share * gradient if result.metrics["updates"] else torch.zeros_like(gradient)), result.metrics

    def exact_gradient(self, number: int, draws: Iterable[int]) -> Tensor:
        """[P] mean over several exact batches with the same prompts."""
        rows = [self.gradient(self.exact_batch(number, draw), ESTIMATORS["none"])[0] for draw in draws]
        return torch.stack(rows).mean(0)

    def slopes(self, direction: Tensor, reach: float, numbers: Iterable[int]) -> Tensor:
        """[len(numbers)] curvature of J along ``direction`` in each batch of prompts.

        u' H u = <u, g(theta + reach u) - g(theta - reach u)> / (2 reach), u of length 1, both gradients from exact
        answers with the same random numbers.
        """
        unit = direction / direction.norm()
        ends = []
        for side in (1, -1):
            with self.policy.moved(side * reach * unit):
                ends.append(torch.stack([unit @ self.exact_gradient(number, [-2]) for number in numbers]))
        return (ends[0] - ends[1]) / (2 * reach)

    def _batch(self, sampler: Sampler, number: int, draw: int) -> TokenBatch:
        rollout = self.job.settings.rollout
        count, n = rollout.prompts_per_step, rollout.samples_per_prompt
        prompts = self.job.task.prompts(FIRST_PROMPT + number * count, count)
        seeds = [seed_of("gradient", self.job.settings.train.seed, number, draw, i) for i in range(count * n)]
        sampled = sampler.sample(prompts, n, seeds)
        return TokenBatch.from_samples(sampled.samples, sampler.params, rewards=sampled.rewards, groups=sampled.groups)


@contextmanager
def opened(settings: JobSettings, path: Path, scratch: Path) -> Iterator[Bench]:
    """The run with these ``settings`` at the checkpoint ``path``; what a job writes goes to ``scratch``."""
    with run.opened(dataclasses.replace(settings, output=str(scratch)), fresh=True, dump=False) as job:
        assert job
        bench = Bench(job, path)
        with closing(bench.engine):
            yield bench


class Truth:
    """The exact gradient, the curvature there, and the learning rate of a step as long as one of the run."""

    def __init__(self, bench: Bench, batches: int, draws: int, curvature_batches: int) -> None:
        numbers = range(batches)
        self.rows = torch.stack([bench.exact_gradient(number, range(1, draws + 1)) for number in numbers])
        # draw 0 is not among those of the truth: exact rollouts are one more estimator, without bias
        self.single = torch.stack([bench.exact_gradient(number, [0]) for number in numbers])
        halves = self.rows[0::2].mean(0), self.rows[1::2].mean(0)
        self.halves_cosine = float(torch.cosine_similarity(*halves, dim=0))
        self.moments = Products.of(self.single, self.rows).moments()
        # the length of a step of Adam in this run
        reach = float(ADAM_STEP * bench.policy.lr * self.rows.shape[1] ** 0.5)
        self.lr = reach / self.moments.square**0.5
        others = range(batches, batches + curvature_batches)
        along = bench.slopes(self.rows.mean(0), reach, others).numpy()
        each = [bench.slopes(self.single[i], reach, others).numpy() for i in range(DIRECTIONS)]
        slopes = np.stack([along, np.mean(each, axis=0)])
        self.slope_along, self.slope_of_batches = slopes.mean(axis=1).tolist()
        worst = slopes[int(np.abs(slopes.mean(axis=1)).argmax())]
        self.curvature = abs(float(worst.mean()))
        self.curvature_error = jackknife_error(curvature_batches, lambda c: float((c @ worst) / c.sum()))


def rows_of(
    bench: Bench, *, batches: int, draws: int, curvature_batches: int, gaps: Sequence[int | str | None]
) -> Iterator[Row]:
    """The rows of exact rollouts and of those of `Bench.rollout_batch`."""
    started = time.process_time()
    truth = Truth(bench, batches, draws, curvature_batches)
    print(
        f"exact gradient: norm {truth.moments.exact**0.5:.3g}, halves' cosine {truth.halves_cosine:.2f}, curvature "
        f"{truth.slope_along:.3g} along it, {truth.slope_of_batches:.3g} along batches, lr {truth.lr:.3g}, "
        f"{time.process_time() - started:.0f} CPU seconds"
    )
    _, metrics = bench.gradient(bench.exact_batch(0, 0), ESTIMATORS["none"])
    yield _row(bench, truth, "exact", truth.single, [metrics], "")
    for gap in gaps:
        rollouts = [bench.rollout_batch(number, gap) for number in range(batches)]
        versions = torch.cat([rollout.weight_versions[rollout.loss_mask] for rollout in rollouts])
        lag = bench.version - round(float(versions.double().mean()))
        name_of_gap = gap if isinstance(gap, str) else f"lag {lag}"
        pair: list[dict[str, float]] = []
        for name, correction in ESTIMATORS.items():
            gradients, metrics_of = zip(*(bench.gradient(rollout, correction) for rollout in rollouts), strict=True)
            pair = pair or list(metrics_of)
            yield _row(bench, truth, name, torch.stack(gradients), metrics_of, name_of_gap, pair)
        print(f"{name_of_gap}: {time.process_time() - started:.0f} CPU seconds")


Records = Sequence[dict[str, float]]


def _row(
    bench: Bench, truth: Truth, name: str, gradients: Tensor, metrics: Records, gap: str, pair: Records = ()
) -> Row:
    """``pair``: metrics of an estimator with an old pass, which measures the gap before the update."""
    products = Products.of(gradients, truth.rows)
    found, exact = products.moments(), truth.moments
    a, b, c = found.terms(truth.lr, truth.curvature)

    def mean(records: Records, *names: str) -> float:
        return statistics.fmean(next(r[n] for n in names if n in r) for r in records)

    return Row(
        run=0,
        step=bench.job.progress.step,
        gap=gap,
        estimator=name,
        k3=mean(pair or metrics, "old/k3"),
        length=mean(metrics, "response_length/mean"),
        dropped=mean(metrics, "old/masked_token", "current/masked_token"),
        **{field: _measured(field, found, exact, exact) for field in MEASURED},
        **{
            f"{field}_error": products.error(lambda m, field=field: _measured(field, m, m, exact)) for field in MEASURED
        },
        **{"a": a, "b": b, "c": c, "lr": truth.lr, "curvature": truth.curvature},
        curvature_error=truth.curvature_error,
        exact_norm=max(exact.exact, 0.0) ** 0.5,
        halves_cosine=truth.halves_cosine,
    )


def _measured(field: str, moments: Moments, scale: Moments, exact: Moments) -> float:
    """A field of MEASURED: squares as shares of ||g*||^2 of ``scale``, progress as that of exact rollouts."""
    if field == "progress":
        return moments.progress(exact)
    value: float = getattr(moments, field)
    return value / scale.exact if field in ("squared_bias", "variance") else value
