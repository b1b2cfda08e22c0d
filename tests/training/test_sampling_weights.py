"""Kept weights of older versions: their log-probs are those of the time when they were loaded, under every layout."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from jobs import DENSE
from torch import Tensor

from megatron_rc.batch import TokenBatch
from megatron_rc.correction.settings import RolloutCorrection, Weight
from megatron_rc.engine import Sample, SamplingParams
from megatron_rc.settings.loss import LossSettings
from megatron_rc.settings.model import ModelSettings, ParallelSettings
from megatron_rc.settings.train import TrainSettings
from megatron_rc.training import groups
from megatron_rc.training.groups import SharedError
from megatron_rc.training.microbatches import split_rows
from megatron_rc.training.policy import Policy
from megatron_rc.training.sampling_weights import SamplingWeights
from megatron_rc.training.step.reinforce import StepSettings, StepState, reinforce_step

TRAINED = 2
"""Version that the batch trains; versions 0 to 2 sampled it, two of them within one response."""
UPPER, STALENESS_UPPER = 1.1, 1.02
TWO_FACTORS = RolloutCorrection(Weight(upper=UPPER, staleness_upper=STALENESS_UPPER))


def mixed_batch() -> TokenBatch:
    spans = [[(0, 0, 3), (1, 3, 5)], [(0, 0, 4)], [(1, 0, 3)], [(2, 0, 6)], [(1, 0, 2), (2, 2, 3)], [(0, 0, 1)]]
    samples = []
    for i, versions in enumerate(spans):
        ids = [(7 * i + 3 * t) % 20 for t in range(versions[-1][2])]
        logprobs = [-3.0 + 0.2 * math.sin(i + 5 * t) for t in range(len(ids))]
        samples.append(Sample([1, 2 + i], ids, logprobs, "stop", versions))
    rewards, groups = [0.0, 1.0, 1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1, 2, 2]  # the last group is not trained on
    return TokenBatch.from_samples(samples, SamplingParams(), rewards=rewards, groups=groups)


def steps(rank: int, layout: dict[str, int], saved: str, folder: str) -> dict[str, Any] | None:
    """Two updates with all versions kept, then the step on the mixed batch; None before the last pipeline stage."""
    parallel = ParallelSettings(**layout)
    train = TrainSettings(optimizer="sgd", micro_batches=2, clip_grad=0.0)
    policy = Policy(ModelSettings(config=DENSE), parallel, train, groups.initialize(parallel, 1))
    policy.start_phase(lr=1.0, min_lr=0.0, warmup_steps=0, total_steps=10, decay_style="constant")
    batch, kept = mixed_batch(), SamplingWeights(policy, oldest=TRAINED)
    whole = split_rows(batch, [range(batch.num_sequences)])

    def step(correction: RolloutCorrection, version: int | None) -> Any:
        settings = StepSettings(correction=correction, loss=LossSettings(), train=train, max_nonfinite_share=0.0)
        return reinforce_step(policy, batch, settings, StepState(version=version, sampling_weights=kept))

    then = []
    for version in range(TRAINED + 1):
        kept.keep(version)
        then.append(policy.logprobs(whole)[0])
        if version < TRAINED:
            step(RolloutCorrection(), None)
    if saved:
        kept.save(Path(saved), TRAINED)
    later = [kept.logprobs(version, whole) for version in kept.versions]
    assert torch.equal(policy.logprobs(whole)[0], then[-1]), "the trained weights are loaded again"
    result = step(TWO_FACTORS, TRAINED)
    kept.keep(TRAINED + 1)
    assert kept.versions == [1, 2, 3], "no rollout of version 0 can arrive any more"
    if folder:
        kept.load(Path(folder))
        later = [*(kept.logprobs(version, whole) for version in (0, 1)), later[-1]]
    if not policy.groups.last_stage:
        return None
    weights = torch.full((batch.num_tokens,), math.nan)
    counted = [i for i, s in enumerate(result.share.sequences) if s >= 0]
    rows = batch.rows_of([result.share.sequences[i] for i in counted])
    weights[rows] = result.columns["weights"][result.share.batch.rows_of(counted)]
    return {"then": then, "later": later, "weights": weights, "metrics": result.metrics}


def check(ranks: list[dict[str, Any] | None], *, exact: bool) -> list[Tensor]:
    """Compare what the ranks of one run computed with the definition; returns the log-probs of each version."""
    batch, found = mixed_batch(), [rank for rank in ranks if rank is not None]
    mask, mu = batch.loss_mask, batch.rollout_logprobs
    then = found[0]["then"]
    for rank, version in itertools.product(found, range(TRAINED + 1)):
        torch.testing.assert_close(rank["later"][version], then[version], rtol=0, atol=0 if exact else 1e-5)
    sampling = torch.stack(then).gather(0, batch.weight_versions.clamp(min=0).long()[None])[0]
    mismatch, staleness = (sampling - mu)[mask].double(), (then[-1] - sampling)[mask].double()
    expected = mismatch.exp().clamp(max=UPPER) * staleness.exp().clamp(max=STALENESS_UPPER)
    weights = torch.stack([rank["weights"] for rank in found]).nanmean(0)[mask].double()
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=0)
    older = (batch.weight_versions < TRAINED)[mask]
    assert (staleness[~older] == 0).all() and (staleness[older].abs() > 1e-3).all()
    assert 0 < (staleness > math.log(STALENESS_UPPER)).sum() < older.sum()
    for rank, (name, log) in itertools.product(found, (("mismatch", mismatch), ("staleness", staleness))):
        metrics = rank["metrics"]
        assert metrics[f"old/{name}_k3"] == pytest.approx((log.expm1() - log).mean().item(), rel=1e-3)
        rho = log.exp()
        ess = (rho.sum() ** 2 / len(rho) / rho.square().sum()).item()
        assert metrics[f"old/{name}_ess"] == pytest.approx(ess, rel=1e-5)
    return then


@pytest.mark.parametrize("layout", ["pipeline", "data"])
def test_the_step_is_that_of_the_definition_on_two_processes(layout: str) -> None:
    check(run_ranks(2, steps, {} if layout == "data" else {layout: 2}, "", ""), exact=True)


def test_what_two_tensor_parallel_processes_save_one_process_loads(tmp_path: Path) -> None:
    then = check(run_ranks(2, steps, {"tensor": 2}, str(tmp_path), ""), exact=True)
    alone = check(run_ranks(1, steps, {}, "", str(tmp_path)), exact=False)
    assert max((a - b).abs().max() for a, b in zip(then, alone, strict=True)) < 1e-5


def test_stale_samples_without_those_log_probs_are_refused_on_every_process() -> None:
    samples = [Sample([1], [2, 3], [-1.0, -2.0], "stop", [(4, 0, 2)]) for _ in range(2)]
    batch = TokenBatch.from_samples(samples, SamplingParams(), rewards=[0.0, 1.0], groups=[0, 0])
    policy: Any = None
    train = TrainSettings()
    settings = StepSettings(correction=TWO_FACTORS, loss=LossSettings(), train=train, max_nonfinite_share=0.0)
    with pytest.raises(SharedError, match="the batch holds samples of older weights, and neither copies of"):
        reinforce_step(policy, batch, settings, StepState(version=5))
