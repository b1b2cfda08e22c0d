"""All rows of one checkpoint."""

import statistics
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from gradients.collect import ESTIMATORS, Bench
from gradients.moments import Moments, Products, jackknife_error
from gradients.rows import MEASURED, Row

DIRECTIONS = 2
"""Gradients of single batches along which the curvature is measured."""


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
        reach = bench.step_length()
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
    bench: Bench, *, batches: int, draws: int, curvature_batches: int, lags: Sequence[int | None]
) -> Iterator[Row]:
    """The rows of exact rollouts, of the run's own (lag None) and of those of younger weights."""
    started = time.process_time()
    truth = Truth(bench, batches, draws, curvature_batches)
    print(
        f"exact gradient: norm {truth.moments.exact**0.5:.3g}, halves' cosine {truth.halves_cosine:.2f}, curvature "
        f"{truth.slope_along:.3g} along it, {truth.slope_of_batches:.3g} along batches, lr {truth.lr:.3g}, "
        f"{time.process_time() - started:.0f} CPU seconds"
    )
    _, metrics = bench.gradient(bench.exact_batch(0, 0), ESTIMATORS["none"])
    yield _row(bench, truth, "exact", truth.single, [metrics], 0)
    for lag in lags:
        rollouts = [bench.rollout_batch(number, lag) for number in range(batches)]
        versions = torch.cat([rollout.weight_versions[rollout.loss_mask] for rollout in rollouts])
        measured_lag = bench.version - round(float(versions.double().mean()))
        pair: list[dict[str, float]] = []
        for name, correction in ESTIMATORS.items():
            gradients, metrics_of = zip(*(bench.gradient(rollout, correction) for rollout in rollouts), strict=True)
            pair = pair or list(metrics_of)
            yield _row(bench, truth, name, torch.stack(gradients), metrics_of, measured_lag, pair)
        print(f"lag {measured_lag}: {time.process_time() - started:.0f} CPU seconds")


def _row(
    bench: Bench,
    truth: Truth,
    name: str,
    gradients: Tensor,
    metrics: Sequence[dict[str, float]],
    lag: int,
    pair: Sequence[dict[str, float]] | None = None,
) -> Row:
    """``pair``: metrics of an estimator with an old pass, which measures the gap before the update."""
    products = Products.of(gradients, truth.rows)
    found, exact = products.moments(), truth.moments
    a, b, c = found.terms(truth.lr, truth.curvature)

    def mean(records: Sequence[dict[str, float]], *names: str) -> float:
        return statistics.fmean(next(r[n] for n in names if n in r) for r in records)

    return Row(
        seed=bench.job.settings.train.seed,
        step=bench.job.progress.step,
        lag=lag,
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
